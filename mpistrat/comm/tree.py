"""The order of a deterministic reduction: a fixed binary tree over the ranks."""

from __future__ import annotations

import numpy as np

from mpistrat.options import ReduceOp

__all__ = ["combine", "divide"]

_UFUNCS = {
    ReduceOp.SUM: np.add,
    ReduceOp.MEAN: np.add,
    ReduceOp.PROD: np.multiply,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
}


def combine(op: ReduceOp, pieces: np.ndarray) -> np.ndarray:
    """Return the reduction of the rows of `pieces`, element by element. Local.

    Neighbours in rank order combine first, ``(0, 1), (2, 3), ...``, then neighbouring pairs,
    and so on; a row without a neighbour waits. So the bits of an element depend on the number
    of rows and the element's values alone. Overflow gives inf, without a warning, as in MPI.

    Parameters
    ----------
    op : ReduceOp
        MEAN divides by the number of rows.
    pieces : numpy.ndarray
        Shape ``(size, n)``, the part of rank r in row r. Overwritten.

    Returns
    -------
    numpy.ndarray
        Shape ``(n,)``, in the dtype and memory of `pieces`.
    """
    size, step = len(pieces), 1
    with np.errstate(all="ignore"):
        while step < size:
            low, high = pieces[: size - step : 2 * step], pieces[step :: 2 * step]
            if op is ReduceOp.PROD and pieces.dtype.kind == "c":
                _multiply_complex(low, high)
            else:
                _UFUNCS[op](low, high, out=low)
            step *= 2
    result: np.ndarray = pieces[0]
    if op is ReduceOp.MEAN:
        divide(result, size)
    _unify_nan(result)
    return result


def _multiply_complex(target: np.ndarray, other: np.ndarray) -> None:
    # NumPy's own product rounds once or twice (FMA), depending on an element's place in memory.
    real = target.real * other.real - target.imag * other.imag
    target.imag = target.real * other.imag + target.imag * other.real
    target.real = real


def divide(buffer: np.ndarray, size: int) -> None:
    """Divide `buffer` by the number of ranks, in place; complex numbers part by part. Local."""
    with np.errstate(all="ignore"):
        for part in (buffer.real, buffer.imag) if buffer.dtype.kind == "c" else (buffer,):
            np.true_divide(part, size, out=part)


def _unify_nan(result: np.ndarray) -> None:
    # Which of two NaN a sum passes on may depend on an element's place in the vector registers.
    if result.dtype.kind == "c":
        _unify_nan(result.real)
        _unify_nan(result.imag)
    elif result.dtype.kind == "f":
        np.copyto(result, np.nan, where=np.isnan(result))
