"""Reduction of whole messages by the transport: the MPI library chooses how."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpistrat.comm.message import Message
from mpistrat.comm.transport import Transport
from mpistrat.comm.tree import divide
from mpistrat.options import ReduceOp

__all__ = ["MOVES_AS", "WholeReducer"]

MOVES_AS = {op: op for op in ReduceOp} | {ReduceOp.MEAN: ReduceOp.SUM}
"""What the numbers are reduced by on their way."""


class WholeReducer:
    """Leaves the order of the operands to the MPI library.

    It may depend on the size of the message and on where the ranks run.

    Parameters
    ----------
    transport : Transport
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Reduce each array of `message`. **Collective**."""
        source, target, split = message.whole()
        self._transport.all_reduce(MOVES_AS[op], source, target)
        self._finish(op, target)
        split()

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
        if self._transport.rank == root:
            self._finish(op, joined)
            split()

    def _finish(self, op: ReduceOp, array: np.ndarray) -> None:
        if op is ReduceOp.MEAN:
            divide(array, self._transport.size)
