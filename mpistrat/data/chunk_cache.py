"""Decoded chunks that are likely to be needed again."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import numpy as np

__all__ = ["ChunkCache"]


class ChunkCache:
    """The chunks used last, up to a number of bytes.

    Parameters
    ----------
    capacity_bytes : int
        A single chunk is kept even where it is larger.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self._capacity_bytes = capacity_bytes
        self._chunks: OrderedDict[Hashable, np.ndarray] = OrderedDict()
        self._num_bytes = 0

    def get(self, key: Hashable, load: Callable[[], np.ndarray]) -> np.ndarray:
        """Return the chunk `key`, from `load` where it is not here. Local."""
        if key in self._chunks:
            self._chunks.move_to_end(key)
            return self._chunks[key]
        chunk = self._chunks[key] = load()
        self._num_bytes += chunk.nbytes
        while self._num_bytes > self._capacity_bytes and len(self._chunks) > 1:
            self._num_bytes -= self._chunks.popitem(last=False)[1].nbytes
        return chunk

    def clear(self) -> None:
        """Forget all chunks. Local."""
        self._chunks.clear()
        self._num_bytes = 0
