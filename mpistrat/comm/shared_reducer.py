"""Shared-memory reducer: the ranks of one node, or the rows of one rank, in compiled code."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import address_of
from mpistrat.comm.ops import compiled_function
from mpistrat.comm.packing import Message
from mpistrat.comm.shared_memory import NodeMemory, StepSequence
from mpistrat.comm.transport import Occupancy
from mpistrat.options import ReduceOp
from mpistrat.sharding import Fold
from mpistrat.system.background import Background

_BLOCK_BYTES = 2**19
_ALIGNMENT = 64
_SMALL_BYTES = 2**15
"""Up to this size, over all ranks, a wait costs more than reducing everything on every rank."""
_ALL_BYTES = 2**62


class RowOrder:
    """Order in which rows are combined, each a node of the tree of `num_replicas` rows."""

    def __init__(
        self, num_replicas: int, nodes_of_ranks: Sequence[Sequence[tuple[int, int]]]
    ) -> None:
        # Nodes are defined by first row and width, per rank. For each node, the compiled code needs
        # the number of earlier sums with which it is combined.
        count = 0

        def combine(left: None, right: None) -> None:
            nonlocal count
            count += 1

        fold: Fold[None] = Fold(num_replicas, combine)
        combined, most_sums = [], 0
        for begin, width in [node for nodes in nodes_of_ranks for node in nodes]:
            count = 0
            fold.add(begin, None, width)
            combined.append(count)
            most_sums = max(most_sums, len(fold.nodes))
        self.num_rows = [len(nodes) for nodes in nodes_of_ranks]
        """How many rows each rank contributes."""
        # Stored as `struct order` of native/sequences.h, and passed by address.
        self._structure = np.array([most_sums, *self.num_rows, *combined], np.int64)
        self.pointer: int = self._structure.ctypes.data
        """The address of the C structure, valid as long as this object."""


class LocalRows:
    """Combines the rows of only this rank, in one pass over memory. For one thread at a time."""

    def __init__(self, library: Any) -> None:
        self._reduce = library.reduce
        self._line = np.zeros(32, np.int64)
        # A sequence of one rank: its steps are complete as soon as it arrives, so it never waits.
        self._sequence = StepSequence(0, 0, [self._line.ctypes.data])

    def combine(
        self,
        op: ReduceOp,
        order: RowOrder,
        rows: list[np.ndarray],
        targets: Sequence[np.ndarray],
        divisor: int = 1,
    ) -> None:
        """Combine `rows`, each with one array per target, and divide the sums."""
        function = compiled_function(op, targets[0].dtype)
        assert function is not None
        parameters = self._sequence.pointer, function[0], divisor, function[1], order.pointer
        self._reduce(*parameters, *order.num_rows, _ALL_BYTES, 0, False, rows, targets)


class SharedMemoryReducer:
    """Reduces messages in `memory`, in a fixed tree; one rank reduces an element for all."""

    min_bytes = 0
    keeps_order = True

    def __init__(self, memory: NodeMemory, occupancy: Occupancy) -> None:
        self._memory = memory
        self._occupancy = occupancy
        self.sizes = (_BLOCK_BYTES, _SMALL_BYTES // memory.size)
        """Bytes of a block, and bytes up to which every rank reduces all; equal on all ranks."""
        self._contribute = functools.partial(
            memory.library.reduce_contribute, memory.reductions.pointer
        )
        # One thread, which works in the order of the calls. So every rank reduces in the same
        # order.
        self._background = Background("mpistrat-reductions")
        self._attached: Message | None = None

    def knows(self, op: ReduceOp, dtype: np.dtype) -> bool:
        """Return whether the compiled code reduces `dtype` by `op`."""
        return compiled_function(op, dtype) is not None

    def attach(self, message: Message) -> None:
        """Copy in the parts of the first block of `message` that other ranks need."""
        # This also publishes the targets: if the targets of all ranks are in arenas, each rank
        # writes its slice to all of them, and no rank copies results out.
        self._contribute(*self.sizes, message.sources, message.targets)
        self._attached = message

    def detach(self) -> None:
        """Withdraw the message that was attached last."""
        # For an empty message `reduce_contribute` arrives at no step, so there is none to withdraw.
        if self._attached is not None and self._attached.num_bytes:
            self.withdraw()
        self._attached = None

    def parameters(self, op: ReduceOp, dtype: np.dtype, num_bytes: int) -> dict[str, int]:
        """Return the parameters with which compiled code reduces an array in this memory."""
        function = compiled_function(op, dtype)
        if function is None:
            return {}
        number, itemsize = function
        block, small = self.sizes
        divisor = self._memory.size if op is ReduceOp.MEAN else 1
        return {
            "reductions": self._memory.reductions.pointer,
            "function": number,
            "divisor": divisor,
            "itemsize": itemsize,
            "block": block,
            "small": small,
        }

    def ready(self, op: ReduceOp, dtype: np.dtype) -> None:
        """Return ``None``: there is one node."""

    def check(self) -> None:
        """Raise if a wait of compiled code has ended because ranks leave."""
        self._memory.reductions.check()

    def withdraw(self) -> None:
        """Withdraw the data that compiled code has attached."""
        self._memory.library.reduce_withdraw(self._memory.reductions.pointer)

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Reduce each array of `message`. **Collective**."""
        # `_attached` is cleared before the reduction: from then on other ranks read the
        # contribution, and `detach` must not withdraw it, even if the reduction raises.
        is_attached = self._attached is message
        self._attached = None
        with self._occupancy:
            self._reduce(self._memory.reductions, op, message, is_attached)

    def reduce_rows(
        self,
        op: ReduceOp,
        order: RowOrder,
        rows: list[np.ndarray],
        targets: Sequence[np.ndarray],
        divisor: int,
    ) -> None:
        """Combine all rows of all ranks in `order`, and divide them. **Collective**.

        `rows` are the rows of this rank, one behind the other, each with one array per target.
        """
        function = compiled_function(op, targets[0].dtype)
        assert function is not None
        # One half of a rank holds all of its rows of a block. So the rank with the most rows limits
        # the block size, which must be equal on all ranks.
        most = self._memory.BLOCK_BYTES // max(order.num_rows) // _ALIGNMENT * _ALIGNMENT
        sizes = min(_BLOCK_BYTES, most), _SMALL_BYTES // sum(order.num_rows)
        sequence, num_rows = self._memory.reductions, order.num_rows[self._memory.rank]
        parameters = sequence.pointer, function[0], divisor, function[1], order.pointer, num_rows
        with self._occupancy:
            self._memory.library.reduce(*parameters, *sizes, False, rows, targets)
            # If a rank has left, the function in C has returned early, and the content of the
            # targets is undefined.
            sequence.check()

    def reduce(self, op: ReduceOp, message: Message, root: int) -> None:
        """Reduce each array of `message`, on every rank: it costs the same. **Collective**."""
        self.all_reduce(op, message)

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Let a thread reduce each array of `message`; return the function that waits for it."""
        # With its own sequence: the main thread may reduce at the same time, and a sequence counts
        # the steps of one series of collectives.
        end = self._background.submit(lambda: self._reduce(self._memory.background, op, message))

        def wait() -> None:
            with self._occupancy:
                end()

        return wait

    def reduce_parts(
        self,
        source: np.ndarray,
        starts: Sequence[int],
        update: Callable[[int, np.ndarray], object],
        target: np.ndarray | None = None,
    ) -> None:
        """Sum `source`, of which each rank owns a part, and share the updated sums. **Collective**.

        All arrays are in C order, and equally long on all ranks. Part r begins at element
        ``starts[r]``; the last of `starts` is the length. For each chunk of this rank's part,
        ``update(begin, sums)`` is called; the chunk begins at element `begin` of `source`. `update`
        may overwrite `sums`. The values that all ranks leave there are copied to `target`, except
        this rank's own part, which stays unchanged in `target`.
        """
        memory, itemsize = self._memory, source.dtype.itemsize
        function = compiled_function(ReduceOp.SUM, source.dtype)
        assert function is not None
        sequence, library = memory.reductions.pointer, memory.library
        bounds = np.array(starts, np.int64) * itemsize
        # One half holds a chunk for every rank.
        most = memory.BLOCK_BYTES // memory.size // _ALIGNMENT * _ALIGNMENT
        begin, longest = starts[memory.rank], int(np.diff(bounds).max())
        with self._occupancy:
            # Every rank runs as many iterations as the longest part needs, with empty chunks at the
            # end of a shorter part: each iteration is two steps, at which all ranks must arrive.
            for at in range(0, longest, most):
                where = (bounds.ctypes.data, at, most)
                room = library.reduce_part(sequence, function[0], address_of(source), *where)
                memory.reductions.check()
                if room[1]:
                    # In place, which is safe: no rank reads this half before `collect_parts`
                    # arrives at the next step.
                    update(begin + at // itemsize, memory.view(*room).view(source.dtype))
                library.collect_parts(sequence, 0 if target is None else address_of(target), *where)
                memory.reductions.check()

    def moved_bytes(self, num_bytes: int, in_arenas: bool) -> int:
        """Return how many bytes a rank reads and writes to reduce one array out of place."""
        # `in_arenas` says whether the results of all ranks are in shared memory.
        size = self._memory.size
        if num_bytes <= self.sizes[1]:  # each rank copies in all, and reduces all
            return (2 + size + 1) * num_bytes
        slice_bytes = num_bytes // size
        copied_in = 2 * (num_bytes - slice_bytes)
        if in_arenas:
            return copied_in + num_bytes + num_bytes
        copied_out = 2 * (num_bytes - slice_bytes)
        return copied_in + num_bytes + 2 * slice_bytes + copied_out

    def drain(self) -> None:
        """Wait until the thread is idle."""
        with self._occupancy:
            self._background.drain()

    def revoke(self) -> None:
        """Do nothing: there is no communicator."""

    def close(self) -> None:
        """End the thread."""
        self._background.close()

    def _reduce(
        self, sequence: StepSequence, op: ReduceOp, message: Message, is_attached: bool = False
    ) -> None:
        function = compiled_function(op, message.dtype)
        assert function is not None
        number, itemsize = function
        divisor = self._memory.size if op is ReduceOp.MEAN else 1
        # The 0 and the 1 mean: no row order, and one row per rank.
        self._memory.library.reduce(
            sequence.pointer,
            number,
            divisor,
            itemsize,
            0,
            1,
            *self.sizes,
            is_attached,
            message.sources,
            message.targets,
        )
        sequence.check()
