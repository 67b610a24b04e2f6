"""Floats as integers of the same order, so that MIN and MAX treat NaN as NumPy does.

MPI leaves the order of NaN open (MPI 4.1, section 6.9.2), and libraries differ. As integers,
NaN is beyond the end, so it wins, and the result is the same on every library.
"""

from __future__ import annotations

import numpy as np

from mpistrat.options import ReduceOp

__all__ = ["as_floats", "as_ordered_integers"]

_INTEGERS = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}


def as_ordered_integers(op: ReduceOp, buffer: np.ndarray) -> np.ndarray:
    """Rewrite the floats of `buffer` in place, and return it as integers to reduce. Local.

    Other dtypes, and `longdouble`, for which there is no integer, stay as they are.
    """
    integer = _INTEGERS.get(buffer.dtype)
    if integer is None or op not in (ReduceOp.MIN, ReduceOp.MAX):
        return buffer
    is_nan = np.isnan(buffer)
    keys = buffer.view(integer)
    _flip_negatives(keys)
    keys[is_nan] = _beyond(op, keys.dtype)
    return keys


def as_floats(op: ReduceOp, keys: np.ndarray, dtype: np.dtype) -> None:
    """Turn what `as_ordered_integers` returned back into floats of `dtype`, in place. Local."""
    if keys.dtype == dtype:
        return
    is_nan = keys == _beyond(op, keys.dtype)
    _flip_negatives(keys)
    keys.view(dtype)[is_nan] = np.nan


def _flip_negatives(keys: np.ndarray) -> None:
    # The bits of negative floats fall as the float rises: flip all but the sign. Twice is once.
    keys ^= (keys >> (8 * keys.itemsize - 1)) & np.iinfo(keys.dtype).max


def _beyond(op: ReduceOp, dtype: np.dtype) -> int:
    info = np.iinfo(dtype)
    return int(info.max if op is ReduceOp.MAX else info.min)
