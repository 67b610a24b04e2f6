"""Sender of a rank without the recorder, which then shows only its lines.

It has the functions of the recorder that the sampler calls.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from typing import Any


class BareSender:
    """Connection to the collector, from Python alone."""

    def __init__(self) -> None:
        self._connection: socket.socket | None = None
        self._last = b""
        self._pid = os.getpid()

    def recorder_start(self, host: bytes, port: bytes, key: bytes, rank: int, *_: int) -> int:
        """Connect and greet; return 0 if that has worked."""
        own = socket.gethostname()
        place = "127.0.0.1" if host.decode() == own else host.decode()
        try:
            self._connection = socket.create_connection((place, int(port or 0)), timeout=5)
        except OSError:
            return 1
        self._say({"key": key.decode(), "pid": self._pid, "rank": rank, "host": own})
        return 0

    def recorder_shares_address(self, does: int) -> None:
        """Do nothing: the address can be shared only by MPI_Init."""

    def recorder_version(self) -> int:
        """Return the number of calls that were seen."""
        return 0

    def recorder_note(self, lines: bytes, version: int, is_last: int) -> None:
        """Send lines that have changed."""
        if lines != self._last:
            self._last = lines
            state = {"rank": -1, "size": 0, "done": 0, "v": 0, "lv": 0, "calls": []}
            self._say({"state": {**state, "lines": json.loads(lines)}})

    def recorder_leave(self, word: bytes, code: int) -> None:
        """Say that this process ends."""
        self._say({"left": word.decode(), "code": code})

    def _say(self, message: dict[str, Any]) -> None:
        if self._connection is not None and os.getpid() == self._pid:
            with contextlib.suppress(OSError):
                self._connection.sendall(json.dumps(message).encode() + b"\n")
