"""The side channel: a thread that answers for its rank while the rank waits or computes.

MPI itself cannot say why a rank does not come. So each rank listens on a TCP socket, which the
system serves even where the rank is busy or stopped. The ranks of a channel also stand in a
ring: each holds a connection to the next one, and sees it break when that process dies.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mpistrat.epochs import logs
from mpistrat.epochs.channel import Channel
from mpistrat.epochs.whereabouts import State, whereabouts

__all__ = ["Address", "Beacon", "read_line"]

_MAX_BYTES = 2**20
_BACKLOG = 512
_PATIENCE_S = 1.0
"""How long a question may take to arrive, once its connection is there."""


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


class Beacon:
    """The beacon of this process, for all its channels.

    Attributes
    ----------
    has_left : bool
        Whether the main program is over.
    """

    def __init__(self) -> None:
        self._server = socket.create_server(("", 0), backlog=_BACKLOG)
        self._server.settimeout(_PATIENCE_S)
        self.address = Address(socket.gethostname(), self._server.getsockname()[1], os.getpid())
        self.has_left = False
        self._channels: dict[str, Channel] = {}
        self._watchers: list[socket.socket] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, self._answer)
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
        for each in (self._server, *self._watchers):
            each.close()

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                key.data()

    def _answer(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            return
        try:
            connection.settimeout(_PATIENCE_S)
            answer = self._reply(connection, json.loads(read_line(connection)))
            if answer is not None:
                connection.sendall(json.dumps(answer).encode() + b"\n")
                connection.close()
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            connection.close()  # nobody of this job

    def _reply(self, connection: socket.socket, question: dict[str, Any]) -> Any:
        """Return the answer to a question, ``None`` where the connection is to be kept."""
        asked = str(question["key"])
        found = [c for key, c in self._channels.items() if hmac.compare_digest(key, asked)]
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
