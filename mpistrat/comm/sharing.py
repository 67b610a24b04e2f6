"""What the ranks of a communicator share memory for, and from which size on it is worth it."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from mpistrat.comm.message import Message
from mpistrat.comm.node import NodeMemory, open_node_memory
from mpistrat.comm.nodewise import NodewiseReducer
from mpistrat.comm.pool import Pool
from mpistrat.comm.reducer import Reducer
from mpistrat.comm.shared import SharedMemoryReducer
from mpistrat.comm.transport import NodeReducer, Occupancy
from mpistrat.options import ReduceOp
from mpistrat.settings import settings_at_the_end

__all__ = ["share_memory"]

_TRIED_BYTES = (2**18, 2**14, 2**6)
_REPETITIONS = 10
_ADVANTAGE = 1.2
"""How much slower shared memory must have been to be left: times differ by chance."""

_Way = Callable[[ReduceOp, Message], None]


@dataclass(frozen=True)
class _Sharing:
    """Memory that ranks share, and what reduces in it."""

    memory: NodeMemory
    reducer: NodeReducer
    holds_all: bool
    """Whether all ranks are on one node."""


def share_memory(
    comm: MPI.Intracomm, otherwise: Reducer, occupancy: Occupancy
) -> _Sharing | None:
    """Return memory that the ranks of each node share, ``None`` if no rank has company.

    **Collective** over `comm`. Takes a few milliseconds, to measure from which size on it is faster
    than `otherwise`.
    """
    if comm.size == 1:
        return None
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    sizes = comm.allgather(node.size)
    memory = open_node_memory(node) if max(sizes) > 1 else None
    node.Free()
    is_shared = comm.allreduce(memory is not None, MPI.LAND)
    if not is_shared or memory is None:
        return None
    reducer: NodeReducer
    holds_all = min(sizes) == comm.size
    if holds_all:
        reducer = SharedMemoryReducer(memory, occupancy)
    else:
        reducer = NodewiseReducer(memory, comm, min(sizes), otherwise, occupancy)
    reducer.min_bytes = _min_bytes(comm, reducer.all_reduce, otherwise.all_reduce)
    return _Sharing(memory, reducer, holds_all)


def _min_bytes(comm: MPI.Intracomm, shared: _Way, otherwise: _Way) -> int:
    """Return from which size on shared memory is used, the same on every rank."""
    asked = settings_at_the_end().shared_min_bytes
    given: int = comm.allreduce(-1 if asked is None else asked, MPI.MAX)
    return _measure(comm, shared, otherwise) if given < 0 else given


def _measure(comm: MPI.Intracomm, shared: _Way, otherwise: _Way) -> int:
    """Return the smallest size tried from which on shared memory was faster, for all ranks."""
    pool = Pool()
    min_bytes = 2 * max(_TRIED_BYTES)
    for num_bytes in _TRIED_BYTES:
        source = np.zeros(num_bytes // 4, np.float32)
        message = Message([source], [np.zeros_like(source)], pool)
        times_s = np.array([_shortest_s(comm, way, message) for way in (shared, otherwise)])
        comm.Allreduce(MPI.IN_PLACE, times_s, MPI.SUM)
        if times_s[0] > _ADVANTAGE * times_s[1]:
            break
        min_bytes = num_bytes
    return 0 if min_bytes == min(_TRIED_BYTES) else min_bytes


def _shortest_s(comm: MPI.Intracomm, way: _Way, message: Message) -> float:
    way(ReduceOp.SUM, message)
    times_s = []
    for _ in range(_REPETITIONS):
        comm.Barrier()
        began = time.perf_counter()
        way(ReduceOp.SUM, message)
        times_s.append(time.perf_counter() - began)
    return min(times_s)
