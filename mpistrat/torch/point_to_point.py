"""Messages between two ranks of a process group: send and recv, over MPI's requests."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from datetime import timedelta

import torch
from mpi4py import MPI

from mpistrat.agreement.channel import Channel
from mpistrat.errors import CollectiveTimeoutError
from mpistrat.mpi.world import largest_tag
from mpistrat.system.callsite import format_place, users_place
from mpistrat.system.exit_hooks import Phase, at
from mpistrat.torch.tensors import Operand, check_is_of_ranks, check_writable
from mpistrat.torch.works import Work

_POLLS = 50
"""How many times a wait tests its message before it yields the core to other threads and ranks."""
_BRISK_S = 0.01
"""How long a wait only yields the core: most waits are shorter than the shortest sleep."""
_PAUSE_S = 0.0002

_TICK_S = 0.001
_IDLE_TICKS = 50
"""Ticks for which the thread stays awake without messages: waking it costs a thread switch."""
_TESTS = 32
"""How many messages the thread tests per tick. One test makes MPI look at all of them."""
_PATIENCE_S = 1.0
"""How long the end of the program waits for the thread."""

_LARGEST_COUNT = 2**31 - 1
_BLOCK_BYTES = 2**20

_largest_tag = functools.cache(largest_tag)


class MessageWork(Work):
    """A pending message. The ranks do not agree on it: one rank sends, one receives."""

    # `peer` is the other rank, for errors. The memory of `operand` is kept until the end. The time
    # limit of the `channel` of the group, and the ranks that it has lost, end the wait.

    def __init__(
        self, kind: str, peer: str, operand: Operand, request: MPI.Request, channel: Channel
    ) -> None:
        super().__init__(kind, [operand.memory], users_place(sys._getframe(2)))
        self._peer = peer
        self._operand, self._request, self._channel = operand, request, channel
        self._status = MPI.Status()
        self._lock = threading.Lock()
        """Held while the request is tested: several threads may wait for one message."""
        if not self.is_completed():
            _progress.add(self)

    @property
    def is_lost(self) -> bool:
        """Whether its group has ended, so that the message may never complete."""
        return self._channel.closed is not None

    def is_completed(self) -> bool:
        """Return whether the message has arrived, or its memory may be reused."""
        with self._lock:
            is_news = not self.is_done and self._test()
        if is_news:
            self.complete_future()
        return self.is_done

    def _test(self) -> bool:
        """Test once whether the message is complete, and complete the work."""
        is_receive = self.kind == "torch.recv"
        try:
            if not self._request.Test(self._status):
                return False
            received = self._status.Get_elements(MPI.BYTE)
            if is_receive and received != self._operand.num_bytes:
                self.error = self._wrong_length(str(received))
        except MPI.Exception as error:
            # The message is longer than the tensor. The request is over, as after a success.
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            self.error = self._wrong_length("more")
        if is_receive and self.error is None:
            try:
                self._operand.give_back()
            except RuntimeError as error:  # the tensor was resized or freed meanwhile
                self.error = error
        self.is_done = True
        return True

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is complete; raise if the other rank is lost or the time is over."""
        given_s = 0.0 if timeout is None else timeout.total_seconds()
        limit_s = given_s if given_s > 0 else self._channel.timeout_s
        began, polls = time.monotonic(), 0
        while not self.is_completed():
            polls += 1
            if polls < _POLLS:
                continue
            waited_s = time.monotonic() - began
            # Checked first, because this error names the lost rank, while the time limit only knows
            # how long it has waited.
            if self._channel.departures.found:
                self._channel.check_complete(f"{self.kind} at {format_place(self.place)}")
            self._channel.check_open()
            if limit_s is not None and waited_s > limit_s:
                raise CollectiveTimeoutError(
                    f"{self._subject()} was not done within the timeout of {limit_s:g} s. The "
                    "other rank must make the matching call, with the same tag and group."
                )
            if waited_s < _BRISK_S:
                os.sched_yield()
            else:
                time.sleep(_PAUSE_S)
        if self.error is not None:
            raise self.error
        return True

    def _subject(self) -> str:
        channel, site = self._channel, format_place(self.place)
        return f"{self.kind} {self._peer} at {site} on rank {channel.rank} of {channel.size}"

    def _wrong_length(self, received: str) -> ValueError:
        return ValueError(
            f"{self._subject()}: expected {self._operand.num_bytes} bytes, but {received} came. "
            "Sender and receiver must pass tensors of one dtype and shape."
        )

    def source_rank(self) -> int:
        """Return the rank that has sent the message."""
        return int(self._status.Get_source())

    _source_rank = source_rank


