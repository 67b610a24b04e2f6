"""Update rules and sums of squares on a device: one launch for many arrays."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.arrays import Array, address_of, namespace_of, on_device_of
from mpistrat.cuda_api import launch_kernel
from mpistrat.optimizers.kernels import Kernel

__all__ = ["sums_of_squares", "update_on_device"]

_C_TYPES = {"f": "float", "d": "double"}
"""The dtypes of gradients whose squares are summed, by NumPy's character."""


@dataclass(frozen=True)
class _Storage:
    """How the weights of a dtype lie in memory, and in what a kernel computes with them."""

    stored: str
    real: str
    conversions: str = "#define WIDE(number) (number)\n#define NARROW(number) (number)\n"


# The halves by their bits, for which no header of CUDA is needed: it is not in CuPy's wheel. Both
# round to nearest even, as NumPy and ml_dtypes do.
_BITS = """\
typedef union { unsigned bits; float number; } Bits;
#define WIDE(number) wide(number)
#define NARROW(number) narrow(number)
"""
_BFLOAT16 = """\
__device__ float wide(unsigned short half) {
    Bits full;
    full.bits = (unsigned)half << 16;
    return full.number;
}
__device__ unsigned short narrow(float number) {
    Bits full;
    full.number = number;
    if (number != number) return (full.bits >> 16 & 0x8000u) | 0x7fc0u;
    return (full.bits + 0x7fffu + (full.bits >> 16 & 1u)) >> 16;
}
"""
_FLOAT16 = """\
__device__ float wide(unsigned short half) {
    Bits full, scale;
    full.bits = (half & 0x7fffu) << 13;
    scale.bits = 0x77800000u;                               /* 2^112 */
    full.number *= scale.number;                            /* subnormals too */
    if ((half & 0x7c00u) == 0x7c00u) full.bits |= 0x7f800000u;  /* infinity and NaN */
    full.bits |= (half & 0x8000u) << 16;
    return full.number;
}
__device__ unsigned short narrow(float number) {
    Bits full, shift;
    full.number = number;
    const unsigned sign = full.bits & 0x80000000u;
    unsigned half;
    full.bits ^= sign;
    if (full.bits >= 0x47800000u) {                         /* 2^16 and more, NaN */
        half = full.bits > 0x7f800000u ? 0x7e00u : 0x7c00u;
    } else if (full.bits < 0x38800000u) {                   /* below 2^-14: this sum rounds */
        shift.bits = 0x3f000000u;
        full.number += shift.number;
        half = full.bits - shift.bits;
    } else {
        half = (full.bits + 0xc8000fffu + (full.bits >> 13 & 1u)) >> 13;
    }
    return half | sign >> 16;
}
"""
_STORAGE = {
    "float32": _Storage("float", "float"),
    "float64": _Storage("double", "double"),
    "float16": _Storage("unsigned short", "float", _BITS + _FLOAT16),
    "bfloat16": _Storage("unsigned short", "float", _BITS + _BFLOAT16),
}

_THREADS = 256
_MAX_ARRAYS = 64
"""How many arrays one launch takes: their addresses travel as a parameter, of at most 4 KiB."""
_UPDATED_BY_BLOCK = 16 * _THREADS
_SQUARED_BY_BLOCK = 64 * _THREADS
"""Elements. Each thread leaves one partial sum, so blocks are larger here."""

Pair = tuple[Any, Array]
"""A `Target` and its gradient, a 1-d array of real numbers."""


def update_on_device(kernel: Kernel, numbers: Sequence[float], pairs: Sequence[Pair]) -> None:
    """Update each target by its gradient, all on one device."""
    by_dtype: dict[np.dtype, list[Pair]] = {}
    for target, gradient in pairs:
        if target.flat_weight.size:
            by_dtype.setdefault(target.flat_weight.dtype, []).append((target, gradient))
    for dtype, alike in by_dtype.items():
        code, name = update_source(kernel, dtype.name)
        real = np.float64 if _STORAGE[dtype.name].real == "double" else np.float32
        constants = [real(number) for number in numbers]
        for group in _groups(alike):
            columns = [[target.flat_weight.size for target, _ in group]]
            columns.append([address_of(gradient) for _, gradient in group])
            columns += map(
                list, zip(*(target.device_addresses for target, _ in group), strict=True)
            )
            table, num_blocks = _table(columns, _UPDATED_BY_BLOCK)
            with on_device_of(group[0][1]):
                arguments = (table, np.int32(len(group)), *constants)
                launch_kernel(code, name, sum(num_blocks), _THREADS, arguments)


def sums_of_squares(arrays: Sequence[Array]) -> list[float]:
    """Return the sum of the squares of each 1-d real array of one device, in float64."""
    # The host waits for the device once, for all arrays.
    sums = [0.0] * len(arrays)
    started = []
    for char in _C_TYPES:
        positions = [i for i, each in enumerate(arrays) if each.dtype.char == char and each.size]
        for chosen in _groups(positions):
            started.append((chosen, _start_sums([arrays[i] for i in chosen])))
    if not started:
        return sums
    xp = namespace_of(arrays[0])
    with on_device_of(arrays[0]):
        found = xp.concatenate([partial for _, (partial, _) in started]).get()
    begin = 0
    for chosen, (_, num_blocks) in started:
        for position, count in zip(chosen, num_blocks, strict=True):
            sums[position] = float(np.add.reduce(found[begin : begin + count]))
            begin += count
    return sums


