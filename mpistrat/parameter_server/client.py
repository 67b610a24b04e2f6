"""Parameter client: requests to the ranks that hold variables, and their answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.errors import UnavailableError
from mpistrat.parameter_server.store import ParameterStore, Reply, Request

if TYPE_CHECKING:
    from mpistrat.comm.messages import BackOff, Messenger


class Lane:
    """The lanes of messages, which can be waited for alone."""

    REQUEST = 1
    """To the holder of variables."""
    REPLY = 2
    """From it."""
    CLOSURE = 3
    """From the chief to a worker."""
    RESULT = 4
    """From a worker to the chief."""
    CONTROL = 5
    """The end, from the chief to all, and their answers."""


DONE, FAILED = 0, 1
"""The kinds of a reply."""


@dataclass(frozen=True)
class Part:
    """Some rows of a variable, and where they are."""

    key: int
    rows: range
    holders: tuple[int, ...]
    """The ranks: one, which is read from; of a counter that all servers keep, all."""


@dataclass
class ParameterClient:
    """Asks for parts of variables: this rank's own store, or other ranks by messages."""

    messages: Messenger
    store: ParameterStore
    before: Callable[[str, bool], None]
    """Called with the name of the call, and whether it needs another rank: refuses, or prepares."""
    describe_loss: Callable[[int], UnavailableError]
    """Returns the error where a rank is lost."""
    while_waiting: Callable[[], object]
    """Called again and again while other ranks are waited for."""
    back_off: BackOff
    _number: int = 0

    def ask(self, what: str, holder: int, request: Request) -> list[np.ndarray]:
        """Return the buffers of the answer, in memory of their own."""
        return self.ask_each(what, [(holder, request)])[0]

    def ask_each(
        self, what: str, requests: Sequence[tuple[int, Request]]
    ) -> list[list[np.ndarray]]:
        """Return the answers to several requests, which are under way at the same time."""
        own = self.messages.rank
        self.before(what, any(holder != own for holder, _ in requests))
        pending: list[tuple[int, int] | Reply] = []
        for holder, request in requests:
            if holder == own:
                pending.append(_private(self.store, request))
                continue
            self._number += 1
            self.messages.send(
                holder, Lane.REQUEST, 0, self._number, request.body(), request.buffers
            )
            pending.append((holder, self._number))
        return [
            list(each.buffers) if isinstance(each, Reply) else self._wait(what, *each)
            for each in pending
        ]

    def _wait(self, what: str, holder: int, number: int) -> list[np.ndarray]:
        """Return the answer to a request."""
        back_off, messages = self.back_off, self.messages
        back_off.reset()
        while True:
            message = messages.poll(holder, Lane.REPLY)
            if message is None:
                # Only if nothing has arrived: the rank may have answered before it was lost.
                if holder in messages.lost:
                    raise self.describe_loss(holder)
                self.while_waiting()
                back_off.rest()
            # Any other number belongs to a request whose wait has ended with an error. It is
            # dropped.
            elif message.number == number:
                if message.kind == FAILED:
                    text = bytes(message.body).decode()
                    raise RuntimeError(f"{what} has failed on rank {holder}: {text}")
                return message.buffers

    def answer_next(self) -> bool:
        """Answer a request of another rank, if there is one, and return whether there was."""
        message = self.messages.poll(lane=Lane.REQUEST)
        if message is not None:
            self.answer(message.source, message.number, message.body, message.buffers)
        return message is not None

    def answer(
        self, source: int, number: int, body: memoryview, buffers: Sequence[np.ndarray]
    ) -> None:
        """Answer one request of another rank."""
        try:
            reply = self.store.answer(Request.parse(body, buffers))
        except Exception as error:  # the rank that asked gets it
            text = f"{type(error).__name__}: {error}".encode()
            self.messages.send(source, Lane.REPLY, FAILED, number, text)
            return
        sending = self.messages.send(source, Lane.REPLY, DONE, number, b"", reply.buffers)
        if reply.lent is not None:
            self.store.lend(reply.lent, sending)


def _private(store: ParameterStore, request: Request) -> Reply:
    """Return the answer of this rank's own store, which shares no memory with it."""
    # The store keeps the buffer of a write as the memory of the part, and a read returns that
    # memory. Between ranks a message separates the two; here copies do.
    copies = [np.array(each).reshape(-1).view(np.uint8) for each in request.buffers]
    reply = store.answer(
        Request(
            request.operation,
            request.key,
            request.dtype,
            copies,
            request.how,
            request.start,
            request.count,
            request.extra,
        )
    )
    return Reply([np.array(each).reshape(-1).view(np.uint8) for each in reply.buffers])
