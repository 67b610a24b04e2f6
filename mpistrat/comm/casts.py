"""Casts on the way into a message and out of it: silent, and quick for float16.

NumPy's casts of float16 touch the processor's floating-point flags wherever a subnormal number
is rounded or widened, which takes some 100 ns each; and small gradients are subnormal in
float16. Here the rounding is an addition, and the widening a look-up.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import numpy as np

__all__ = ["cast", "cast_into"]

_SMALLEST_NORMAL = 2.0**-14
_SUBNORMAL_BITS = 24
"""Subnormal numbers of float16 are multiples of 2**-24."""

_CHUNK = 2**14
"""Elements at a time, so that temporaries stay in the cache."""


def cast(array: np.ndarray, dtype: np.dtype, copy: bool = False) -> np.ndarray:
    """Return `array` in C order, rounded to `dtype`; overflow gives inf, as in MPI. Local."""
    if array.dtype == dtype and array.flags.c_contiguous and not copy:
        return array
    result = np.empty(array.shape, dtype)
    cast_into(result, array)
    return result


def cast_into(target: np.ndarray, array: np.ndarray) -> None:
    """Overwrite `target` with `array`, rounded to its dtype; overflow gives inf. Local."""
    if target.dtype == array.dtype:
        target[...] = array
        return
    with np.errstate(all="ignore"):
        if _is_wide(array.dtype) and target.dtype == np.float16:
            for part, source in _chunks(target, array):
                _round(part, source)
        elif array.dtype == np.float16 and _is_wide(target.dtype):
            for part, source in _chunks(target, array):
                part[...] = _widened()[source.view(np.uint16)]
        else:
            target[...] = array


def _is_wide(dtype: np.dtype) -> bool:
    return dtype.char in "fdg"


def _chunks(target: np.ndarray, array: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield 1-d parts of both, in native byte order; what is written to the first stays."""
    with np.nditer(
        [target, array],
        ["external_loop", "buffered", "zerosize_ok"],
        [["writeonly"], ["readonly"]],
        [target.dtype, array.dtype.newbyteorder("=")],
        buffersize=_CHUNK,
    ) as parts:
        yield from parts


def _round(target: np.ndarray, array: np.ndarray) -> None:
    """Round to float16, to nearest and even, as NumPy does."""
    is_small = np.abs(array) < _SMALLEST_NORMAL
    if is_small.any():
        # Next to this number the spacing of the wide dtype is that of the subnormal numbers.
        mantissa_bits = np.finfo(array.dtype).nmant
        anchor = np.copysign(array.dtype.type(2.0 ** (mantissa_bits - _SUBNORMAL_BITS)), array)
        rounded = np.copysign((array + anchor) - anchor, array)
        array = np.where(is_small, rounded, array)
    target[...] = array


@functools.lru_cache(maxsize=1)
def _widened() -> np.ndarray:
    """Return every float16 as float32, at the position of its bits."""
    return np.arange(2**16, dtype=np.uint16).view(np.float16).astype(np.float32)
