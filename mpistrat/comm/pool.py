"""Memory for results, recycled when the user has dropped them.

The first touch of fresh memory costs more than a reduction: the system clears each page. So an
array of this pool brings its memory back when nothing refers to it any more, and the next step
gets it again.
"""

from __future__ import annotations

import math
from collections import deque

import numpy as np

__all__ = ["Pool"]

_SMALLEST = 2**16
"""Smaller arrays come from NumPy, which keeps such memory itself."""

_ALIGNMENT = 64


class Pool:
    """Hands out arrays.

    What it holds, in use or not, is never more than was in use at one time.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}
        self._returned: deque[np.ndarray] = deque()
        self._num_bytes = 0
        self._used_bytes = 0
        self._most_used_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array with anything in it, in C order. Local.

        Views of it, of any kind, keep the memory from being used again.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes < _SMALLEST:
            return np.empty(shape, dtype)
        self._take_back()
        self._used_bytes += num_bytes
        self._most_used_bytes = max(self._most_used_bytes, self._used_bytes)
        fitting = self._free.get(num_bytes)
        memory = fitting.pop() if fitting else self._new(num_bytes)
        lease = _Lease(memory, num_bytes, self._returned)
        return np.asarray(lease).view(dtype).reshape(shape)

    def _take_back(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._used_bytes -= memory.size
            self._free.setdefault(memory.size, []).append(memory)

    def _new(self, num_bytes: int) -> np.ndarray:
        """Return fresh memory, in place of free memory of other sizes where that is too much."""
        for size in sorted(self._free, reverse=True):
            while self._free[size] and self._num_bytes + num_bytes > self._most_used_bytes:
                self._free[size].pop()
                self._num_bytes -= size
        self._num_bytes += num_bytes
        fresh = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        start = -fresh.ctypes.data % _ALIGNMENT
        return fresh[start : start + num_bytes]


class _Lease:
    """What all views of an array refer to in the end. NumPy keeps it alive as their base."""

    def __init__(self, memory: np.ndarray, num_bytes: int, returned: deque[np.ndarray]) -> None:
        self._memory = memory
        self._returned = returned
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (num_bytes,),
            "data": (memory.ctypes.data, False),
        }

    def __del__(self) -> None:
        # Any thread may drop the last view, at any time: the pool takes it when it is asked next.
        self._returned.append(self._memory)
