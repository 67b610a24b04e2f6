"""Reduction of device arrays by an MPI library that is proved to take device memory."""

from __future__ import annotations

from collections.abc import Callable

from mpistrat.arrays import on_device_of
from mpistrat.comm.message import Message
from mpistrat.comm.reducer import Reducer
from mpistrat.comm.transport import Transport
from mpistrat.comm.whole import WholeReducer
from mpistrat.options import ReduceOp

__all__ = ["DirectReducer"]


class DirectReducer:
    """Gives the transport the device memory itself, in blocking collectives.

    Non-blocking ones take no device memory in Open MPI, so `staged` does those.

    Parameters
    ----------
    transport : Transport
    staged : Reducer
    """

    def __init__(self, transport: Transport, staged: Reducer) -> None:
        self._whole = WholeReducer(transport)
        self._staged = staged

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Reduce the array of `message`. **Collective**."""
        with on_device_of(message.targets[0]):
            self._whole.all_reduce(op, message)

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Begin to reduce the array of `message`, on the host. **Collective**."""
        return self._staged.start_all_reduce(op, message)

    def reduce(self, op: ReduceOp, message: Message, root: int) -> None:
        """Reduce the array of `message` to `root`. **Collective**."""
        with on_device_of(message.targets[0]):
            self._whole.reduce(op, message, root)
