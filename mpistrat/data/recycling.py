"""Memory of readers that have ended, kept for those that come.

The first touch of new memory costs more than what is done with it afterwards, and each pass has a
reader of its own.
"""

from __future__ import annotations

import threading

import numpy as np

__all__ = ["recycled", "recycled_empty"]

_MAX_IDLE_BYTES = 2**27
_MAX_EXCESS = 4
"""Memory up to so many times larger than asked for will do."""

_lock = threading.Lock()
_idle: list[np.ndarray] = []


def recycled_empty(num_bytes: int) -> np.ndarray:
    """Return `num_bytes` of memory with anything in it, as uint8. Local."""
    with _lock:
        for number, block in enumerate(_idle):
            if num_bytes <= block.nbytes <= _MAX_EXCESS * num_bytes:
                return _idle.pop(number)[:num_bytes]
    return np.empty(num_bytes, np.uint8)


def recycled(block: np.ndarray) -> None:
    """Take back what `recycled_empty` has given; nobody may use it any more. Local."""
    whole = block if block.base is None else block.base
    with _lock:
        _idle.append(whole)
        while sum(each.nbytes for each in _idle) > _MAX_IDLE_BYTES:
            _idle.pop(0)
