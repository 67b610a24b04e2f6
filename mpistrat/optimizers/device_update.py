"""Update rules and sums of squares on a device: one launch for many arrays."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import (
    Array,
    address_of,
    elementwise_kernel,
    namespace_of,
    on_device_of,
    raw_kernel,
)
from mpistrat.optimizers.kernels import Kernel

_C_TYPES = {"f": "float", "d": "double"}
"""The dtypes that the kernels of many arrays take, by NumPy's character."""

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
        by_dtype.setdefault(target.flat_weight.dtype, []).append((target, gradient))
    for dtype, alike in by_dtype.items():
        if dtype.char in _C_TYPES:
            _update_many(kernel, dtype, numbers, alike)
        else:
            for target, gradient in alike:
                _update_half(kernel, numbers, target, gradient)


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


def _update_many(
    kernel: Kernel, dtype: np.dtype, numbers: Sequence[float], pairs: Sequence[Pair]
) -> None:
    compiled = _many_kernel(kernel, dtype.char)
    constants = [dtype.type(number) for number in numbers]
    filled = [pair for pair in pairs if pair[0].flat_weight.size]
    for group in _groups(filled):
        columns = [[target.flat_weight.size for target, _ in group]]
        columns.append([address_of(gradient) for _, gradient in group])
        columns += zip(*(target.device_addresses for target, _ in group), strict=True)
        table, num_blocks = _table(columns, _UPDATED_BY_BLOCK)
        with on_device_of(group[0][1]):
            arguments = (table, np.int32(len(group)), *constants)
            compiled((sum(num_blocks),), (_THREADS,), arguments)


def _start_sums(arrays: Sequence[Array]) -> tuple[Array, list[int]]:
    """Begin to sum; return the sum of each block, on the device, and each array's blocks."""
    columns = [[each.size for each in arrays], [address_of(each) for each in arrays]]
    table, num_blocks = _table(columns, _SQUARED_BY_BLOCK)
    xp = namespace_of(arrays[0])
    with on_device_of(arrays[0]):
        partial = xp.empty((sum(num_blocks), _THREADS), dtype=np.float64)
        compiled = _squares_kernel(arrays[0].dtype.char)
        compiled((len(partial),), (_THREADS,), (table, np.int32(len(arrays)), partial))
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


def many_source(kernel: Kernel, char: str) -> tuple[str, str]:
    """Return CUDA code of `kernel` for many arrays of a dtype, and the name of its function."""
    real, name = _C_TYPES[char], f"mpistrat_{kernel.name}_{char}"
    parameters = ", ".join(
        f"const {real} {each}" for each in ("keep", "factor", *kernel.constants)
    )
    found = [f"    const {real} *gradients = (const {real} *)table.columns[1][k];"]
    for column, each in enumerate(("weight", *kernel.slots), 2):
        found.append(f"    {real} *{each}_of = ({real} *)table.columns[{column}][k];")
    body = [
        f"        const {real} gradient = gradients[i] * factor;",
        f"        {real} weight = weight_of[i] * keep;",
        *(f"        {real} {each} = {each}_of[i];" for each in kernel.slots),
        f"        {kernel.body}",
        *(f"        {each}_of[i] = {each};" for each in ("weight", *kernel.slots)),
    ]
    num_columns = 3 + len(kernel.slots)
    text = _source(
        name, num_columns, _UPDATED_BY_BLOCK, parameters, "\n".join(found), "\n".join(body)
    )
    return text + "\n}\n", name


def squares_source(char: str) -> tuple[str, str]:
    """Return CUDA code that leaves one sum of squares for each thread, and its function's name."""
    real, name = _C_TYPES[char], f"mpistrat_squares_{char}"
    found = f"    const {real} *numbers = (const {real} *)table.columns[1][k];\n    double sum = 0;"
    body = "        const double number = numbers[i];\n        sum += number * number;"
    text = _source(name, 2, _SQUARED_BY_BLOCK, "double *sums", found, body)
    return text + f"\n    sums[blockIdx.x * {_THREADS} + threadIdx.x] = sum;\n}}\n", name


@functools.lru_cache
def _many_kernel(kernel: Kernel, char: str) -> Any:
    return raw_kernel(*many_source(kernel, char))


@functools.lru_cache
def _squares_kernel(char: str) -> Any:
    return raw_kernel(*squares_source(char))


_BFLOAT16 = """\
__device__ float mpistrat_wide(unsigned short bits) {
    union { unsigned bits; float number; } wide;
    wide.bits = (unsigned)bits << 16;
    return wide.number;
}
__device__ unsigned short mpistrat_narrow(float number) {
    union { unsigned bits; float number; } wide;
    wide.number = number;
    if (number != number) return (wide.bits >> 16 & 0x8000u) | 0x7fc0u;
    return (wide.bits + 0x7fffu + (wide.bits >> 16 & 1u)) >> 16;
}
"""
"""Conversions that round to nearest even. CuPy has no arithmetic of bfloat16."""


@functools.lru_cache
def _half_kernel(kernel: Kernel, is_bfloat16: bool) -> Any:
    """Return the kernel for one array of halves, which computes in float32."""
    half = "uint16" if is_bfloat16 else "float16"
    wide, narrow = ("mpistrat_wide", "mpistrat_narrow") if is_bfloat16 else ("(float)", "(float16)")
    scalars = [f"float32 {each}" for each in ("keep", "factor", *kernel.constants)]
    body = (
        f"const float gradient = {wide}(gradient_in) * factor;\n"
        f"float weight = {wide}(weight_out) * keep;\n"
        f"{kernel.body}\n"
        f"weight_out = {narrow}(weight);"
    )
    return elementwise_kernel(
        ", ".join([f"{half} gradient_in", *scalars]),
        ", ".join([f"{half} weight_out", *(f"float32 {each}" for each in kernel.slots)]),
        body,
        f"mpistrat_{kernel.name}_{half}",
        _BFLOAT16 if is_bfloat16 else "",
    )


def _update_half(kernel: Kernel, numbers: Sequence[float], target: Any, gradient: Array) -> None:
    weight = target.flat_weight
    is_bfloat16 = weight.dtype.name == "bfloat16"
    if is_bfloat16:
        weight, gradient = weight.view(np.uint16), gradient.view(np.uint16)
    constants = [np.float32(number) for number in numbers]
    with on_device_of(weight):
        _half_kernel(kernel, is_bfloat16)(gradient, *constants, weight, *target.flat_slots)
