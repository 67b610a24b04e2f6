"""Digests that are computed in threads beside the writing."""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable

import numpy as np

from mpistrat.checkpoint.format import spell_digest
from mpistrat.comm.background import Background

__all__ = ["Digester", "Digests"]

_NUM_THREADS = 2
"""SHA-256 is slower than most disks, and each variable has a digest of its own."""
_MAX_BEHIND = 4
"""How many pieces that exist for the digest alone may wait for it."""


class Digester:
    """The digest of one array, which comes in pieces.

    Parameters
    ----------
    thread : Background
        What computes it.
    """

    def __init__(self, thread: Background) -> None:
        self._thread = thread
        self._hash = hashlib.sha256()
        self._waits: deque[Callable[[], None]] = deque()

    def update(self, piece: np.ndarray, is_view: bool) -> None:
        """Take in the next `piece`, which must not change before `result`. Local.

        Where it `is_view` of memory that is there anyway, the digest may lag behind by any
        number of pieces.
        """
        data = piece.reshape(-1).view(np.uint8).data
        self._waits.append(self._thread.submit(lambda: self._hash.update(data)))
        if not is_view and len(self._waits) > _MAX_BEHIND:
            self._waits.popleft()()

    def result(self) -> str:
        """Return the digest, once it is complete. Local."""
        while self._waits:
            self._waits.popleft()()
        return spell_digest(self._hash)


class Digests:
    """Context manager that makes digests, which take turns in a few threads."""

    def __init__(self) -> None:
        self._threads = [Background("mpistrat-digest") for _ in range(_NUM_THREADS)]
        self._count = 0

    def begin(self) -> Digester:
        """Return the digest of another array. Local."""
        self._count += 1
        return Digester(self._threads[self._count % _NUM_THREADS])

    def __enter__(self) -> Digests:
        return self

    def __exit__(self, *_: object) -> None:
        for thread in self._threads:
            thread.close()
