"""Messages between two ranks of a process group: send and recv, over MPI's requests."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI

from mpistrat.agreement.channel import Channel
from mpistrat.errors import EpochTimeoutError
from mpistrat.mpi.world import largest_tag
from mpistrat.system.callsite import call_site
from mpistrat.torch.memory import Operand

__all__ = ["Messages"]

_POLLS = 200
_PAUSE_S = 0.0001


class MessageWork(dist.Work):
    """A message under way. It is not agreed upon: one rank sends, one receives.

    Parameters
    ----------
    kind : str
    operand : Operand
        Its memory, kept until the end.
    request : MPI.Request
    channel : Channel
        Of the group, whose time limit and losses end the wait.
    """

    def __init__(
        self,
        kind: str,
        operand: Operand,
        request: MPI.Request,
        channel: Channel,
    ) -> None:
        super().__init__()
        self._kind, self._operand, self._request = kind, operand, request
        self._channel = channel
        self._site = call_site()
        self._status = MPI.Status()
        self._is_done = False
        self._future: torch.futures.Future[Any] | None = None

    def is_completed(self) -> bool:
        """Return whether the message has arrived, or its memory may be used again."""
        if not self._is_done and self._test():
            self._is_done = True
            if self._kind == "torch.recv":
                self._operand.give_back()
            if self._future is not None:
                self._future.set_result([self._operand.memory])
        return self._is_done

    def _test(self) -> bool:
        try:
            return bool(self._request.Test(self._status))
        except MPI.Exception as error:
            if error.Get_error_class() != MPI.ERR_TRUNCATE:
                raise
            self._is_done = True
            raise self._wrong_length("more") from error

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Return when it is done; raise if the other rank is lost or the time is over."""
        given_s = 0.0 if timeout is None else timeout.total_seconds()
        limit_s = given_s if given_s > 0 else self._channel.timeout_s
        began, polls = time.monotonic(), 0
        while not self.is_completed():
            polls += 1
            if polls < _POLLS:
                continue
            waited_s = time.monotonic() - began
            if self._channel.departures.found:
                self._channel.check_complete(f"{self._kind} at {self._site}")
            self._channel.check_open()
            if limit_s is not None and waited_s > limit_s:
                raise EpochTimeoutError(
                    f"{self._kind} at {self._site} on rank {self._channel.rank} of "
                    f"{self._channel.size}: the other rank did not come within the timeout of "
                    f"{limit_s:g} s."
                )
            time.sleep(_PAUSE_S)
        if self._kind == "torch.recv":
            self._check_length()
        return True

    def _check_length(self) -> None:
        received = self._status.Get_count(MPI.BYTE)
        if received != self._operand.num_bytes:
            raise self._wrong_length(str(received))

    def _wrong_length(self, received: str) -> ValueError:
        return ValueError(
            f"{self._kind} at {self._site} on rank {self._channel.rank}: expected "
            f"{self._operand.num_bytes} bytes, but the other rank sent {received}. Sender and "
            "receiver must pass tensors of one dtype and shape."
        )

    def synchronize(self) -> None:
        """Do `wait`."""
        self.wait()

    def is_success(self) -> bool:
        """Return whether it is done."""
        return self.is_completed()

    def exception(self) -> None:
        """Return nothing: `wait` raises."""

    def result(self) -> list[torch.Tensor]:
        """Return the tensor, once it is done."""
        self.wait()
        return [self._operand.memory]

    def source_rank(self) -> int:
        """Return the rank that has sent the message."""
        return int(self._status.Get_source())

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future of the tensor, which `wait` or `is_completed` completes."""
        if self._future is None:
            self._future = torch.futures.Future()
            if self._is_done:
                self._future.set_result([self._operand.memory])
        return self._future


class Messages:
    """Send and receive, for a class that has the communicator for them."""

    _messages: MPI.Intracomm
    """A private one, so that messages meet nothing else."""
    _channel: Callable[[], Channel]

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int) -> MessageWork:
        """Begin to send the tensor."""
        operand = Operand(tensors[0], "torch.send")
        _check_tag("torch.send", tag)
        request = self._messages.Isend([operand.buffer, MPI.BYTE], destination, tag)
        return MessageWork("torch.send", operand, request, self._channel())

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int) -> MessageWork:
        """Begin to receive the tensor."""
        operand = Operand(tensors[0], "torch.recv")
        _check_tag("torch.recv", tag)
        request = self._messages.Irecv([operand.buffer, MPI.BYTE], source, tag)
        return MessageWork("torch.recv", operand, request, self._channel())

    def recv_anysource(self, tensors: list[torch.Tensor], tag: int) -> MessageWork:
        """Begin to receive the tensor from whichever rank sends one."""
        return self.recv(tensors, MPI.ANY_SOURCE, tag)


def _check_tag(kind: str, tag: int) -> None:
    largest = largest_tag()
    if not 0 <= tag <= largest:
        raise ValueError(f"{kind}: the tag must be 0 to {largest}, the largest of MPI, not {tag}.")
