"""Monitor: TCP server thread that answers for its rank while the rank waits or computes.

MPI cannot tell why a rank is missing. So each rank listens on a TCP socket, to which the system
accepts connections even if the rank is busy or stopped. The ranks of a channel also form a ring:
each has a connection to the next one, which breaks when that process dies.
"""

from __future__ import annotations

import contextlib
import functools
import hmac
import json
import os
import resource
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

_MAX_BYTES = 2**20
_BACKLOG = 512
_PATIENCE_S = 1.0
"""How long a question may take to arrive after the connection is open."""
_MAX_CALLERS = 64
"""Most connections without a question yet; fewer if the process may open only few files."""
_FILES_PER_CALLER = 16
"""Such connections take at most 1/16 of the files that the process may open."""
_STRANGER_BYTES = 2**12
"""Most bytes that are read of a question that does not begin with a known key."""
_PAUSE_S = 0.05
_BYE = b"bye\n"
"""Sent to a watcher if a watch ends normally."""


@dataclass(frozen=True)
class Address:
    """Address of the monitor of a rank."""

    host: str
    port: int
    pid: int

    def connect(self, limit_s: float) -> socket.socket:
        """Return a connection."""
        # The monitor of a job on one node listens on the loopback interface only.
        here = self.host == socket.gethostname()
        host = "127.0.0.1" if here else self.host
        connection = socket.create_connection((host, self.port), limit_s)
        connection.settimeout(limit_s)
        return connection

    def ask(self, question: Mapping[str, Any], limit_s: float) -> dict[str, Any] | None:
        """Return the answer to `question`, or ``None`` if the monitor closes the connection."""
        with self.connect(limit_s) as connection:
            connection.sendall(json.dumps(question).encode() + b"\n")
            answer = read_line(connection)
        found: dict[str, Any] | None = json.loads(answer) if answer else None
        return found

    def watch(self, key: str, limit_s: float) -> socket.socket:
        """Return a connection that breaks if the process dies, or else ends with a message."""
        connection = self.connect(limit_s)
        connection.sendall(json.dumps({"key": key, "ask": "watch"}).encode() + b"\n")
        return connection


def read_line(connection: socket.socket) -> bytes:
    """Return the bytes up to a newline or the end, within the connection's timeout."""
    received = b""
    while not received.endswith(b"\n") and len(received) < _MAX_BYTES:
        part = connection.recv(65536)
        if not part:
            break
        received += part
    return received


@dataclass(frozen=True)
class Question:
    """A request of a peer: a JSON object, and the connection over which it arrived."""

    details: dict[str, Any]
    connection: socket.socket

    def __getitem__(self, name: str) -> Any:
        return self.details[name]

    def is_awaited(self) -> bool:
        """Return whether the peer still waits for the answer."""
        # A waiting peer has sent nothing more, so there is nothing to read. A peer that has given
        # up has closed its end, and `recv` returns no bytes. MSG_PEEK leaves bytes in the buffer.
        self.connection.setblocking(False)
        try:
            return bool(self.connection.recv(1, socket.MSG_PEEK))
        except BlockingIOError:
            return True
        finally:
            self.connection.settimeout(_PATIENCE_S)


