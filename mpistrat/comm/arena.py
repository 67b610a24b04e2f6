"""Shared memory of one rank for the results of reductions.

The other ranks write their slices of a result to where it shall be, so nobody copies it. A result
is the program's own from then on: if the process forks, the fork gets a copy of it, as of all other
memory.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import mmap
from typing import Any

import numpy as np

__all__ = ["Arena"]

_PAGE = mmap.PAGESIZE
_MAP_FIXED = 0x10  # of <linux/mman.h>; the module mmap does not name it


class Arena:
    """Hands out whole pages of shared memory.

    Parameters
    ----------
    memory : numpy.ndarray
        The part of it that is for the results of this rank, in whole pages, as bytes.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self._base: int = memory.ctypes.data
        self._free = [(0, memory.size)]
        """Where free parts begin and end; sorted, and no two of them touch."""

    def take(self, num_bytes: int) -> int | None:
        """Return the address of as many bytes, ``None`` where none are left. Local."""
        length = _whole_pages(num_bytes)
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= length:
                self._free[i : i + 1] = [(start + length, stop)] if stop - start > length else []
                return self._base + start
        return None

    def give_back(self, address: int, num_bytes: int) -> None:
        """Take back what was handed out. Local."""
        start = address - self._base
        stop = start + _whole_pages(num_bytes)
        i = bisect.bisect(self._free, (start, stop))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, stop))

    def leave(self, address: int, num_bytes: int) -> None:
        """Make what was handed out the memory of this process alone, as it is. Local.

        For a process of one thread, such as a fork: others would see it empty for a moment.
        """
        content = ctypes.string_at(address, num_bytes)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        if _mmap()(address, _whole_pages(num_bytes), protection, flags, -1, 0) != address:
            raise OSError(ctypes.get_errno(), "mmap of memory for results failed")
        ctypes.memmove(address, content, num_bytes)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


@functools.lru_cache
def _mmap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    ]
    function.restype = ctypes.c_void_p
    return function
