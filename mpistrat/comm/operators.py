"""MPI's operators, and one of our own where MPI leaves open what comes out."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrat.arrays import Array, is_on_host
from mpistrat.options import ReduceOp

__all__ = ["operator"]

_OPERATORS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.MEAN: MPI.SUM,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.PROD: MPI.PROD,
}


def operator(op: ReduceOp, array: Array) -> MPI.Op:
    """Return what MPI reduces the numbers of `array` with, for MEAN the sum. Local.

    Sums of 8- and 16-bit integers on the host wrap, as in NumPy and in shared memory. MPI says
    nothing of overflow, and Open MPI saturates as many of them as fill its vector registers.
    """
    dtype = array.dtype
    if op is ReduceOp.SUM and dtype.itemsize < 4 and dtype.kind in "iu" and is_on_host(array):
        return _wrapping_sum(dtype.itemsize)
    return _OPERATORS[op]


@functools.lru_cache
def _wrapping_sum(itemsize: int) -> MPI.Op:
    def add(source: Any, target: Any, datatype: MPI.Datatype) -> None:
        total = np.frombuffer(target, dtype)
        total += np.frombuffer(source, dtype)

    dtype = np.dtype(f"u{itemsize}")  # unsigned sums have the bits of signed ones
    return MPI.Op.Create(add, commute=True)
