"""Reduction of whole buffers by the transport: the MPI library chooses how."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpistrat.comm.transport import Transport
from mpistrat.comm.tree import divide
from mpistrat.options import ReduceOp

__all__ = ["WholeReducer"]

_MOVES_AS = {op: op for op in ReduceOp} | {ReduceOp.MEAN: ReduceOp.SUM}


class WholeReducer:
    """Leaves the order of the operands to the MPI library.

    It may depend on the size of the buffer and on where the ranks run.

    Parameters
    ----------
    transport : Transport
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def all_reduce(self, op: ReduceOp, buffer: np.ndarray) -> None:
        """Reduce `buffer` in place. **Collective**."""
        self._transport.all_reduce(_MOVES_AS[op], buffer)
        self._finish(op, buffer)

    def start_all_reduce(self, op: ReduceOp, buffer: np.ndarray) -> Callable[[], object]:
        """Begin to reduce `buffer` in place. **Collective**, without waiting."""
        wait = self._transport.start_all_reduce(_MOVES_AS[op], buffer)

        def end() -> None:
            wait()
            self._finish(op, buffer)

        return end

    def reduce(self, op: ReduceOp, buffer: np.ndarray, root: int) -> None:
        """Reduce `buffer` in place on `root`. **Collective**."""
        self._transport.reduce(_MOVES_AS[op], buffer, root)
        if self._transport.rank == root:
            self._finish(op, buffer)

    def _finish(self, op: ReduceOp, buffer: np.ndarray) -> None:
        if op is ReduceOp.MEAN:
            divide(buffer, self._transport.size)
