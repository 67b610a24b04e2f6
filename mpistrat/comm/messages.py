"""Messages between two ranks: a header, separate buffers, and a probe loop with back-off.

No call here waits for a single rank, so a stopped or dead rank does not block the others: sends and
receives are nonblocking, and `Messenger.poll` makes progress with all of them.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrat.comm.mpi_transport import in_parts
from mpistrat.comm.pool import Pool
from mpistrat.mpi.survival import is_loss
from mpistrat.mpi.world import largest_tag

_ANY = MPI.ANY_SOURCE

_HEAD = struct.Struct("<iiiqq")
"""Kind, number of buffers, tag of the payloads, number of the request, bytes of the body."""
_LENGTH = struct.Struct("<q")

_INLINE_BYTES = 2048
"""Most bytes of payload in the header; all libraries send that without waiting for the receiver."""

_BYTE = np.dtype(np.uint8)


@dataclass(slots=True)
class Message:
    """A message from one rank to another."""

    source: int
    lane: int
    """The tag: a receiver may ask for messages of only one lane."""
    kind: int
    number: int
    """Number of the request that this is, or answers."""
    body: Any
    """The body as bytes."""
    buffers: list[np.ndarray]
    """Byte arrays, each in its own memory, which the receiver may keep."""


class Sending:
    """A message that is being sent."""

    __slots__ = ("destination", "kept", "requests")

    def __init__(self, destination: int, requests: list[MPI.Request], kept: list[Any]) -> None:
        self.destination = destination
        self.requests = requests
        self.kept = kept
        """Objects whose memory MPI still reads."""

    def is_done(self) -> bool:
        """Return whether the memory of the message may be written to again."""
        if self.requests and MPI.Request.Testall(self.requests):
            self.requests, self.kept = [], []
        return not self.requests


@dataclass(slots=True)
class _Arriving:
    """A message whose header has arrived, and whose buffers have not."""

    message: Message
    requests: list[MPI.Request]


class BackOff:
    """The pauses of a loop that finds nothing to do: first none, then longer and longer ones."""

    # A rank that is asked often answers within microseconds; a rank that waits for long leaves its
    # core to others. If ranks share cores, none of them spins.

    _PLAN_NS = ((1_000_000, 0.0), (20_000_000, 50e-6), (1_000_000_000, 200e-6))
    _LONG_S = 1e-3

    def __init__(self, shares_core: bool = False) -> None:
        self._spin_ns = 0 if shares_core else 100_000
        self._since_ns = 0

    def reset(self) -> None:
        """Begin again with no pause, because there was something to do."""
        self._since_ns = 0

    def rest(self) -> None:
        """Pause, the longer the more often there was nothing to do."""
        now = time.monotonic_ns()
        if not self._since_ns:
            self._since_ns = now
        waited_ns = now - self._since_ns
        if waited_ns < self._spin_ns:
            return
        for until_ns, nap_s in self._PLAN_NS:
            if waited_ns < until_ns:
                time.sleep(nap_s) if nap_s else os.sched_yield()
                return
        time.sleep(self._LONG_S)


class Messenger:
    """Sends and receives the messages of one rank. Creating and freeing one is **Collective**.

    `lost` are the ranks that have died, if the MPI library reports it; otherwise it stays empty.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._headers = comm.Dup()
        self._payloads = comm.Dup()
        """A separate communicator, so that no probe for headers finds the payloads."""
        self._next_tags = [0] * comm.size
        """The tag of the next message with payloads to each rank."""
        # MPI guarantees only tags up to 32767 (MPI 4.1, section 9.1.2), so they are reused in turn.
        self._num_tags = largest_tag() + 1
        self.rank, self.size = comm.rank, comm.size
        self.lost: set[int] = set()
        self.on_loss: Callable[[list[int]], object] | None = None
        """Called with the lost ranks, as soon as a loss is noticed."""
        self._pool = Pool()
        self._sending: list[Sending] = []
        self._arriving: list[_Arriving] = []
        self._abandoned: list[Any] = []
        """Requests that can never end, with their memory."""
        self._status = MPI.Status()

    def send(
        self,
        destination: int,
        lane: int,
        kind: int,
        number: int = 0,
        body: Any = b"",
        buffers: Sequence[np.ndarray] = (),
    ) -> Sending:
        """Begin to send; do not write to `buffers`, which are in C order, before it is done."""
        flat = [each.reshape(-1).view(_BYTE) if each.size else _NOTHING for each in buffers]
        if len(body) > _INLINE_BYTES:
            flat.append(np.frombuffer(body, np.uint8))
            length, body = -1, b""  # the last buffer is the body
        else:
            length = len(body)
        is_inline = sum(each.size for each in flat) <= _INLINE_BYTES
        tag = 0 if is_inline else self._take_tag(destination)
        parts: list[Any] = [_HEAD.pack(kind, len(flat), tag, number, length)]
        parts += [_LENGTH.pack(each.size) for each in flat]
        parts.append(body)
        if is_inline:
            parts += [each.tobytes() for each in flat]
        header = b"".join(parts)
        sending = Sending(destination, [], [header, flat])
        # Checked before the call of MPI, which would raise for each further message to a dead rank.
        if destination in self.lost:
            return Sending(destination, [], [])
        try:
            sending.requests.append(self._headers.Isend(header, destination, lane))
            if not is_inline:
                for each in flat:
                    for part in in_parts(each):
                        sending.requests.append(self._payloads.Isend(part, destination, tag))
            if not is_inline:
                _hurry(sending.is_done)
            if not sending.is_done():
                self._sending.append(sending)
        except MPI.Exception as error:
            self._note(error)
            # Some of its sends may have begun, and MPI may still read their memory.
            self._abandoned.append(sending)
            return Sending(destination, [], [])
        return sending

    def _take_tag(self, destination: int) -> int:
        """Return the tag by which the receiver of a header finds the payloads of that message."""
        # A receiver may ask for only one lane, and so read the headers of a rank in a different
        # order from the order of sending. Without a tag, two messages would get each other's
        # payloads.
        tag = self._next_tags[destination]
        self._next_tags[destination] = (tag + 1) % self._num_tags
        return tag

    def poll(self, source: int = _ANY, lane: int = MPI.ANY_TAG) -> Message | None:
        """Return a message that has arrived, if there is one, and make progress with all others.

        Messages of one rank on one lane are returned in the order in which they were sent.
        """
        try:
            if self._sending:
                self._sending = [each for each in self._sending if not each.is_done()]
            if self._arriving:
                arrived = self._arrived(source, lane)
                if arrived is not None:
                    return arrived
            # A matched probe: `Recv` below takes exactly this message (MPI 4.1, section 3.8.2),
            # even if a second thread probes in between.
            matched = self._headers.Improbe(source, lane, self._status)
            if matched is None:
                return None
            status = self._status
            came_from, came_by = status.Get_source(), status.Get_tag()
            header = bytearray(status.Get_count(MPI.BYTE))
            matched.Recv(header)
            return self._begun(came_from, came_by, memoryview(header), source, lane)
        except MPI.Exception as error:
            self._note(error)
            return None

    def _begun(
        self, source: int, lane: int, header: memoryview, asked: int, lane_asked: int
    ) -> Message | None:
        """Return the message of a header, or ``None`` while its buffers are still arriving."""
        kind, count, tag, number, length = _HEAD.unpack_from(header)
        at = _HEAD.size + count * _LENGTH.size
        sizes = [size for (size,) in _LENGTH.iter_unpack(header[_HEAD.size : at])]
        body = header[at : at + max(length, 0)]
        message = Message(source, lane, kind, number, body, [])
        at += max(length, 0)
        if sum(sizes) <= _INLINE_BYTES:
            for size in sizes:
                message.buffers.append(np.frombuffer(bytearray(header[at : at + size]), np.uint8))
                at += size
            if not self._arriving:
                return _complete(message, length)
            self._arriving.append(_Arriving(_complete(message, length), []))
            return self._arrived(asked, lane_asked)  # an earlier message is returned first
        requests: list[MPI.Request] = []
        buffers = [self._pool.take((size,), _BYTE) for size in sizes]
        message.buffers += buffers
        # Noted before the first receive: if the sender is lost, the memory must stay valid.
        self._arriving.append(_Arriving(_complete(message, length), requests))
        for buffer in buffers:
            requests += [self._payloads.Irecv(part, source, tag) for part in in_parts(buffer)]
        _hurry(lambda: MPI.Request.Testall(requests))
        return self._arrived(asked, lane_asked)

    def _arrived(self, source: int, lane: int) -> Message | None:
        """Return the first complete message of the requested ones."""
        # Keeps the order: a complete message must not overtake a message of the same sender and
        # lane whose buffers are still arriving.
        earlier = set()
        for i, each in enumerate(self._arriving):
            message = each.message
            if each.requests and MPI.Request.Testall(each.requests):
                each.requests = []
            is_asked = source in (_ANY, message.source) and lane in (MPI.ANY_TAG, message.lane)
            line = message.source, message.lane
            if is_asked and not each.requests and line not in earlier:
                del self._arriving[i]
                return message
            if each.requests:
                earlier.add(line)
        return None

    def _note(self, error: MPI.Exception) -> None:
        """Note which ranks have died, or raise an error that has a different reason."""
        if not is_loss(error):
            raise error
        failed = self._headers.Get_failed()
        own = self._headers.Get_group()
        ranks = set(failed.Translate_ranks(None, own)) - self.lost
        self._headers.Ack_failed(failed.size)  # from here on, messages of other ranks can be probed
        failed.Free()
        own.Free()
        if not ranks:
            return
        self.lost |= ranks
        # MPI may read and write their memory forever.
        self._abandoned += [each for each in self._sending if each.destination in ranks]
        self._sending = [each for each in self._sending if each.destination not in ranks]
        self._abandoned += [each for each in self._arriving if each.message.source in ranks]
        self._arriving = [each for each in self._arriving if each.message.source not in ranks]
        if self.on_loss is not None:
            self.on_loss(sorted(ranks))

    def is_idle(self) -> bool:
        """Return whether all messages have been sent."""
        return not self._sending

    def flush(self, limit_s: float | None = None) -> None:
        """Wait until all messages have been sent, at most for `limit_s`."""
        back_off, began = BackOff(), time.monotonic()
        while self._sending and (limit_s is None or time.monotonic() - began < limit_s):
            try:
                self._sending = [each for each in self._sending if not each.is_done()]
            except MPI.Exception as error:
                self._note(error)
            back_off.rest()

    def free(self) -> None:
        """Free the communicators. **Collective**, and needs every rank."""
        self._headers.Free()
        self._payloads.Free()


_NOTHING = np.empty(0, np.uint8)

_HURRY_NS = 2_000_000


def _hurry(is_done: Callable[[], bool]) -> None:
    """Poll a transfer that has just begun for a moment: MPI moves data only while it is polled."""
    until = time.monotonic_ns() + _HURRY_NS
    while not is_done() and time.monotonic_ns() < until:
        os.sched_yield()


def _complete(message: Message, length: int) -> Message:
    """Return the message; if its body was sent as the last buffer, put it in its place."""
    if length < 0:
        message.body = message.buffers.pop()
        message.body = message.body.data
    return message
