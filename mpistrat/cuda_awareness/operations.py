"""What is tried on device memory: the operations, and what must come out of them.

Blocking ones only: Open MPI documents that its non-blocking collectives take no device memory.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.arrays import Array, host_view, synchronize

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["OPERATIONS", "wrong_operations"]

_LENGTHS = (1, 2**10, 2**14, 2**20)
"""Elements of 4 bytes: libraries change their ways between short and long messages."""

_Put = Callable[[np.ndarray], Array]
"""Copies a NumPy array to the memory that is tried."""


def _numbers(rank: int, length: int) -> np.ndarray:
    return np.arange(length, dtype=np.float32) % 97 + rank


def _total(size: int, length: int) -> np.ndarray:
    ranks = np.float32(size * (size - 1) // 2)  # 0 + 1 + ... + (size - 1)
    total: np.ndarray = _numbers(0, length) * np.float32(size) + ranks
    return total


def _ready(*arrays: Array) -> None:
    for array in arrays:
        synchronize(array)


def _parts(array: Array, counts: list[int]) -> list[object]:
    return [array, (counts, [0, *accumulate(counts)][:-1])]


def _sendrecv(comm: MPI.Intracomm, put: _Put, length: int) -> tuple[Array, np.ndarray]:
    own, received = put(_numbers(comm.rank, length)), put(_numbers(-1, length))
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    _ready(own, received)
    comm.Sendrecv(own, right, recvbuf=received, source=left)
    return received, _numbers(left, length)


def _bcast(comm: MPI.Intracomm, put: _Put, length: int) -> tuple[Array, np.ndarray]:
    buffer, root = put(_numbers(comm.rank, length)), comm.size - 1
    _ready(buffer)
    comm.Bcast(buffer, root)
    return buffer, _numbers(root, length)


def _allreduce(comm: MPI.Intracomm, put: _Put, length: int) -> tuple[Array, np.ndarray]:
    from mpi4py import MPI

    buffer = put(_numbers(comm.rank, length))
    _ready(buffer)
    comm.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)
    return buffer, _total(comm.size, length)


def _reduce(comm: MPI.Intracomm, put: _Put, length: int) -> tuple[Array, np.ndarray]:
    from mpi4py import MPI

    buffer = put(_numbers(comm.rank, length))
    _ready(buffer)
    if comm.rank == 0:
        comm.Reduce(MPI.IN_PLACE, buffer, MPI.SUM, 0)
        return buffer, _total(comm.size, length)
    comm.Reduce(buffer, None, MPI.SUM, 0)
    return buffer, _numbers(comm.rank, length)


def _lengths(comm: MPI.Intracomm, length: int) -> tuple[list[int], np.ndarray]:
    """Return lengths that differ over ranks, and what all bring, one behind the other."""
    counts = [length + rank for rank in range(comm.size)]
    return counts, np.concatenate([_numbers(rank, n) for rank, n in enumerate(counts)])


def _allgatherv(comm: MPI.Intracomm, put: _Put, length: int) -> tuple[Array, np.ndarray]:
    counts, expected = _lengths(comm, length)
    own, received = put(_numbers(comm.rank, counts[comm.rank])), put(np.zeros_like(expected))
    _ready(own, received)
    comm.Allgatherv(own, _parts(received, counts))
    return received, expected


def _gatherv(comm: MPI.Intracomm, put: _Put, length: int) -> tuple[Array, np.ndarray]:
    counts, expected = _lengths(comm, length)
    own, received = put(_numbers(comm.rank, counts[comm.rank])), put(np.zeros_like(expected))
    _ready(own, received)
    comm.Gatherv(own, _parts(received, counts) if comm.rank == 0 else None, 0)
    return received, expected if comm.rank == 0 else np.zeros_like(expected)


def _alltoallv(comm: MPI.Intracomm, put: _Put, length: int) -> tuple[Array, np.ndarray]:
    counts, sent = _lengths(comm, length)
    own_counts = [counts[comm.rank]] * comm.size
    expected = np.concatenate([_numbers(comm.rank, counts[comm.rank])] * comm.size)
    own, received = put(sent), put(np.zeros_like(expected))
    _ready(own, received)
    comm.Alltoallv(_parts(own, counts), _parts(received, own_counts))
    return received, expected


OPERATIONS: dict[str, Callable[[MPI.Intracomm, _Put, int], tuple[Array, np.ndarray]]] = {
    "Sendrecv": _sendrecv,
    "Bcast": _bcast,
    "Allreduce": _allreduce,
    "Reduce": _reduce,
    "Allgatherv": _allgatherv,
    "Gatherv": _gatherv,
    "Alltoallv": _alltoallv,
}
"""What is tried. Each returns what this rank has received, and what it should have."""


def wrong_operations(comm: MPI.Intracomm, put: _Put) -> list[str]:
    """Do every operation on memory from `put`; return those with wrong numbers. **Collective**."""
    return [
        f"{name} of {length} numbers"
        for name, operate in OPERATIONS.items()
        for length in _LENGTHS
        if not _is_right(*operate(comm, put, length))
    ]


def _is_right(received: Array, expected: np.ndarray) -> bool:
    return np.array_equal(host_view(received), expected)
