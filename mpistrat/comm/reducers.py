"""Reducers over MPI: Allreduce, and reduce-scatter with a fixed tree."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpistrat.comm.ops import MOVES_AS, combine, divide, unify_nan
from mpistrat.comm.packing import Message
from mpistrat.comm.transport import Transport
from mpistrat.comm.wire import accumulator_dtype, cast
from mpistrat.options import ReduceOp
from mpistrat.sharding import cut, slice_of_rank


class MpiReducer:
    """Reduces by the MPI library, which selects the order of the operands."""

    # The order may depend on the size of the message and on where the ranks run.

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Reduce each array of `message`. **Collective**."""
        source, target, split = message.whole()
        self.all_reduce_one(op, source, target)
        split()

    def all_reduce_one(self, op: ReduceOp, source: np.ndarray, target: np.ndarray) -> None:
        """Reduce `source` into `target`, which may be the same array. **Collective**."""
        self._transport.all_reduce(MOVES_AS[op], source, target)
        self._finish(op, target)

    def ready(self, op: ReduceOp, dtype: np.dtype) -> Callable[[np.ndarray, np.ndarray], object]:
        """Return a function that does `all_reduce_one` on host arrays of `dtype`."""
        move = self._transport.ready(MOVES_AS[op], dtype)
        if op is not ReduceOp.MEAN:
            return move

        def move_and_divide(source: np.ndarray, target: np.ndarray) -> None:
            move(source, target)
            self._finish(op, target)

        return move_and_divide

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Begin to reduce each array of `message`. **Collective**, without waiting."""
        source, target, split = message.whole()
        wait = self._transport.start_all_reduce(MOVES_AS[op], source, target)

        def end() -> None:
            wait()
            self._finish(op, target)
            split()

        return end

    def reduce(self, op: ReduceOp, message: Message, root: int) -> None:
        """Reduce each array of `message` to `root`. **Collective**."""
        joined, split = message.joined()
        self._transport.reduce(MOVES_AS[op], joined, root)
        # On other ranks `joined` is undefined (see `Reducer.reduce`), so nothing is copied back.
        if self._transport.rank == root:
            self._finish(op, joined)
            split()

    def _finish(self, op: ReduceOp, array: np.ndarray) -> None:
        if op is ReduceOp.MEAN:
            divide(array, self._transport.size)


_BYTES_PER_BLOCK = 4 * 2**20
"""Limits the memory that a reduction needs in addition to its buffer."""

_BYTES_PER_SLICE = 64 * 2**10
"""With many ranks blocks are larger, so that no message is smaller than necessary."""


def plan_blocks(num_elements: int, itemsize: int, size: int) -> list[slice]:
    """Divide a buffer into blocks that are reduced one after the other."""
    return cut(num_elements, max(max(_BYTES_PER_BLOCK, size * _BYTES_PER_SLICE) // itemsize, 1))


def slice_lengths(num_elements: int, size: int) -> list[int]:
    """Return how many elements of a block each rank reduces, in rank order."""
    slices = (slice_of_rank(num_elements, size, rank) for rank in range(size))
    return [each.stop - each.start for each in slices]


class ReduceScatterReducer:
    """Combines the elements of all ranks in a fixed tree, by reduce-scatter and all-gather."""

    # The bits of a result depend only on the number of ranks and the values. 16-bit floats are sent
    # as they are, in both directions, and summed in float32. Large messages are reduced in blocks,
    # so that a few MiB of memory suffice.

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Reduce each array of `message`. **Collective**."""
        if self._transport.size == 1:
            for source, target in zip(message.sources, message.targets, strict=True):
                if target is not source:
                    np.copyto(target, source)
                unify_nan(target)
            return
        joined, split = message.joined()
        # Each block is two collectives, and all ranks divide the buffer in the same way.
        for block in self._blocks(joined):
            lengths = slice_lengths(block.size, self._transport.size)
            block[...] = self._transport.all_gather(self._own_slice(op, block, lengths), lengths)
        split()

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Reduce each array of `message`, before this returns. **Collective**."""
        # The all-gather cannot be postponed to the wait: ranks may wait for several reductions in
        # different orders, but must call collectives in the same order.
        self.all_reduce(op, message)
        return bool

    def reduce(self, op: ReduceOp, message: Message, root: int) -> None:
        """Reduce each array of `message` to `root`. **Collective**."""
        joined, split = message.joined()
        for block in self._blocks(joined):
            lengths = slice_lengths(block.size, self._transport.size)
            gathered = self._transport.gather(self._own_slice(op, block, lengths), lengths, root)
            if gathered is not None:
                block[...] = gathered
        split()

    def _blocks(self, buffer: np.ndarray) -> list[np.ndarray]:
        flat = buffer.reshape(-1)  # a view: messages are in C order
        return [flat[each] for each in plan_blocks(flat.size, flat.itemsize, self._transport.size)]

    def _own_slice(self, op: ReduceOp, block: np.ndarray, lengths: list[int]) -> np.ndarray:
        """Return the reduction of this rank's slice of `block`. **Collective**."""
        size = self._transport.size
        incoming = [lengths[self._transport.rank]] * size
        pieces = self._transport.all_to_all(block, lengths, incoming).reshape(size, -1)
        # Rounded to 16 bits only once, at the end: a sum of many 16-bit floats would lose its small
        # terms at each step.
        wide = cast(pieces, accumulator_dtype(block.dtype))
        return cast(combine(op, wide), block.dtype)
