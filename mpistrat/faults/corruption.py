"""A transport that hands over one wrong bit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.comm.dtypes import is_narrow
from mpistrat.comm.message import Message
from mpistrat.comm.transport import Carrier, NodeReducer, Transport
from mpistrat.epochs.channel import Channel
from mpistrat.options import ReduceOp

__all__ = ["corrupt_next"]


def corrupt_next(channel: Channel, bit: int | None) -> None:
    """Flip one bit in the next floating-point numbers that this rank receives. Local.

    By default it is the sign of the first number, which no cast rounds away.

    Integers are left alone: messages about lengths and digests are made of them, and a wrong
    one there is another fault than numbers that drift.
    """
    channel.transport = _CorruptingTransport(channel, bit)


class _CorruptingTransport:
    """Passes everything on to the transport of `channel`, which it replaces until it has lied."""

    def __init__(self, channel: Channel, bit: int | None) -> None:
        self._channel = channel
        self._bit = bit
        self._transport: Transport = channel.transport

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _corrupt(self, received: np.ndarray) -> None:
        if self._channel.transport is not self or not received.size:
            return
        if received.dtype.kind in "fc" or is_narrow(received.dtype):
            numbers = received.reshape(-1)
            bits = numbers.view(np.uint8)
            number_bits = 8 * numbers.real.itemsize
            place, bit = divmod(number_bits - 1 if self._bit is None else self._bit, 8)
            bits[place % bits.size] ^= 1 << bit
            self._channel.transport = self._transport

    @property
    def node(self) -> NodeReducer | None:
        node = self._transport.node
        return None if node is None else _CorruptingNode(node, self._corrupt)

    @property
    def carrier(self) -> Carrier | None:
        carrier = self._transport.carrier
        return None if carrier is None else _CorruptingCarrier(carrier, self._corrupt)

    def all_reduce(self, op: ReduceOp, source: np.ndarray, target: np.ndarray) -> None:
        self._transport.all_reduce(op, source, target)
        self._corrupt(target)

    def start_all_reduce(
        self, op: ReduceOp, source: np.ndarray, target: np.ndarray
    ) -> Callable[[], object]:
        wait = self._transport.start_all_reduce(op, source, target)

        def end() -> None:
            wait()
            self._corrupt(target)

        return end

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        self._transport.broadcast(buffer, root)
        self._corrupt(buffer)

    def broadcast_each(self, buffers: Sequence[np.ndarray], roots: Sequence[int]) -> None:
        self._transport.broadcast_each(buffers, roots)
        for buffer in buffers:
            self._corrupt(buffer)

    def all_gather(self, part: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        gathered = self._transport.all_gather(part, counts)
        self._corrupt(gathered)
        return gathered


class _CorruptingNode:
    """Passes everything on to `node`."""

    def __init__(self, node: NodeReducer, corrupt: Callable[[np.ndarray], None]) -> None:
        self._node = node
        self._corrupt = corrupt
        self.knows, self.drain = node.knows, node.drain
        self.board, self.unboard = node.board, node.unboard
        self.min_bytes = node.min_bytes

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        self._node.all_reduce(op, message)
        self._corrupt(message.targets[0])

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        wait = self._node.start_all_reduce(op, message)

        def end() -> None:
            wait()
            self._corrupt(message.targets[0])

        return end


class _CorruptingCarrier:
    """Passes everything on to `carrier`."""

    def __init__(self, carrier: Carrier, corrupt: Callable[[np.ndarray], None]) -> None:
        self._carrier = carrier
        self._corrupt = corrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._carrier, name)

    def collect(self, op: ReduceOp, target: np.ndarray) -> None:
        self._carrier.collect(op, target)
        self._corrupt(target)
