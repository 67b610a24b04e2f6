"""Messages between two ranks: a header with buffers beside it, and a probe loop with back-off.

Nothing here waits for one rank alone, so that a rank that is stopped or dead holds nobody up: sends
and receives are nonblocking, and `Messenger.poll` makes progress with all of them.
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
"""What travels in the header, which every library sends without waiting for the receiver."""

_BYTE = np.dtype(np.uint8)


@dataclass(slots=True)
class Message:
    """What one rank sends to another."""

    source: int
    lane: int
    """The tag: messages of one lane may be asked for alone."""
    kind: int
    number: int
    """Of the request that this is, or answers."""
    body: Any
    """Bytes."""
    buffers: list[np.ndarray]
    """Of bytes, each in its own memory, which the receiver may keep."""


class Sending:
    """A message on its way."""

    __slots__ = ("destination", "kept", "requests")

    def __init__(self, destination: int, requests: list[MPI.Request], kept: list[Any]) -> None:
        self.destination = destination
        self.requests = requests
        self.kept = kept
        """What MPI still reads."""

    def is_done(self) -> bool:
        """Return whether the memory that was sent may be written to."""
        if self.requests and MPI.Request.Testall(self.requests):
            self.requests, self.kept = [], []
        return not self.requests


@dataclass(slots=True)
class _Arriving:
    """A message whose header is here, and buffers that are not."""

    message: Message
    requests: list[MPI.Request]


class BackOff:
    """The pauses of a loop that finds nothing to do: first none, then ever longer ones."""

    # A rank that is asked often answers within microseconds, and one that waits for long leaves
    # its core to others. Where ranks share cores, none of them spins.

    _PLAN_NS = ((1_000_000, 0.0), (20_000_000, 50e-6), (1_000_000_000, 200e-6))
    _LONG_S = 1e-3

    def __init__(self, shares_core: bool = False) -> None:
        self._spin_ns = 0 if shares_core else 100_000
        self._since_ns = 0

    def reset(self) -> None:
        """Begin again, as there was something to do."""
        self._since_ns = 0

    def rest(self) -> None:
        """Pause for as long as is right by now."""
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
    """Sends and receives the messages of one rank. Making and freeing one is **Collective**.

    `lost` are the ranks that have died, where the MPI library reports it; others never are.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._headers = comm.Dup()
        self._payloads = comm.Dup()
        """A separate communicator, so that no probe for headers finds them."""
        self._next_tags = [0] * comm.size
        """The tag of the next message with payloads to each rank."""
        # MPI guarantees tags up to 32767 only (MPI 4.1, section 9.1.2), so they are used in turn.
        self._num_tags = largest_tag() + 1
        self.rank, self.size = comm.rank, comm.size
        self.lost: set[int] = set()
        self.on_loss: Callable[[list[int]], object] | None = None
        """Called with the ranks that are lost, when that is noticed."""
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
        """Begin to send; `buffers` in C order must not be written to before it is done."""
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
        # Checked before MPI is called, which would raise for each further message to a dead rank.
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
        # A receiver may ask for one lane only, and so read the headers of a rank in a different
        # order than they were sent in. Without a tag, each would get the payloads of the other.
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
        """Return the message of a header, or ``None`` while its buffers are coming."""
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
            return self._arrived(asked, lane_asked)  # one that was sent before goes first
        requests: list[MPI.Request] = []
        buffers = [self._pool.take((size,), _BYTE) for size in sizes]
        message.buffers += buffers
        # Noted before the first receive: where the sender is lost, its memory must stay.
        self._arriving.append(_Arriving(_complete(message, length), requests))
        for buffer in buffers:
            requests += [self._payloads.Irecv(part, source, tag) for part in in_parts(buffer)]
        _hurry(lambda: MPI.Request.Testall(requests))
        return self._arrived(asked, lane_asked)

    def _arrived(self, source: int, lane: int) -> Message | None:
        """Return the first complete message of those that are asked for."""
        # Keeps the order: a complete message must not overtake one of the same sender and lane
        # whose buffers are still coming.
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
        """Note which ranks have died, or raise an error that has another reason."""
        if not is_loss(error):
            raise error
        failed = self._headers.Get_failed()
        own = self._headers.Get_group()
        ranks = set(failed.Translate_ranks(None, own)) - self.lost
        self._headers.Ack_failed(failed.size)  # from here on others can be probed again
        failed.Free()
        own.Free()
        if not ranks:
            return
        self.lost |= ranks
        # MPI may read and write their memory for ever.
        self._abandoned += [each for each in self._sending if each.destination in ranks]
        self._sending = [each for each in self._sending if each.destination not in ranks]
        self._abandoned += [each for each in self._arriving if each.message.source in ranks]
        self._arriving = [each for each in self._arriving if each.message.source not in ranks]
        if self.on_loss is not None:
            self.on_loss(sorted(ranks))

    def is_idle(self) -> bool:
        """Return whether everything that was sent has left."""
        return not self._sending

    def flush(self, limit_s: float | None = None) -> None:
        """Wait until everything that was sent has left, at most for `limit_s`."""
        back_off, began = BackOff(), time.monotonic()
        while self._sending and (limit_s is None or time.monotonic() - began < limit_s):
            try:
                self._sending = [each for each in self._sending if not each.is_done()]
            except MPI.Exception as error:
                self._note(error)
            back_off.rest()

    def free(self) -> None:
        """Free the communicators. **Collective**, which needs every rank."""
        self._headers.Free()
        self._payloads.Free()


_NOTHING = np.empty(0, np.uint8)

_HURRY_NS = 2_000_000


def _hurry(is_done: Callable[[], bool]) -> None:
    """Give a transfer that has just begun the core for a moment: MPI moves it while it is asked."""
    until = time.monotonic_ns() + _HURRY_NS
    while not is_done() and time.monotonic_ns() < until:
        os.sched_yield()


def _complete(message: Message, length: int) -> Message:
    """Return the message with its body, where that has come as the last buffer."""
    if length < 0:
        message.body = message.buffers.pop()
        message.body = message.body.data
    return message
