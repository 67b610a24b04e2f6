"""Update rules and sums of squares on a device: one launch for many arrays."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.arrays import Array, namespace_of, on_device_of
from mpistrat.comm.device_groups import (
    THREADS,
    addresses_on_device,
    grouped_source,
    launches_for,
)
from mpistrat.optimizers.kernels import Kernel

_C_TYPES = {"f": "float", "d": "double"}
"""C types of gradients whose squares are summed, by NumPy's character for the dtype."""


@dataclass(frozen=True)
class _Storage:
    """How the weights of a dtype are stored, and the type in which a kernel computes."""

    stored: str
    real: str
    conversions: str = "#define WIDE(number) (number)\n#define NARROW(number) (number)\n"


# The 16-bit types as bits, which needs no CUDA header: CuPy's wheel does not contain them. Both
# round to nearest even, as NumPy and ml_dtypes do.
_BITS = """\
typedef union { unsigned bits; float number; } Bits;
#define WIDE(number) wide(number)
#define NARROW(number) narrow(number)
"""
# Adding 0x7fff and the last kept bit rounds to nearest even. For some NaNs this would carry into
# the sign bit and turn them into zeros, so NaNs have a separate branch.
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
# The biases of the exponents differ by 112. A product with 2^112 is exact and also normalizes
# subnormal numbers, for which integer arithmetic would need a loop.
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

_UPDATED_BY_BLOCK = 16 * THREADS
_SQUARED_BY_BLOCK = 64 * THREADS
"""Number of elements. Each thread writes one partial sum, so blocks are larger here."""


class DeviceUpdate:
    """Updates of targets on one device, by gradients of their dtypes and sizes."""

    def __init__(self, kernel: Kernel, targets: Sequence[Any]) -> None:
        # `targets` are of type `Target`. Their memory never moves, so the tables of addresses stay
        # valid.
        self._device = on_device_of(targets[0].flat_weight)
        by_dtype: dict[np.dtype, list[int]] = {}
        for position, target in enumerate(targets):
            by_dtype.setdefault(target.flat_weight.dtype, []).append(position)
        self._parts = []
        for dtype, positions in by_dtype.items():
            alike = [targets[position] for position in positions]
            sizes = [target.flat_weight.size for target in alike]
            fixed = zip(*(target.device_addresses for target in alike), strict=True)
            launches = launches_for(sizes, _UPDATED_BY_BLOCK, *fixed)
            real = np.float64 if _STORAGE[dtype.name].real == "double" else np.float32
            self._parts.append((positions, update_source(kernel, dtype.name), real, launches))

    def __call__(self, numbers: Sequence[float], gradients: Sequence[Array]) -> None:
        """Update each target by its gradient, in C order."""
        addresses = addresses_on_device(gradients)
        with self._device:
            for positions, source, real, launches in self._parts:
                chosen = [addresses[position] for position in positions]
                # CuPy passes a Python float as a double, whatever the parameter of the kernel is.
                constants = [real(number) for number in numbers]
                for launch in launches:
                    launch(source, chosen, *constants)


class SumsOfSquares:
    """Sums of squares of arrays like the given ones: real, in C order, on one device."""

    def __init__(self, arrays: Sequence[Array]) -> None:
        self._count = len(arrays)
        self._parts = []
        for char in _C_TYPES:
            positions = [i for i, each in enumerate(arrays) if each.dtype.char == char]
            launches = launches_for([arrays[i].size for i in positions], _SQUARED_BY_BLOCK)
            self._parts.append((positions, squares_source(char), launches))
        self._num_blocks = sum(each.grid for _, _, launches in self._parts for each in launches)

    def __call__(self, arrays: Sequence[Array]) -> list[float]:
        """Return the sum of the squares of each array, in float64."""
        # The host waits for the device only once, for all arrays.
        sums = [0.0] * self._count
        if not self._num_blocks:
            return sums
        xp, addresses = namespace_of(arrays[0]), addresses_on_device(arrays)
        with on_device_of(arrays[0]):
            partial = xp.empty((self._num_blocks, THREADS), dtype=np.float64)
            begin = 0
            for positions, source, launches in self._parts:
                chosen = [addresses[position] for position in positions]
                for launch in launches:
                    launch(source, chosen, partial[begin : begin + launch.grid])
                    begin += launch.grid
            found = partial.sum(axis=1).get()
        numbers, begin = found.tolist(), 0
        for positions, _, launches in self._parts:
            counts = [count for launch in launches for count in launch.num_blocks]
            for position, count in zip(positions, counts, strict=True):
                stop = begin + count
                is_one = count == 1
                sums[position] = (
                    numbers[begin] if is_one else float(np.add.reduce(found[begin:stop]))
                )
                begin = stop
        return sums


@functools.lru_cache
def update_source(kernel: Kernel, dtype: str) -> tuple[str, str]:
    """Return CUDA code of `kernel` for weights of a dtype, and the name of its function."""
    # 16-bit weights are updated in float32, which is also the dtype of their slots.
    storage, name = _STORAGE[dtype], f"mpistrat_{kernel.name}_{dtype}"
    real, stored = storage.real, storage.stored
    parameters = [f"const {real} {each}" for each in ("keep", "factor", *kernel.constants)]
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
    text = grouped_source(
        name, num_columns, _UPDATED_BY_BLOCK, parameters, "\n".join(found), "\n".join(body)
    )
    return storage.conversions + text + "\n}\n", name


@functools.lru_cache
def squares_source(char: str) -> tuple[str, str]:
    """Return CUDA code that writes one sum of squares per thread, and its function's name."""
    real, name = _C_TYPES[char], f"mpistrat_squares_{char}"
    found = f"    const {real} *numbers = (const {real} *)table.columns[1][k];\n    double sum = 0;"
    body = "        const double number = numbers[i];\n        sum += number * number;"
    text = grouped_source(name, 2, _SQUARED_BY_BLOCK, ["double *sums"], found, body)
    return text + f"\n    sums[blockIdx.x * {THREADS} + threadIdx.x] = sum;\n}}\n", name
