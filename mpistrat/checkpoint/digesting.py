"""Digests that are computed in threads, one variable in each at a time."""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Callable

import numpy as np

from mpistrat.checkpoint.format import spell_digest
from mpistrat.comm.background import Background
from mpistrat.comm.parts import pieces
from mpistrat.cores import num_cores

__all__ = ["BYTES_WORTH_A_THREAD", "Digester", "Digests"]

BYTES_WORTH_A_THREAD = 2**18
"""The digests of smaller arrays are computed at once."""

_MOST_THREADS = 8
"""SHA-256 is slower than many disks, but so many threads are faster than most."""
_BYTES_AT_ONCE = 2**19
"""Small enough to stay in the cache of a core between the digest and the write."""
_MAX_BEHIND = 4
"""How many pieces that exist for this alone may wait for their turn."""

_OnPart = Callable[[np.ndarray], object]


class Digester:
    """The digest of one array, which comes in pieces.

    Parameters
    ----------
    thread : Background
        What computes it.
    stop : threading.Event
        Once it is set, no further part is touched.
    before, after : callable, optional
        Called in the thread with each part of the array, in order, before or after it goes into
        the digest: to read it, or to write it.
    """

    def __init__(
        self,
        thread: Background,
        stop: threading.Event,
        before: _OnPart | None,
        after: _OnPart | None,
    ) -> None:
        self._thread = thread
        self._stop = stop
        self._before = before
        self._after = after
        self._hash = hashlib.sha256()
        self._waits: deque[Callable[[], None]] = deque()

    def update(self, piece: np.ndarray, is_view: bool) -> None:
        """Take in the next `piece`, which must not change before `result`. Local.

        Where it `is_view` of memory that is there anyway, any number of pieces may wait. Raises
        what went wrong with an earlier piece.
        """
        self._waits.append(self._thread.submit(lambda: self._absorb(piece)))
        if not is_view and len(self._waits) > _MAX_BEHIND:
            self._waits.popleft()()

    def _absorb(self, piece: np.ndarray) -> None:
        for part in pieces(piece, _BYTES_AT_ONCE):
            if self._stop.is_set():
                return
            if self._before is not None:
                self._before(part)
            self._hash.update(part.view(np.uint8).data)
            if self._after is not None:
                self._after(part)

    def result(self) -> str:
        """Return the digest, once it is complete; raises what went wrong. Local."""
        while self._waits:
            self._waits.popleft()()
        return spell_digest(self._hash)


class Digests:
    """Context manager that makes digests, and waits at its end until no thread is at work.

    After an exception what is still to be done is left: nobody wants it, and whoever interrupts
    a second time would close files that threads write to.

    Parameters
    ----------
    cores : int, optional
        How many cores there are for them, by default all that this process may use.
    """

    def __init__(self, cores: int | None = None) -> None:
        num_threads = max(2, min(num_cores() if cores is None else cores, _MOST_THREADS))
        self._threads = [Background("mpistrat-digest") for _ in range(num_threads)]
        self._count = 0
        self._stop = threading.Event()

    def begin(self, before: _OnPart | None = None, after: _OnPart | None = None) -> Digester:
        """Return the digest of another array; see `Digester`. Local."""
        self._count += 1
        thread = self._threads[self._count % len(self._threads)]
        return Digester(thread, self._stop, before, after)

    def __enter__(self) -> Digests:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stop.set()
        for thread in self._threads:
            thread.drain()
            thread.close()
