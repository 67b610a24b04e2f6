"""Pool of memory for results.

Writing to fresh memory can cost more than a reduction, because the kernel clears every page first.
So the pool keeps the memory of larger results: once the last reference to such an array is gone,
the next result of that size reuses it.
"""

from __future__ import annotations

import math
import threading
from collections import deque

import numpy as np

from mpistrat.arrays import array_at_function
from mpistrat.comm.shared_memory import Arena

_SMALLEST = 2**16
"""Smaller arrays come from NumPy, which reuses such memory itself."""

_LARGEST_SHARED = 2**24
"""Largest result in shared memory: few larger ones fit into an arena at a time."""

_ALIGNMENT = 64


class Pool:
    """Returns arrays, to any thread, and holds no more memory than was in use at one time."""

    def __init__(self, arena: Arena | None = None, recycles: bool = True) -> None:
        # Without `recycles`, all memory comes from NumPy and is returned to NumPy.
        self._arena = arena
        self._smallest = _SMALLEST if recycles else math.inf
        self._array_at = array_at_function()
        self._lock = threading.Lock()
        self._free: dict[int, list[_Memory]] = {}
        """Free memory by size; no list is empty."""
        self._lent: set[_Memory] = set()
        # `append` and `pop` of a deque are atomic in CPython. A lock would deadlock: a destructor
        # may run in the middle of `_lend`, on the thread that holds the lock.
        self._returned: deque[_Memory] = deque()
        self._num_bytes = 0
        self._used_bytes = 0
        self._most_used_bytes = 0

    def take(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array with undefined content; its memory is reused after the last view."""
        num_bytes = math.prod(shape) * dtype.itemsize
        # Arbitrary bytes are not valid references, so arrays of objects come from NumPy.
        if num_bytes < self._smallest or dtype.hasobject:
            return np.empty(shape, dtype)
        memory = self._last_returned(num_bytes) or self._lend(num_bytes)
        lease = _Lease(memory, self._returned)
        array: np.ndarray = self._array_at(memory.address, shape, dtype, lease)
        return array

    def _last_returned(self, num_bytes: int) -> _Memory | None:
        """Return the memory that was dropped last, if it fits, as it usually does in a loop."""
        # Without the lock, which takes longer than the rest of the function. `pop` returns each
        # memory to only one thread.
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
                # Before the new memory is allocated, so that the pool never holds more than its
                # peak.
                self._make_room(most_used_bytes - num_bytes)
                memory = self._new(num_bytes)
                self._num_bytes += num_bytes
            self._lent.add(memory)
            self._used_bytes, self._most_used_bytes = used_bytes, most_used_bytes
        return memory

    def lends_shared_memory(self) -> bool:
        """Return whether any memory in use may be shared memory."""
        return self._arena is not None and bool(self._lent)

    def leave_shared_memory(self) -> None:
        """Make all memory in use private to this process, which is a fork."""
        # Without the lock: a thread of the parent may have held it at the fork, and does not exist
        # here.
        for memory in self._lent:
            memory.leave_arena()

    def shares(self, num_bytes: int) -> bool:
        """Return whether an array of this size comes from shared memory, if some is left."""
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
        """Return free memory to the system until no more than `num_bytes` are held."""
        while self._free and self._num_bytes > num_bytes:
            memory = self._pop_free(max(self._free))
            self._num_bytes -= memory.size
            memory.end()


class _Memory:
    """Memory that is used for one array after the other."""

    def __init__(self, size: int, address: int, arena: Arena | None = None) -> None:
        self.size = size
        self.address = address
        self._arena = arena
        self._array: np.ndarray | None = None

    @classmethod
    def private(cls, size: int) -> _Memory:
        """Return memory that is private to this process."""
        array = np.empty(size + _ALIGNMENT, np.uint8)
        start: int = array.ctypes.data
        memory = cls(size, start + -start % _ALIGNMENT)
        memory._array = array
        return memory

    def leave_arena(self) -> None:
        """Become private to this process."""
        if self._arena is not None:
            self._arena.leave(self.address, self.size)

    def end(self) -> None:
        """Return the memory to the arena, if it is from there."""
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
        # Any thread may drop the last view, at any time: the pool collects the memory in its next
        # call.
        self._returned.append(self._memory)
