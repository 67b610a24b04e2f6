"""Reduction tree: the sum of rows as reproducible reductions add them, for tests."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from mpistrat.comm.ops import combine
from mpistrat.comm.wire import accumulator_dtype, cast, wire_dtype
from mpistrat.options import ReduceOp

__all__ = ["reduction_tree"]


def reduction_tree(rows: npt.ArrayLike) -> np.ndarray:
    """Return the sum of the rows of an array, to the bit as the replicas add them up. Local.

    Neighbours are added first, then neighbouring pairs, and so on; a row without a neighbour
    waits. 16-bit floats are added in float32 and rounded once, at the end.

    Parameters
    ----------
    rows : array of shape (num_replicas, *shape)
        Row i is what replica i gives to ``all_reduce("sum", ...)``.

    Returns
    -------
    numpy.ndarray
        Of shape ``shape`` and the dtype of `rows`.

    Raises
    ------
    ValueError
        If there is no row.
    TypeError
        For a dtype that cannot be added.

    Examples
    --------
    >>> rows = np.array([1e8, 1.0, -1e8, 1.0], np.float32)
    >>> float(ms.testing.reduction_tree(rows)), float(rows.cumsum()[-1])
    (0.0, 1.0)
    """
    array = np.asarray(rows)
    if array.ndim == 0 or not len(array):
        raise ValueError(f"reduction_tree needs rows, not an array of the shape {array.shape}.")
    wire = wire_dtype(ReduceOp.SUM, array.dtype)
    flat = cast(array.reshape(len(array), -1), accumulator_dtype(wire), copy=True)
    total = combine(ReduceOp.SUM, flat).reshape(array.shape[1:])
    return cast(total, array.dtype.newbyteorder("="))