class _Progress:
    """The progress thread of this process, and the messages that it tests."""

    # MPI moves data only inside its calls. A rank that waits in an agreement polls shared memory,
    # and a rank that computes does not call MPI. So while messages are pending, this thread tests
    # them from time to time. It also keeps the memory of messages whose work the program has
    # dropped.

    def __init__(self) -> None:
        self._messages: deque[MessageWork] = deque()
        self._lost: list[MessageWork] = []
        """Messages that are no longer tested; but MPI may still write to their memory."""
        self._awake = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_ending = False

    def add(self, message: MessageWork) -> None:
        """Test `message` until it is complete."""
        # Before the test of the event. `_run` clears the event before it looks at the messages, so
        # one of the two always notices the other, and no message waits for a thread that sleeps.
        self._messages.append(message)
        if not self._awake.is_set():
            self._awake.set()
        if self._thread is None:
            self._start()

    def _start(self) -> None:
        with self._lock:
            if self._thread is not None or self._is_ending:
                return
            self._thread = threading.Thread(target=self._run, name="mpistrat-messages", daemon=True)
            self._thread.start()
        # Not at import: a program that sends no message has no such exit functions.
        at(Phase.AFTER_LAST_ROUND, self._end)
        at(Phase.BEFORE_ABORT, self._end)

    def _run(self) -> None:
        idle_ticks = 0
        while not self._is_ending:
            idle_ticks = 0 if self._messages else idle_ticks + 1
            if idle_ticks > _IDLE_TICKS:
                self._awake.clear()
                if not self._messages:  # else one was added before `clear`
                    self._awake.wait()
                idle_ticks = 0
            time.sleep(_TICK_S)
            self._test()

    def _test(self) -> None:
        for _ in range(min(len(self._messages), _TESTS)):
            message = self._messages.popleft()
            with contextlib.suppress(MPI.Exception):  # `wait` of that message raises it again
                if message.is_completed():
                    continue
            (self._lost if message.is_lost else self._messages).append(message)

    def _end(self) -> None:
        """End the thread: inside MPI or Python it would crash the interpreter at its end."""
        self._is_ending = True
        self._awake.set()
        if self._thread is not None:
            self._thread.join(_PATIENCE_S)


_progress = _Progress()


class Messages:
    """Send and receive, a base for a class that has the communicator for them."""

    _messages: MPI.Intracomm
    """A private communicator, so that no other messages arrive on it."""
    _channel: Callable[[], Channel]

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> MessageWork:
        """Begin to send the tensor."""
        channel = self._open_channel("torch.send")
        subject = f"torch.send on rank {channel.rank} of {channel.size}"
        operand = Operand(tensors[0], subject)
        _check_peer(subject, destination, channel.size)
        _check_tag(subject, tag)
        request = self._messages.Isend(_as_one(operand), destination, tag)
        return MessageWork("torch.send", f"to rank {destination}", operand, request, channel)

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> MessageWork:
        """Begin to receive the tensor."""
        channel = self._open_channel("torch.recv")
        subject = f"torch.recv on rank {channel.rank} of {channel.size}"
        _check_peer(subject, source, channel.size)
        return self._receive(subject, tensors, source, tag, f"from rank {source}")

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> MessageWork:
        """Begin to receive the tensor from any rank that sends one."""
        channel = self._open_channel("torch.recv")
        subject = f"torch.recv on rank {channel.rank} of {channel.size}"
        return self._receive(subject, tensors, MPI.ANY_SOURCE, tag, "from any rank")

    def _receive(
        self, subject: str, tensors: list[torch.Tensor], source: int, tag: int, peer: str
    ) -> MessageWork:
        operand = Operand(tensors[0], subject)
        check_writable(subject, tensors[0])
        _check_tag(subject, tag)
        request = self._messages.Irecv(_as_one(operand), source, tag)
        return MessageWork("torch.recv", peer, operand, request, self._channel())

    def _free_messages(self) -> None:
        """Free the communicator, once no rank sends any more. **Collective**."""
        # MPI may give a later group the same context, and a message that was never received would
        # arrive there.
        status = MPI.Status()
        while (message := self._messages.Improbe(status=status)) is not None:
            message.Recv([bytearray(status.Get_elements(MPI.BYTE)), MPI.BYTE])
        self._messages.Free()

    def _open_channel(self, kind: str) -> Channel:
        """Return the channel of the group, or raise the error that has closed it."""
        check_is_of_ranks(kind)
        channel = self._channel()
        channel.check_open()
        return channel


def _as_one(operand: Operand) -> list[object]:
    """Return the bytes in the form in which mpi4py takes them as one message."""
    if operand.num_bytes <= _LARGEST_COUNT:
        return [operand.buffer, MPI.BYTE]
    return [operand.buffer, 1, _type_of(operand.num_bytes)]


@functools.cache
def _type_of(num_bytes: int) -> MPI.Datatype:
    """Return a type of this many bytes, because before MPI 4 counts are limited to 31 bits."""
    whole, rest = divmod(num_bytes, _BLOCK_BYTES)
    block = MPI.BYTE.Create_contiguous(_BLOCK_BYTES)
    lengths, places = [whole, rest], [0, whole * _BLOCK_BYTES]
    return MPI.Datatype.Create_struct(lengths, places, [block, MPI.BYTE]).Commit()


def _check_peer(subject: str, peer: int, size: int) -> None:
    if not 0 <= peer < size:
        raise ValueError(
            f"{subject}: the other rank must be from 0 to {size - 1} in this group, not {peer}."
        )


def _check_tag(subject: str, tag: int) -> None:
    largest = _largest_tag()
    if not 0 <= tag <= largest:
        raise ValueError(
            f"{subject}: the tag must be from 0 to {largest}, the largest of MPI, not {tag}."
        )
