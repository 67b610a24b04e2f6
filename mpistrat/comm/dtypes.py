"""The dtype table: which dtype travels for which array and reduction.

MPI's reductions know C's numbers (MPI 4.1, section 6.9.2). Everything else travels as one of
those, or is refused.
"""

from __future__ import annotations

import functools

import numpy as np

from mpistrat.options import ReduceOp

__all__ = ["result_dtype", "wire_dtype"]

_INTEGERS = "bhilqBHILQ"
_FLOATS = "fdg"
_COMPLEX = "FDG"
_AS_FLOAT32 = ("float16", "bfloat16")


@functools.lru_cache
def wire_dtype(op: ReduceOp, dtype: np.dtype) -> np.dtype:
    """Return the dtype in which arrays of `dtype` are reduced by `op`. Local.

    float16 and bfloat16 accumulate in float32; MEAN of integers in float64; MIN and MAX of
    bool as uint8.

    Raises
    ------
    TypeError
        If `dtype` cannot be reduced by `op`.
    """
    if dtype.name in _AS_FLOAT32:
        return np.dtype(np.float32)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        if dtype.char == "?":
            return np.dtype(np.uint8)
        if dtype.char in _INTEGERS + _FLOATS:
            return _native(dtype)
    else:
        if dtype.char in _INTEGERS:
            return np.dtype(np.float64) if op is ReduceOp.MEAN else _native(dtype)
        if dtype.char in _FLOATS + _COMPLEX:
            return _native(dtype)
        if dtype.char == "?":
            raise TypeError(
                f"{op.name} of bool arrays has no meaning of its own: cast first, for example "
                "array.astype(numpy.int64). MIN (all) and MAX (any) work."
            )
    works = "integers and floats" + (
        ", bool" if op in (ReduceOp.MIN, ReduceOp.MAX) else ", complex"
    )
    raise TypeError(f"{op.name} cannot reduce arrays of dtype {dtype}; {works} can be reduced.")


@functools.lru_cache
def result_dtype(op: ReduceOp, dtype: np.dtype) -> np.dtype:
    """Return the dtype of the result: the array's, but float64 for MEAN of integers. Local."""
    if op is ReduceOp.MEAN and dtype.char in _INTEGERS:
        return np.dtype(np.float64)
    return _native(dtype)


def _native(dtype: np.dtype) -> np.dtype:
    swapped: np.dtype = dtype.newbyteorder("=")
    return swapped
