"""Memory for results, recycled when the user has dropped them.

The first touch of fresh memory costs more than a reduction: the system clears each page. So an
array of this pool brings its memory back when nothing refers to it any more, and the next step
gets it again.
"""

from __future__ import annotations

import math
import threading
from collections import deque

import numpy as np

__all__ = ["Pool"]

_SMALLEST = 2**16
"""Smaller arrays come from NumPy, which keeps such memory itself."""

_ALIGNMENT = 64


class Pool:
    """Hands out arrays, to any thread.

    What it holds, in use or not, is never more than was in use at one time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[_Memory]] = {}
        """By size; no list is empty."""
        self._returned: deque[_Memory] = deque()
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
        with self._lock:
            self._take_back()
            used_bytes = self._used_bytes + num_bytes
            most_used_bytes = max(self._most_used_bytes, used_bytes)
            if num_bytes in self._free:
                memory = self._pop_free(num_bytes)
            else:
                self._make_room(most_used_bytes - num_bytes)
                memory = _Memory(num_bytes)
                self._num_bytes += num_bytes
            self._used_bytes, self._most_used_bytes = used_bytes, most_used_bytes
        return np.asarray(_Lease(memory, self._returned)).view(dtype).reshape(shape)

    def _take_back(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._used_bytes -= memory.size
            self._free.setdefault(memory.size, []).append(memory)

    def _pop_free(self, size: int) -> _Memory:
        fitting = self._free[size]
        memory = fitting.pop()
        if not fitting:
            del self._free[size]
        return memory

    def _make_room(self, num_bytes: int) -> None:
        """Give free memory back to the system until no more than `num_bytes` are held."""
        while self._free and self._num_bytes > num_bytes:
            self._num_bytes -= self._pop_free(max(self._free)).size


class _Memory:
    """Memory that is lent again and again."""

    def __init__(self, num_bytes: int) -> None:
        self.size = num_bytes
        self._array = np.empty(num_bytes + _ALIGNMENT, np.uint8)
        address = self._array.ctypes.data
        self.interface = {
            "version": 3,
            "typestr": "|u1",
            "shape": (num_bytes,),
            "data": (address + -address % _ALIGNMENT, False),
        }


class _Lease:
    """What all views of an array refer to in the end. NumPy keeps it alive as their base."""

    __slots__ = ("__array_interface__", "_memory", "_returned")

    def __init__(self, memory: _Memory, returned: deque[_Memory]) -> None:
        self._memory = memory
        self._returned = returned
        self.__array_interface__ = memory.interface

    def __del__(self) -> None:
        # Any thread may drop the last view, at any time: the pool takes it when it is asked next.
        self._returned.append(self._memory)
