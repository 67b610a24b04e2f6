"""The side channel: a thread that answers for its rank while the rank waits or computes.

MPI itself cannot say why a rank does not come. So each rank listens on a TCP socket, which the
system serves even where the rank is busy or stopped. The ranks of a channel also stand in a
ring: each holds a connection to the next one, and sees it break when that process dies.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from mpistrat.epochs import logs
from mpistrat.epochs.channel import Channel
from mpistrat.epochs.flight_triggers import on_end_of_job
from mpistrat.epochs.whereabouts import State, whereabouts

__all__ = ["Address", "Beacon", "read_line"]

_MAX_BYTES = 2**20
_BACKLOG = 512
_PATIENCE_S = 1.0
"""How long a question may take to arrive, once its connection is there."""
_MAX_CALLERS = 512
"""Connections without a question yet: strangers must not use up the files of the process."""
_PAUSE_S = 0.05


@dataclass(frozen=True)
class Address:
    """Where the beacon of a rank can be asked."""

    host: str
    port: int
    pid: int

    def connect(self, limit_s: float) -> socket.socket:
        """Return a connection. Local."""
        here = self.host == socket.gethostname()
        host = "127.0.0.1" if here else self.host
        connection = socket.create_connection((host, self.port), limit_s)
        connection.settimeout(limit_s)
        return connection


@dataclass
class _Caller:
    """A connection whose question has not come in full."""

    connection: socket.socket
    due_s: float
    received: bytearray = field(default_factory=bytearray)


class Beacon:
    """The beacon of this process, for all its channels.

    Attributes
    ----------
    has_left : bool
        Whether the main program is over.
    """

    def __init__(self) -> None:
        self._server = socket.create_server(("", 0), backlog=_BACKLOG)
        self._server.setblocking(False)
        self.address = Address(socket.gethostname(), self._server.getsockname()[1], os.getpid())
        self.has_left = False
        self._channels: dict[str, Channel] = {}
        self._watchers: list[socket.socket] = []
        self._callers: list[_Caller] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._serve, name="mpistrat-beacon", daemon=True).start()

    def add(self, key: str, channel: Channel) -> None:
        """Answer questions about `channel` that come with its secret `key`. Local."""
        self._channels[key] = channel

    def watch(self, connection: socket.socket, on_break: Callable[[], None]) -> None:
        """Have `on_break` called, on the beacon's thread, if the peer's process dies. Local."""

        def read() -> None:
            try:
                said = connection.recv(16)
            except OSError:
                said = b""
            self._selector.unregister(connection)
            connection.close()
            if not said:
                on_break()

        self._selector.register(connection, selectors.EVENT_READ, read)

    def say_goodbye(self) -> None:
        """Tell whoever watches this process that it ends in order. Local."""
        for watcher in self._watchers:
            with contextlib.suppress(OSError):
                watcher.send(b"bye\n")

    def _forget(self) -> None:
        """Close what a fork of this process has no part in."""
        callers = (each.connection for each in self._callers)
        for each in (self._server, *self._watchers, *callers):
            each.close()

    def _serve(self) -> None:
        while True:
            # Whatever comes in, this thread has to be there for the next question.
            with contextlib.suppress(Exception):
                for key, _ in self._selector.select(_PATIENCE_S if self._callers else None):
                    key.data()
                self._drop_late()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            time.sleep(_PAUSE_S)  # no files left: the connection stays in the queue
            return
        connection.setblocking(False)
        caller = _Caller(connection, time.monotonic() + _PATIENCE_S)
        self._callers.append(caller)
        read = functools.partial(self._read, caller)
        self._selector.register(connection, selectors.EVENT_READ, read)

    def _read(self, caller: _Caller) -> None:
        """Take what has come of a question, and answer it once it is whole."""
        try:
            part = caller.connection.recv(65536)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        caller.received += part
        if part and not part.endswith(b"\n") and len(caller.received) < _MAX_BYTES:
            return
        self._release(caller)
        self._answer(caller.connection, bytes(caller.received))

    def _release(self, caller: _Caller) -> None:
        self._callers.remove(caller)
        self._selector.unregister(caller.connection)

    def _drop_late(self) -> None:
        """Close connections that no question has come over."""
        now = time.monotonic()
        while self._callers and (self._callers[0].due_s < now or len(self._callers) > _MAX_CALLERS):
            caller = self._callers[0]
            self._release(caller)
            caller.connection.close()

    def _answer(self, connection: socket.socket, question: bytes) -> None:
        try:
            connection.settimeout(_PATIENCE_S)
            answer = self._reply(connection, json.loads(question))
            if answer is not None:
                connection.sendall(json.dumps(answer).encode() + b"\n")
                connection.close()
        except Exception:
            connection.close()  # nobody of this job

    def _reply(self, connection: socket.socket, question: dict[str, Any]) -> Any:
        """Return the answer to a question, ``None`` where the connection is to be kept."""
        asked = str(question["key"])
        found = [c for key, c in list(self._channels.items()) if hmac.compare_digest(key, asked)]
        if not found:
            raise KeyError("unknown key")
        (channel,) = found
        if question["ask"] == "watch":
            self._watchers.append(connection)
            return None
        if question["ask"] == "lost":
            if channel.companions is not None:
                channel.companions.note_loss(int(question["lost"]), str(question["what"]))
            return {"state": State.HERE, "sequence": -1}
        if question["ask"] == "told":
            on_end_of_job(channel, int(question["teller"]))
            channel.is_told = True
            return {"state": State.HERE, "sequence": -1}
        if question["ask"] == "log":
            # Who has given up waiting for the answer has printed the lines already.
            can_take = not _is_closed_by_peer(connection)
            taken = can_take and logs.receive(channel, int(question["teller"]), question["lines"])
            return {"state": State.HERE if taken else State.FINISHED, "sequence": -1}
        return whereabouts(channel, list(self._channels.values()), self.has_left)


def _is_closed_by_peer(connection: socket.socket) -> bool:
    connection.setblocking(False)
    try:
        return not connection.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return False
    finally:
        connection.settimeout(_PATIENCE_S)


def read_line(connection: socket.socket) -> bytes:
    """Return what comes up to a newline or the end, within the connection's limit. Local."""
    received = b""
    while not received.endswith(b"\n") and len(received) < _MAX_BYTES:
        part = connection.recv(65536)
        if not part:
            break
        received += part
    return received