def _max_callers() -> int:
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most == resource.RLIM_INFINITY:
        return _MAX_CALLERS
    return max(1, min(_MAX_CALLERS, most // _FILES_PER_CALLER))


Handler = Callable[[Question], dict[str, Any]]
"""Returns the answer to a question, as JSON values. The monitor calls it on its thread."""


@dataclass
class _Caller:
    """A connection whose question is incomplete."""

    connection: socket.socket
    due_s: float
    received: bytearray = field(default_factory=bytearray)


class Monitor:
    """Monitor of this process, for all its channels. Each channel has a secret and handlers."""

    # It listens on `interface`, an address of this machine; by default on all of them.

    def __init__(self, interface: str = "") -> None:
        self._server = socket.create_server((interface, 0), backlog=_BACKLOG)
        self._server.setblocking(False)
        self.address = Address(socket.gethostname(), self._server.getsockname()[1], os.getpid())
        self._handlers: dict[str, Mapping[str, Handler]] = {}
        self._watchers: dict[str, list[socket.socket]] = {}
        self._lock = threading.Lock()
        """Held to add or remove a watcher or a key."""
        self._callers: list[_Caller] = []
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._server, selectors.EVENT_READ, self._accept)
        # A fork inherits the sockets. If it kept them open, the connections of this rank would not
        # break when this rank dies, and no other rank would notice.
        os.register_at_fork(after_in_child=self._forget)
        threading.Thread(target=self._serve, name="mpistrat-monitor", daemon=True).start()

    def add(self, key: str, handlers: Mapping[str, Handler]) -> None:
        """Answer questions with the secret `key`. Each handler has the name of its question."""
        self._handlers[key] = handlers

    def remove(self, key: str) -> None:
        """Answer no more questions with `key`, and end its watches."""
        # Do both under the lock: a watcher that is added in between would never be ended.
        with self._lock:
            self._handlers.pop(key, None)
            watchers = self._watchers.pop(key, [])
        for watcher in watchers:
            with contextlib.suppress(OSError):
                watcher.send(_BYE)
            watcher.close()

    def watch(self, connection: socket.socket, on_break: Callable[[], None]) -> threading.Event:
        """Call `on_break`, on the monitor's thread, if the peer's process dies."""
        # The event is set once the connection is closed.
        is_over = threading.Event()

        def read() -> None:
            try:
                received = connection.recv(16)
            except OSError:
                received = b""
            self._selector.unregister(connection)
            connection.close()
            is_over.set()
            if not received:  # the process ended without `announce_exit`
                on_break()

        # This is allowed while the monitor's thread waits, because epoll accepts a new descriptor
        # at any time (epoll_wait(2)).
        self._selector.register(connection, selectors.EVENT_READ, read)
        return is_over

    def announce_exit(self) -> None:
        """Report to the watchers of this process that it ends normally."""
        for watcher in self._all_watchers():
            with contextlib.suppress(OSError):
                watcher.send(_BYE)

    def _all_watchers(self) -> list[socket.socket]:
        return [watcher for each in list(self._watchers.values()) for watcher in each]

    def _forget(self) -> None:
        """Close all connections in a fork of this process."""
        callers = (each.connection for each in self._callers)
        for each in (self._server, *self._all_watchers(), *callers):
            each.close()

    def _serve(self) -> None:
        while True:
            # After any error, this thread must still serve the next question.
            with contextlib.suppress(Exception):
                self._serve_once()

    def _serve_once(self) -> None:
        for key, _ in self._selector.select(_PATIENCE_S if self._callers else None):
            key.data()
        self._drop_overdue()

    def _accept(self) -> None:
        try:
            connection, _ = self._server.accept()
        except OSError:
            time.sleep(_PAUSE_S)  # no file is left, so the connection stays in the queue
            return
        connection.setblocking(False)
        caller = _Caller(connection, time.monotonic() + _PATIENCE_S)
        self._callers.append(caller)
        read = functools.partial(self._read, caller)
        self._selector.register(connection, selectors.EVENT_READ, read)

    def _read(self, caller: _Caller) -> None:
        """Receive a part of a question, and answer it once it is complete."""
        try:
            part = caller.connection.recv(_STRANGER_BYTES)
        except BlockingIOError:
            return
        except OSError:
            part = b""
        caller.received += part
        may_be_longer = len(caller.received) < _STRANGER_BYTES or self._begins_with_key(caller)
        if part and not part.endswith(b"\n") and may_be_longer:
            return
        self._release(caller)
        self._answer(caller.connection, bytes(caller.received))

    def _begins_with_key(self, caller: _Caller) -> bool:
        """Return whether an incomplete question comes from this job and is not too long."""
        if len(caller.received) >= _MAX_BYTES:
            return False
        starts = [json.dumps({"key": key})[:-1].encode() for key in list(self._handlers)]
        return any(hmac.compare_digest(caller.received[: len(each)], each) for each in starts)

    def _release(self, caller: _Caller) -> None:
        self._callers.remove(caller)
        self._selector.unregister(caller.connection)

    def _drop_overdue(self) -> None:
        """Close connections whose question is overdue."""
        now = time.monotonic()
        # The callers are in the order in which they have connected, so the first is due first.
        while self._callers and (
            self._callers[0].due_s < now or len(self._callers) > _max_callers()
        ):
            caller = self._callers[0]
            self._release(caller)
            caller.connection.close()

    def _answer(self, connection: socket.socket, question: bytes) -> None:
        try:
            connection.settimeout(_PATIENCE_S)
            # The time limit above is for a peer that does not read its answer, which must not hold
            # up all others.
            answer = self._reply(connection, json.loads(question))
            if answer is not None:
                connection.sendall(json.dumps(answer).encode() + b"\n")
                connection.close()
        except Exception:
            connection.close()  # not from a rank of this job

    def _reply(self, connection: socket.socket, question: dict[str, Any]) -> Any:
        """Return the answer to a question, or ``None`` to keep the connection open."""
        asked = str(question["key"])
        # Compare in constant time, because the port is open to every user of the network.
        found = [each for each in list(self._handlers) if hmac.compare_digest(each, asked)]
        if not found:
            raise KeyError("unknown key")
        (key,) = found
        handlers = self._handlers[key]
        if question["ask"] == "watch":
            with self._lock:
                # A different thread may have called `remove` since the key was found.
                if key not in self._handlers:
                    raise KeyError("removed just now")
                self._watchers.setdefault(key, []).append(connection)
            return None
        return handlers[question["ask"]](Question(question, connection))