def _groups(items: Sequence[Any]) -> Iterator[Sequence[Any]]:
    for begin in range(0, len(items), _MAX_ARRAYS):
        yield items[begin : begin + _MAX_ARRAYS]


def _start_sums(arrays: Sequence[Array]) -> tuple[Array, list[int]]:
    """Begin to sum; return the sum of each block, on the device, and each array's blocks."""
    columns = [[each.size for each in arrays], [address_of(each) for each in arrays]]
    table, num_blocks = _table(columns, _SQUARED_BY_BLOCK)
    xp = namespace_of(arrays[0])
    with on_device_of(arrays[0]):
        partial = xp.empty((sum(num_blocks), _THREADS), dtype=np.float64)
        code, name = squares_source(arrays[0].dtype.char)
        arguments = (table, np.int32(len(arrays)), partial)
        launch_kernel(code, name, len(partial), _THREADS, arguments)
        return partial.sum(axis=1), num_blocks


def _table(columns: Sequence[Sequence[int]], per_block: int) -> tuple[np.ndarray, list[int]]:
    """Return sizes and addresses as the kernels take them, and the number of blocks of each."""
    num_blocks = [-(-size // per_block) for size in columns[0]]
    table = np.zeros(1, _table_dtype(len(columns)))
    for row, column in zip(table["columns"][0], columns, strict=True):
        row[: len(column)] = column
    table["first_block"][0, 1 : len(num_blocks) + 1] = np.cumsum(num_blocks)
    return table, num_blocks


@functools.lru_cache
def _table_dtype(num_columns: int) -> np.dtype:
    fields = [
        ("columns", np.int64, (num_columns, _MAX_ARRAYS)),
        ("first_block", np.uint32, (_MAX_ARRAYS + 1,)),
    ]
    return np.dtype(fields, align=True)


def _source(name: str, columns: int, per_block: int, parameters: str, found: str, body: str) -> str:
    """Return a kernel whose blocks each work on a part of one array."""
    # Written so that a C compiler takes it too: the tests run it without a GPU.
    return f"""
typedef struct {{
    long long columns[{columns}][{_MAX_ARRAYS}];
    unsigned first_block[{_MAX_ARRAYS + 1}];
}} Table;

extern "C" __global__ void {name}(const Table table, const int count, {parameters}) {{
    int k = 0;
    while (k + 1 < count && blockIdx.x >= table.first_block[k + 1]) ++k;
    const long long size = table.columns[0][k];
    const long long begin = (long long)(blockIdx.x - table.first_block[k]) * {per_block};
    const long long stop = begin + {per_block} < size ? begin + {per_block} : size;
{found}
    for (long long i = begin + threadIdx.x; i < stop; i += {_THREADS}) {{
{body}
    }}"""


@functools.lru_cache
def update_source(kernel: Kernel, dtype: str) -> tuple[str, str]:
    """Return CUDA code of `kernel` for weights of a dtype, and the name of its function."""
    # Halves are computed with in float32, of which their slots are too.
    storage, name = _STORAGE[dtype], f"mpistrat_{kernel.name}_{dtype}"
    real, stored = storage.real, storage.stored
    parameters = ", ".join(f"const {real} {each}" for each in ("keep", "factor", *kernel.constants))
    found = [
        f"    const {stored} *gradients = (const {stored} *)table.columns[1][k];",
        f"    {stored} *weights = ({stored} *)table.columns[2][k];",
    ]
    for column, each in enumerate(kernel.slots, 3):
        found.append(f"    {real} *{each}_of = ({real} *)table.columns[{column}][k];")
    body = [
        f"        const {real} gradient = WIDE(gradients[i]) * factor;",
        f"        {real} weight = WIDE(weights[i]) * keep;",
        *(f"        {real} {each} = {each}_of[i];" for each in kernel.slots),
        f"        {kernel.body}",
        "        weights[i] = NARROW(weight);",
        *(f"        {each}_of[i] = {each};" for each in kernel.slots),
    ]
    num_columns = 3 + len(kernel.slots)
    text = _source(
        name, num_columns, _UPDATED_BY_BLOCK, parameters, "\n".join(found), "\n".join(body)
    )
    return storage.conversions + text + "\n}\n", name


@functools.lru_cache
def squares_source(char: str) -> tuple[str, str]:
    """Return CUDA code that leaves one sum of squares for each thread, and its function's name."""
    real, name = _C_TYPES[char], f"mpistrat_squares_{char}"
    found = f"    const {real} *numbers = (const {real} *)table.columns[1][k];\n    double sum = 0;"
    body = "        const double number = numbers[i];\n        sum += number * number;"
    text = _source(name, 2, _SQUARED_BY_BLOCK, "double *sums", found, body)
    return text + f"\n    sums[blockIdx.x * {_THREADS} + threadIdx.x] = sum;\n}}\n", name
