"""Hierarchical reduction: within nodes, then between them; and its threshold."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from mpi4py import MPI

from mpistrat.arrays import address_of
from mpistrat.comm.ops import compiled_function, divide, mpi_operator
from mpistrat.comm.packing import Message
from mpistrat.comm.pool import Pool
from mpistrat.comm.shared_memory import NodeMemory, Place, all_of
from mpistrat.comm.shared_reducer import SharedMemoryReducer
from mpistrat.comm.transport import NodeReducer, Occupancy, Reducer
from mpistrat.mpi.survival import revoke
from mpistrat.mpi.world import ranks_of_node
from mpistrat.native import native_library
from mpistrat.options import ReduceOp
from mpistrat.settings import settings_at_the_end
from mpistrat.system.cpu import mask_of_cores, own_cores


class _Attached(NamedTuple):
    """A message whose first block was copied in, and the result of its `Message.whole`."""

    message: Message
    source: np.ndarray
    target: np.ndarray
    split: Callable[[], object]


class HierarchicalReducer:
    """Reduces messages within each node in shared memory, and between nodes by MPI."""

    # As in Horovod's hierarchical allreduce: each rank of a node owns a slice, which it reduces
    # with the ranks of other nodes that own the same slice. The smallest node limits the number of
    # slices.

    min_bytes = 0
    keeps_order = False  # between nodes MPI selects the order

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
        # Split is collective, so ranks without a slice call it too. They get COMM_NULL, and no
        # peers.
        self._peers = comm.Split(colour, comm.rank)
        self._attached: _Attached | None = None

    def knows(self, op: ReduceOp, dtype: np.dtype) -> bool:
        """Return whether the compiled code reduces `dtype` by `op`."""
        return compiled_function(op, dtype) is not None

    def attach(self, message: Message) -> None:
        """Copy in the first block of `message`: then no rank waits for it after the agreement."""
        self._attached = _Attached(message, *message.whole())
        if message.num_bytes:
            self._contribute(address_of(self._attached.source), message.num_bytes)

    def detach(self) -> None:
        """Withdraw the message that was attached last."""
        if self._attached is not None and self._attached.message.num_bytes:
            self.withdraw()
        self._attached = None

    def parameters(self, op: ReduceOp, dtype: np.dtype, num_bytes: int) -> dict[str, int]:
        """Return the parameters with which compiled code reduces an array of one block by `op`."""
        function = compiled_function(op, dtype)
        if function is None or num_bytes > self._memory.BLOCK_BYTES:
            return {}
        number, itemsize = function
        return {
            "reductions": self._memory.reductions.pointer,
            "function": number,
            "divisor": 1,
            "itemsize": itemsize,
            "owners": self._num_slices,
        }

    def check(self) -> None:
        """Raise if a wait of compiled code has ended because ranks leave."""
        self._memory.reductions.check()

    def withdraw(self) -> None:
        """Withdraw the data that compiled code has attached."""
        self._memory.library.reduce_withdraw(self._memory.reductions.pointer)

    def ready(self, op: ReduceOp, dtype: np.dtype) -> Callable[[np.ndarray], object]:
        """Return a function that reduces a slice of `dtype` over nodes."""
        operator, peers = mpi_operator(op, np.empty(0, dtype)), self._peers

        def reduce(own: np.ndarray) -> None:
            peers.Allreduce(MPI.IN_PLACE, own, operator)
            if op is ReduceOp.MEAN:
                divide(own, self._size)

        return reduce

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Reduce each array of `message`. **Collective**."""
        attached, self._attached = self._attached, None
        is_attached = attached is not None and attached.message is message
        if attached is None or not is_attached:
            attached = _Attached(message, *message.whole())
        source, num_bytes = attached.source, message.num_bytes
        start, goal = address_of(source), address_of(attached.target)
        with self._occupancy:
            for done in range(0, num_bytes, self._memory.BLOCK_BYTES):
                if done or not is_attached:
                    self._contribute(start + done, num_bytes - done)
                self._reduce_block(op, source.dtype, start + done, goal + done, num_bytes - done)
        attached.split()

    def reduce(self, op: ReduceOp, message: Message, root: int) -> None:
        """Reduce each array of `message`, on every rank: it costs the same. **Collective**."""
        self.all_reduce(op, message)

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Let MPI reduce `message`: no other thread may send. **Collective**."""
        return self._otherwise.start_all_reduce(op, message)

    def drain(self) -> None:
        """Do nothing: no reduction is pending."""

    def revoke(self) -> None:
        """Let every rank leave its waits in the communicator of the ranks with the same slice."""
        revoke(self._peers)

    def close(self) -> None:
        """Free the communicator of the ranks with the same slice. **Collective**."""
        if self._peers != MPI.COMM_NULL:
            self._peers.Free()

    def _contribute(self, source: int, num_bytes: int) -> None:
        """Copy in the block that begins at `source`, `num_bytes` before the end of the array."""
        memory, length = self._memory, min(self._memory.BLOCK_BYTES, num_bytes)
        memory.library.contribute_slices(
            memory.reductions.pointer, self._num_slices, source, length
        )

    def _reduce_block(
        self, op: ReduceOp, dtype: np.dtype, source: int, target: int, num_bytes: int
    ) -> None:
        """Reduce the block that `_contribute` has copied in."""
        memory, library = self._memory, self._memory.library
        num_bytes = min(memory.BLOCK_BYTES, num_bytes)
        function = compiled_function(op, dtype)
        assert function is not None
        sequence, slices = memory.reductions.pointer, self._num_slices
        place = library.reduce_slice(sequence, function[0], slices, source, num_bytes)
        memory.reductions.check()
        own = memory.view(*place).view(dtype)
        # The slice is reduced in place, in this rank's half: the other ranks of the node read it
        # after the next step, at which only `collect_slices` arrives.
        if own.size:  # the ranks without a slice have no peers
            self.ready(op, dtype)(own)
        library.collect_slices(sequence, slices, target, num_bytes)
        memory.reductions.check()


_TRIED_BYTES = (2**18, 2**14, 2**6)
_REPETITIONS = 10
_BUDGET_S = 0.02
"""How long to repeat one reduction, if the others take as long as the first."""
_ADVANTAGE = 1.2
"""How much slower shared memory must be before MPI is used instead: times vary by chance."""

_Reduce = Callable[[ReduceOp, Message], None]


@dataclass(frozen=True)
class _Sharing:
    """Memory that ranks share, and the reducer that uses it."""

    memory: NodeMemory
    reducer: NodeReducer
    holds_all: bool
    """Whether all ranks are on one node."""


class _Facts(NamedTuple):
    """What the ranks tell each other before they share memory."""

    num_mates: int
    """How many ranks are on its node."""
    has_library: bool
    place: Place | None
    """Place of the memory, from the first rank of a node."""
    cores: int
    """Mask of the cores that the rank may use."""
    asked_bytes: int
    """`shared_min_bytes` of the settings, -1 if not set."""
    known_bytes: int
    """Threshold measured before for the same number of ranks, -1 if there is none."""
    has_fast_paths: bool
    """`fast_paths` of the settings."""


def share_memory(
    comm: MPI.Intracomm, otherwise: Reducer, occupancy: Occupancy
) -> tuple[_Sharing | None, bool]:
    """Return memory that the ranks of each node share, and whether any fast path is wanted.

    There is no memory if each rank has its own node, or if a rank wants none. **Collective**.
    """
    chosen = settings_at_the_end()
    if comm.size == 1:
        return None, chosen.fast_paths
    node, has_library = ranks_of_node(comm), native_library() is not None
    num_mates = len(node)
    is_first = comm.rank == node[0] and num_mates > 1 and has_library and chosen.fast_paths
    offer = NodeMemory.offer(num_mates) if is_first else None
    asked = chosen.shared_min_bytes
    # As few messages as possible: with more ranks than cores, each message takes long.
    own = _Facts(
        num_mates,
        has_library,
        None if offer is None else offer.place,
        mask_of_cores(own_cores()),
        -1 if asked is None else asked,
        _measured.get(comm.size, -1),
        chosen.fast_paths,
    )
    facts: list[_Facts] = comm.allgather(own)
    sizes = [each.num_mates for each in facts]
    memory, has_fast_paths = None, all(each.has_fast_paths for each in facts)
    if max(sizes) > 1 and has_fast_paths and all(each.has_library for each in facts):
        memory = _open([facts[each] for each in node], node.index(comm.rank))
        # On all ranks or on none: a rank that cannot map the memory would wait in MPI for ranks
        # that wait in the memory.
        if not all_of(comm, memory is not None):
            memory = None
    # Only now, because by now every rank of the node has opened the file, or has failed to.
    if offer is not None:
        offer.close()
    if memory is None:
        return None, has_fast_paths
    reducer: NodeReducer
    holds_all = min(sizes) == comm.size
    if holds_all:
        reducer = SharedMemoryReducer(memory, occupancy)
    else:
        reducer = HierarchicalReducer(memory, comm, min(sizes), otherwise, occupancy)
    # This takes a few milliseconds. No rule says from which size on shared memory is faster. But if
    # ranks share cores, it always is, since MPI keeps the cores while it waits.
    min_bytes = max(each.asked_bytes for each in facts)
    if min_bytes >= 0 or (holds_all and memory.shares_cores):
        reducer.min_bytes = max(min_bytes, 0)
    else:
        # Thresholds that the ranks have measured before, in groups of the same size.
        before = [each.known_bytes for each in facts]
        # Measuring is collective, and the ranks may have been in different groups so far. If one of
        # them has measured nothing yet, all measure.
        is_new = min(before) < 0
        found = _measure(comm, reducer.all_reduce, otherwise.all_reduce) if is_new else max(before)
        _measured[comm.size] = reducer.min_bytes = found
    return _Sharing(memory, reducer, holds_all), has_fast_paths


def _open(facts: Sequence[_Facts], local_rank: int) -> NodeMemory | None:
    """Return the memory of the ranks with these `facts`, ``None`` if it is not available."""
    place, cores = facts[0].place, 0
    # The ranks of a node may be bound to different cores: what matters is how many they have
    # together.
    for each in facts:
        cores |= each.cores
    if place is None:
        return None
    return NodeMemory.open(place, local_rank, len(facts), cores.bit_count())


_measured: dict[int, int] = {}
"""Results of `_measure` by the number of ranks: a program may create thousands of groups."""


def _measure(comm: MPI.Intracomm, shared: _Reduce, otherwise: _Reduce) -> int:
    """Return the smallest tested size from which on shared memory was faster, for all ranks."""
    pool = Pool()
    min_bytes = 2 * max(_TRIED_BYTES)
    for num_bytes in _TRIED_BYTES:
        source = np.zeros(num_bytes // 4, np.float32)
        message = Message([source], [np.zeros_like(source)], pool)
        times_s = np.array([_shortest_s(comm, reduce, message) for reduce in (shared, otherwise)])
        # Each rank must reach the same result. With different thresholds, some ranks would wait in
        # MPI for ranks that wait in shared memory.
        comm.Allreduce(MPI.IN_PLACE, times_s, MPI.SUM)
        if times_s[0] > _ADVANTAGE * times_s[1]:
            break
        min_bytes = num_bytes
    return 0 if min_bytes == min(_TRIED_BYTES) else min_bytes


def _shortest_s(comm: MPI.Intracomm, reduce: _Reduce, message: Message) -> float:
    began = time.perf_counter()
    reduce(ReduceOp.SUM, message)
    first_s: float = comm.allreduce(time.perf_counter() - began, MPI.MAX)
    # `first_s` is the same on all ranks, so the number of repetitions is too.
    times_s = []
    # If many ranks share a core, they take turns, up to a second in total.
    for _ in range(min(_REPETITIONS, 1 + int(_BUDGET_S / first_s))):
        comm.Barrier()
        began = time.perf_counter()
        reduce(ReduceOp.SUM, message)
        times_s.append(time.perf_counter() - began)
    return min(times_s)
