"""Floats as integers of the same order, so that MIN and MAX treat NaN as NumPy does.

MPI leaves the order of NaN open (MPI 4.1, section 6.9.2), and libraries differ. As integers,
NaN is beyond the end, so it wins, and the result is the same on every library.
"""

from __future__ import annotations

import numpy as np

from mpistrat.arrays import Array, is_on_host
from mpistrat.options import ReduceOp
from mpistrat.sharding import cut

__all__ = ["as_floats", "as_ordered_integers", "is_reordered"]

_SIGNED = {np.dtype(np.float32): np.int32, np.dtype(np.float64): np.int64}

_PART = 2**17
"""Elements at a time, so that what is made of them besides stays in the cache."""


def is_reordered(op: ReduceOp, dtype: np.dtype) -> bool:
    """Return whether numbers of `dtype` travel as integers under `op`. Local."""
    return dtype in _SIGNED and op in (ReduceOp.MIN, ReduceOp.MAX)


def as_ordered_integers(op: ReduceOp, buffer: Array) -> Array:
    """Rewrite the floats of `buffer` in place, and return it as integers to reduce. Local.

    Other dtypes, and `longdouble`, for which there is no integer, stay as they are.

    Parameters
    ----------
    op : ReduceOp
    buffer : array
        In C order, on the host or the device.
    """
    if not is_reordered(op, buffer.dtype):
        return buffer
    keys = buffer.view(_SIGNED[buffer.dtype])
    for part in _parts(keys):
        is_nan = np.isnan(part.view(buffer.dtype))
        _flip_negatives(part)
        part[is_nan] = _beyond(op, keys.dtype)
    return keys


def as_floats(op: ReduceOp, keys: Array, dtype: np.dtype) -> Array:
    """Turn what `as_ordered_integers` returned back in place; return it as `dtype`. Local."""
    if keys.dtype == dtype:
        return keys
    for part in _parts(keys):
        is_nan = part == _beyond(op, keys.dtype)
        _flip_negatives(part)
        part.view(dtype)[is_nan] = np.nan
    return keys.view(dtype)


def _parts(keys: Array) -> list[Array]:
    """Return parts of `keys`, all of it where that is on a device."""
    if keys.size <= _PART or not is_on_host(keys):
        return [keys]
    flat = keys.reshape(-1)
    return [flat[each] for each in cut(flat.size, _PART)]


def _flip_negatives(keys: Array) -> None:
    # The bits of negative floats fall as the float rises: flip all but the sign. Twice is once.
    keys ^= (keys >> (8 * keys.itemsize - 1)) & np.iinfo(keys.dtype).max


def _beyond(op: ReduceOp, dtype: np.dtype) -> int:
    info = np.iinfo(dtype)
    return int(info.max if op is ReduceOp.MAX else info.min)
