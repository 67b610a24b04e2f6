"""Memory pool for results, recycled when the user has dropped them.

The first touch of fresh memory costs more than a reduction: the system clears each page. So an
array of this pool brings its memory back when nothing refers to it any more, and the next step
gets it again.
"""

from __future__ import annotations

import math
import threading
from collections import deque

import numpy as np

from mpistrat.arrays import array_at_function
from mpistrat.comm.shared_memory import Arena

_SMALLEST = 2**16
"""Smaller arrays come from NumPy, which keeps such memory itself."""

_LARGEST_SHARED = 2**24
"""Of larger results, few fit into an arena at a time."""

_ALIGNMENT = 64


class Pool:
    """Hands out arrays, to any thread, and holds no more than were in use at one time."""

    def __init__(self, arena: Arena | None = None, recycles: bool = True) -> None:
        # Without `recycles`, all memory comes from NumPy and goes back there.
        self._arena = arena
        self._smallest = _SMALLEST if recycles else math.inf
        self._array_at = array_at_function()
        self._lock = threading.Lock()
        self._free: dict[int, list[_Memory]] = {}
        """By size; no list is empty."""
        self._lent: set[_Memory] = set()
        # `append` and `pop` of a deque are atomic in CPython. A lock would deadlock: a destructor
        # may run in the middle of `_lend`, on the thread that holds it.
        self._returned: deque[_Memory] = deque()
        self._num_bytes = 0
        self._used_bytes = 0
        self._most_used_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array with arbitrary content; its memory returns when the last view is gone."""
        num_bytes = math.prod(shape) * dtype.itemsize
        # Arbitrary bytes are no valid references, so arrays of objects come from NumPy.
        if num_bytes < self._smallest or dtype.hasobject:
            return np.empty(shape, dtype)
        memory = self._last_returned(num_bytes) or self._lend(num_bytes)
        lease = _Lease(memory, self._returned)
        array: np.ndarray = self._array_at(memory.address, shape, dtype, lease)
        return array

    def _last_returned(self, num_bytes: int) -> _Memory | None:
        """Return the memory that was dropped last, if it fits: a loop drops what it takes next."""
        # Without the lock, which takes longer than all the rest. `pop` gives each memory to one
        # thread only.
        try:
            memory = self._returned.pop()
        except IndexError:
            return None
        if memory.size == num_bytes:
            return memory  # it is still in `_lent`
        # `_take_back` sorts it in later.
        self._returned.append(memory)
        return None

    def _lend(self, num_bytes: int) -> _Memory:
        with self._lock:
            self._take_back()
            used_bytes = self._used_bytes + num_bytes
            most_used_bytes = max(self._most_used_bytes, used_bytes)
            if num_bytes in self._free:
                memory = self._pop_free(num_bytes)
            else:
                # Before the new memory is taken, so that the pool never holds more than its peak.
                self._make_room(most_used_bytes - num_bytes)
                memory = self._new(num_bytes)
                self._num_bytes += num_bytes
            self._lent.add(memory)
            self._used_bytes, self._most_used_bytes = used_bytes, most_used_bytes
        return memory

    def lends_shared_memory(self) -> bool:
        """Return whether something that is lent out may lie in shared memory."""
        return self._arena is not None and bool(self._lent)

    def leave_shared_memory(self) -> None:
        """Make what is lent out the memory of this process alone, which is a fork."""
        # Without the lock: another thread may have held it at the fork, and there is none here.
        for memory in self._lent:
            memory.leave_arena()

    def shares(self, num_bytes: int) -> bool:
        """Return whether an array of this size comes from shared memory, while that lasts."""
        return self._arena is not None and _SMALLEST <= num_bytes <= _LARGEST_SHARED

    def _new(self, num_bytes: int) -> _Memory:
        if self._arena is not None and self.shares(num_bytes):
            address = self._arena.take(num_bytes)
            if address is not None:
                return _Memory(num_bytes, address, self._arena)
        return _Memory.private(num_bytes)

    def _take_back(self) -> None:
        while self._returned:
            memory = self._returned.popleft()
            self._lent.remove(memory)
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
            memory = self._pop_free(max(self._free))
            self._num_bytes -= memory.size
            memory.end()


class _Memory:
    """Memory that is lent repeatedly."""

    def __init__(self, size: int, address: int, arena: Arena | None = None) -> None:
        self.size = size
        self.address = address
        self._arena = arena
        self._array: np.ndarray | None = None

    @classmethod
    def private(cls, size: int) -> _Memory:
        """Return memory of this process alone."""
        array = np.empty(size + _ALIGNMENT, np.uint8)
        start: int = array.ctypes.data
        memory = cls(size, start + -start % _ALIGNMENT)
        memory._array = array
        return memory

    def leave_arena(self) -> None:
        """Become memory of this process alone."""
        if self._arena is not None:
            self._arena.leave(self.address, self.size)

    def end(self) -> None:
        """Give the memory back."""
        if self._arena is not None:
            self._arena.give_back(self.address, self.size)


class _Lease:
    """The base of all views of an array, which NumPy keeps alive as long as any of them."""

    __slots__ = ("_memory", "_returned")

    def __init__(self, memory: _Memory, returned: deque[_Memory]) -> None:
        # The lease, not the pool, keeps the memory alive: a result may outlive its strategy.
        self._memory = memory
        self._returned = returned

    def __del__(self) -> None:
        # Any thread may drop the last view, at any time: the pool takes it when it is asked next.
        self._returned.append(self._memory)
