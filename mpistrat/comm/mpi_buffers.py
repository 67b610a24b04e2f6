"""MPI operators, and messages cut below 2**28 bytes."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrat.arrays import Array, is_on_host, pieces
from mpistrat.options import ReduceOp

__all__ = ["PART_BYTES", "in_parts", "operator", "plan_windows"]

_OPERATORS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.MEAN: MPI.SUM,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.PROD: MPI.PROD,
}


def operator(op: ReduceOp, array: Array) -> MPI.Op:
    """Return MPI's operator for the numbers of `array`, for MEAN the sum."""
    # Sums of 8- and 16-bit integers on the host wrap, as in NumPy and in shared memory. MPI says
    # nothing of overflow, and Open MPI saturates as many of them as fill its vector registers.
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


PART_BYTES = 2**28
"""The longest message, so that counts of any MPI library hold it."""


def in_parts(buffer: np.ndarray) -> list[np.ndarray]:
    """Return views of `buffer`, in C order, equal for arrays of equal dtype and size."""
    if buffer.nbytes <= PART_BYTES:
        return [buffer]
    return pieces(buffer, PART_BYTES)


def plan_windows(counts: Sequence[int], itemsize: int) -> list[tuple[int, list[int]]]:
    """Return, for each message of a gather, where each part starts and the lengths by rank."""
    length = max(PART_BYTES // itemsize // len(counts), 1)
    return [
        (start, [min(max(count - start, 0), length) for count in counts])
        for start in range(0, max(counts), length)
    ]
