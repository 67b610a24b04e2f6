"""Floats as integers of the same order, so that MIN and MAX treat NaN as NumPy does.

MPI leaves the order of NaN open (MPI 4.1, section 6.9.2), and libraries differ. As integers,
NaN is beyond the end, so it wins, and the result is the same on every library.
"""

from __future__ import annotations

import numpy as np

from mpistrat.options import ReduceOp

__all__ = ["as_floats", "as_ordered_integers", "is_reordered"]

_INTEGERS = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}


def is_reordered(op: ReduceOp, dtype: np.dtype) -> bool:
    """Return whether numbers of `dtype` travel as integers under `op`. Local."""
    return dtype in _INTEGERS and op in (ReduceOp.MIN, ReduceOp.MAX)


def as_ordered_integers(op: ReduceOp, buffer: np.ndarray) -> np.ndarray:
    """Rewrite the floats of `buffer` in place, and return it as integers to reduce. Local.

    Other dtypes, and `longdouble`, for which there is no integer, stay as they are.
    """
    if not is_reordered(op, buffer.dtype):
        return buffer
    is_nan = np.isnan(buffer)
    keys = buffer.view(_INTEGERS[buffer.dtype])
    _flip_negatives(keys)
    keys[is_nan] = _beyond(op, keys.dtype)
    return keys


def as_floats(op: ReduceOp, keys: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """Turn what `as_ordered_integers` returned back in place; return it as `dtype`. Local."""
    if keys.dtype == dtype:
        return keys
    is_nan = keys == _beyond(op, keys.dtype)
    _flip_negatives(keys)
    floats = keys.view(dtype)
    floats[is_nan] = np.nan
    return floats


def _flip_negatives(keys: np.ndarray) -> None:
    # The bits of negative floats fall as the float rises: flip all but the sign. Twice is once.
    keys ^= (keys >> (8 * keys.itemsize - 1)) & np.iinfo(keys.dtype).max


def _beyond(op: ReduceOp, dtype: np.dtype) -> int:
    info = np.iinfo(dtype)
    return int(info.max if op is ReduceOp.MAX else info.min)
