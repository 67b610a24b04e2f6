"""Hierarchical reduction: within nodes, then over them; its threshold."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

from mpistrat.arrays import address_of
from mpistrat.comm.ops import compiled_function, divide, mpi_operator
from mpistrat.comm.packing import Message
from mpistrat.comm.pool import Pool
from mpistrat.comm.shared_memory import NodeMemory
from mpistrat.comm.shared_reducer import SharedMemoryReducer
from mpistrat.comm.transport import NodeReducer, Occupancy, Reducer
from mpistrat.options import ReduceOp
from mpistrat.settings import settings_at_the_end

__all__ = ["share_memory"]


class HierarchicalReducer:
    """Reduces messages within each node in shared memory, and between nodes by MPI."""

    # As in Horovod's hierarchical allreduce: each rank of a node owns a slice, which it reduces
    # with the ranks of other nodes that own the same one. The smallest node limits the slices.

    min_bytes = 0
    keeps_order = False  # between nodes it is MPI's

    def __init__(
        self,
        memory: NodeMemory,
        comm: MPI.Intracomm,
        num_slices: int,
        otherwise: Reducer,
        occupancy: Occupancy,
    ) -> None:
        self._otherwise = otherwise
        self._occupancy = occupancy
        self._memory = memory
        self._num_slices = num_slices
        self._size = comm.size
        colour = memory.rank if memory.rank < num_slices else MPI.UNDEFINED
        self._peers = comm.Split(colour, comm.rank)

    def knows(self, op: ReduceOp, dtype: np.dtype) -> bool:
        """Return whether the compiled code reduces `dtype` by `op`."""
        return compiled_function(op, dtype) is not None

    def attach(self, message: Message) -> None:
        """Do nothing: the ranks agree over MPI, which does not wait for this memory."""

    def detach(self) -> None:
        """Do nothing: nothing is attached."""

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Reduce each array of `message`. **Collective**."""
        source, target, split = message.whole()
        step = self._memory.BLOCK_BYTES
        start, goal = address_of(source), address_of(target)
        with self._occupancy:
            for done in range(0, source.nbytes, step):
                num_bytes = min(step, source.nbytes - done)
                self._reduce_block(op, source.dtype, start + done, goal + done, num_bytes)
        split()

    def reduce(self, op: ReduceOp, message: Message, root: int) -> None:
        """Reduce each array of `message`, on every rank: that costs no more. **Collective**."""
        self.all_reduce(op, message)

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Leave `message` to MPI: no other thread may send. **Collective**."""
        return self._otherwise.start_all_reduce(op, message)

    def drain(self) -> None:
        """Do nothing: nothing is under way."""

    def close(self) -> None:
        """Free the communicator of the ranks with the same slice. **Collective**."""
        if self._peers != MPI.COMM_NULL:
            self._peers.Free()

    def _reduce_block(
        self, op: ReduceOp, dtype: np.dtype, source: int, target: int, num_bytes: int
    ) -> None:
        memory, library = self._memory, self._memory.library
        function = compiled_function(op, dtype)
        assert function is not None
        sequence, slices = memory.reductions.pointer, self._num_slices
        place = library.reduce_slice(sequence, function[0], slices, source, num_bytes)
        own = memory.view(*place).view(dtype)
        if self._peers != MPI.COMM_NULL and own.size:
            self._peers.Allreduce(MPI.IN_PLACE, own, mpi_operator(op, own))
            if op is ReduceOp.MEAN:
                divide(own, self._size)
        library.collect_slices(sequence, slices, target, num_bytes)


_TRIED_BYTES = (2**18, 2**14, 2**6)
_REPETITIONS = 10
_BUDGET_S = 0.02
"""How long to repeat one reduction, if the first one took as long as the others will."""
_ADVANTAGE = 1.2
"""How much slower shared memory must be to leave it to MPI: times differ by chance."""

_Reduce = Callable[[ReduceOp, Message], None]


@dataclass(frozen=True)
class _Sharing:
    """Memory that ranks share, and its reducer."""

    memory: NodeMemory
    reducer: NodeReducer
    holds_all: bool
    """Whether all ranks are on one node."""


def share_memory(comm: MPI.Intracomm, otherwise: Reducer, occupancy: Occupancy) -> _Sharing | None:
    """Return memory that the ranks of each node share, if several run on one. **Collective**."""
    if comm.size == 1:
        return None
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    sizes = comm.allgather(node.size)
    memory = NodeMemory.open(node) if max(sizes) > 1 else None
    node.Free()
    is_shared = comm.allreduce(memory is not None, MPI.LAND)
    if not is_shared or memory is None:
        return None
    reducer: NodeReducer
    holds_all = min(sizes) == comm.size
    if holds_all:
        reducer = SharedMemoryReducer(memory, occupancy)
    else:
        reducer = HierarchicalReducer(memory, comm, min(sizes), otherwise, occupancy)
    # A few milliseconds now, because no rule says from which size on shared memory is faster: but
    # where ranks share cores, it is, since MPI keeps the cores while it waits.
    is_faster = holds_all and memory.shares_cores
    reducer.min_bytes = _min_bytes(comm, reducer.all_reduce, otherwise.all_reduce, is_faster)
    return _Sharing(memory, reducer, holds_all)


_measured: dict[int, int] = {}
"""What `_measure` has found, by the number of ranks: a program may make thousands of groups."""


def _min_bytes(comm: MPI.Intracomm, shared: _Reduce, otherwise: _Reduce, is_faster: bool) -> int:
    """Return from which size on shared memory is used, the same on every rank."""
    asked = settings_at_the_end().shared_min_bytes
    given = -1 if asked is None else asked
    of_ranks: list[tuple[int, int]] = comm.allgather((given, _measured.get(comm.size, -1)))
    given = max(each for each, _ in of_ranks)
    if given >= 0 or is_faster:
        return max(given, 0)
    # Ranks have been in other groups before.
    known = [found for _, found in of_ranks]
    found = _measure(comm, shared, otherwise) if min(known) < 0 else max(known)
    _measured[comm.size] = found
    return found


def _measure(comm: MPI.Intracomm, shared: _Reduce, otherwise: _Reduce) -> int:
    """Return the smallest size tried from which on shared memory was faster, for all ranks."""
    pool = Pool()
    min_bytes = 2 * max(_TRIED_BYTES)
    for num_bytes in _TRIED_BYTES:
        source = np.zeros(num_bytes // 4, np.float32)
        message = Message([source], [np.zeros_like(source)], pool)
        times_s = np.array([_shortest_s(comm, reduce, message) for reduce in (shared, otherwise)])
        comm.Allreduce(MPI.IN_PLACE, times_s, MPI.SUM)
        if times_s[0] > _ADVANTAGE * times_s[1]:
            break
        min_bytes = num_bytes
    return 0 if min_bytes == min(_TRIED_BYTES) else min_bytes


def _shortest_s(comm: MPI.Intracomm, reduce: _Reduce, message: Message) -> float:
    began = time.perf_counter()
    reduce(ReduceOp.SUM, message)
    first_s: float = comm.allreduce(time.perf_counter() - began, MPI.MAX)
    times_s = []
    # Many ranks that share a core take turns, for as long as a second in all.
    for _ in range(min(_REPETITIONS, 1 + int(_BUDGET_S / first_s))):
        comm.Barrier()
        began = time.perf_counter()
        reduce(ReduceOp.SUM, message)
        times_s.append(time.perf_counter() - began)
    return min(times_s)
