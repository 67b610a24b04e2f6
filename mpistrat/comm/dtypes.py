"""The dtype table: which dtype travels for which array and reduction.

MPI's reductions know C's numbers (MPI 4.1, section 6.9.2). Everything else travels as one of
those, or is refused. 16-bit floats travel as themselves where `CommunicationOptions.wire_dtype`
asks for it; MPI cannot add them, so `SlicedReducer` does.
"""

from __future__ import annotations

import functools
import importlib

import numpy as np

from mpistrat.options import ReduceOp

__all__ = ["accumulator_dtype", "is_floating", "is_narrow", "result_dtype", "wire_dtype"]

_INTEGERS = "bhilqBHILQ"
_FLOATS = "fdg"
_COMPLEX = "FDG"
_NARROW = ("float16", "bfloat16")


@functools.lru_cache
def wire_dtype(op: ReduceOp, dtype: np.dtype, asked: str | None = None) -> np.dtype:
    """Return the dtype in which arrays of `dtype` travel to be reduced by `op`. Local.

    float16 and bfloat16 travel as float32; integers under MEAN as float64; bool under MIN and
    MAX as uint8.

    Parameters
    ----------
    op : ReduceOp
    dtype : numpy.dtype
    asked : str, optional
        `CommunicationOptions.wire_dtype`, for floats under SUM and MEAN. 16-bit floats then
        travel as they are, whichever is asked for.

    Raises
    ------
    TypeError
        If `dtype` cannot be reduced by `op`.
    """
    if asked is not None and op in (ReduceOp.SUM, ReduceOp.MEAN):
        if is_narrow(dtype):
            return _native(dtype)
        if dtype.char in _FLOATS:
            return _named(asked)
    if is_narrow(dtype):
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


@functools.lru_cache
def is_narrow(dtype: np.dtype) -> bool:
    """Return whether `dtype` is a 16-bit float, which is too narrow to add up in. Local."""
    return dtype.name in _NARROW


def is_floating(dtype: np.dtype) -> bool:
    """Return whether `dtype` is one of the real floats that are known here. Local."""
    return dtype.char in _FLOATS or is_narrow(dtype)


def accumulator_dtype(wire: np.dtype) -> np.dtype:
    """Return the dtype in which what travels as `wire` is added up. Local."""
    return np.dtype(np.float32) if is_narrow(wire) else wire


def _named(name: str) -> np.dtype:
    if name == "bfloat16":
        dtype: np.dtype = np.dtype(importlib.import_module("ml_dtypes").bfloat16)
        return dtype
    return np.dtype(name)


def _native(dtype: np.dtype) -> np.dtype:
    swapped: np.dtype = dtype.newbyteorder("=")
    return swapped
