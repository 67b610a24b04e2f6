"""Reduction by slices: each rank brings the pieces of its slice together, in a fixed order.

An all-to-all gives each rank all pieces of its slice, and an all-gather hands out the results:
the two halves of Rabenseifner's algorithm ("Optimization of Collective Reduction Operations",
2004), with the arithmetic in our hands. So the order of the operands is ours, and what travels
may be narrower than what the sums are taken in.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpistrat.comm.casts import cast
from mpistrat.comm.dtypes import accumulator_dtype
from mpistrat.comm.message import Message
from mpistrat.comm.slices import plan_blocks, slice_lengths
from mpistrat.comm.transport import Transport
from mpistrat.comm.tree import combine
from mpistrat.options import ReduceOp

__all__ = ["SlicedReducer"]


class SlicedReducer:
    """Combines the elements of all ranks in a fixed tree in rank order.

    The bits of a result depend on the number of ranks and the values alone, because nothing but
    the element itself enters into it. Messages of 16-bit floats travel as they are, both ways, and
    are summed in float32. Large ones go in blocks, so that a few MiB of memory suffice.

    Parameters
    ----------
    transport : Transport
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Reduce each array of `message`. **Collective**."""
        joined, split = message.joined()
        for block in self._blocks(joined):
            lengths = slice_lengths(block.size, self._transport.size)
            block[...] = self._transport.all_gather(self._own_slice(op, block, lengths), lengths)
        split()

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Reduce each array of `message`, before this returns. **Collective**.

        The all-gather cannot be left to the wait: ranks may wait for several reductions in
        different orders, but must come to collectives in one.
        """
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
        flat = buffer.reshape(-1)
        return [flat[each] for each in plan_blocks(flat.size, flat.itemsize, self._transport.size)]

    def _own_slice(self, op: ReduceOp, block: np.ndarray, lengths: list[int]) -> np.ndarray:
        """Return the reduction of this rank's slice of `block`. **Collective**."""
        pieces = self._transport.all_to_all(block, lengths).reshape(self._transport.size, -1)
        wide = cast(pieces, accumulator_dtype(block.dtype))
        return cast(combine(op, wide), block.dtype)
