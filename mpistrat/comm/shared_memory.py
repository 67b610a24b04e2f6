"""Shared memory of a node: its ranks, and their arena for results."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import functools
import mmap
import os
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.native import native_library

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["HALF_BYTES", "ROUND_BYTES", "Arena", "Lane", "NodeMemory", "open_node_memory"]

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


HALF_BYTES = 2**20
"""The largest block of a reduction. Pages that no reduction needs are never touched."""

ARENA_BYTES = 2**26
"""What each rank has for results. More of them come from elsewhere, and have to be copied out."""

ROUND_BYTES = 2**14
"""What may travel with a round."""

_ROUND_HEAD = 64
_PAGE = mmap.PAGESIZE
_ROUND_LANE_BYTES = 2 * ROUND_BYTES + _PAGE
_BACKGROUND_START = _ROUND_LANE_BYTES + _PAGE + 2 * HALF_BYTES
_ARENA_START = -(-(_BACKGROUND_START + _PAGE + 2 * HALF_BYTES) // _PAGE) * _PAGE
_BYTES_PER_RANK = _ARENA_START + ARENA_BYTES
_TOKEN_BYTES = 16


class Lane:
    """One sequence of steps of all ranks in shared memory, as ``native/lanes.c`` takes it.

    Parameters
    ----------
    rank : int
        Of this process.
    half : int
        Bytes of each half.
    lines : list of int
        Where the line of each rank begins.
    arena, arena_bytes : int
        Where memory for results begins behind the line of each rank, and its length.

    Attributes
    ----------
    pointer : int
        The address of the C structure, valid as long as this object.
    """

    def __init__(
        self, rank: int, half: int, lines: list[int], arena: int = 0, arena_bytes: int = 0
    ) -> None:
        head = [len(lines), rank, 0, half, arena, arena_bytes]
        self._structure = np.array([*head, *lines], np.int64)
        self.pointer: int = self._structure.ctypes.data


class NodeMemory:
    """Shared memory of the ranks of one node.

    Parameters
    ----------
    memory : numpy.ndarray
        All of it, uint8, zero, and mapped by every rank.
    rank, size : int
        Of this process among those that share it.
    library
        The compiled module.

    Attributes
    ----------
    rounds, reductions, background : Lane
        For what goes on at the same time.
    arena : Arena
        Memory for results of the reductions of this rank.
    """

    def __init__(self, memory: np.ndarray, rank: int, size: int, library: Any) -> None:
        self.rank = rank
        self.size = size
        self.library = library
        self._memory = memory
        self._base: int = memory.ctypes.data
        lines = [self._base + each * _BYTES_PER_RANK for each in range(size)]
        self.rounds = Lane(rank, _ROUND_HEAD + ROUND_BYTES, lines)
        self.reductions, self.background = (
            Lane(rank, HALF_BYTES, [line + start for line in lines], _ARENA_START - start, length)
            for start, length in ((_ROUND_LANE_BYTES, ARENA_BYTES), (_BACKGROUND_START, 0))
        )
        start = rank * _BYTES_PER_RANK + _ARENA_START
        self.arena = Arena(memory[start : start + ARENA_BYTES])

    def view(self, address: int, num_bytes: int) -> np.ndarray:
        """Return a part of the memory, which shall change with it. Local."""
        start = address - self._base
        return self._memory[start : start + num_bytes]


def open_node_memory(comm: MPI.Comm) -> NodeMemory | None:
    """Return memory that all ranks of `comm` share, ``None`` where that is not to be had.

    **Collective** over `comm`, whose ranks are on one node. It is None on all ranks, or on none.
    """
    library = native_library()
    made = None
    num_bytes = _BYTES_PER_RANK * comm.size
    if comm.rank == 0 and library is not None:
        with contextlib.suppress(OSError, AttributeError):  # Linux has memfd_create
            made = _Made.new(num_bytes)
    place: tuple[str, bytes] | None = comm.bcast(made and (made.path, made.token))
    memory = None
    if place is not None and library is not None:
        with contextlib.suppress(OSError, ValueError):
            memory = _mapped(*place, num_bytes)
    is_shared = all(comm.allgather(memory is not None))
    if made is not None:
        made.close()
    if not is_shared or memory is None or library is None:
        return None
    memory[:_TOKEN_BYTES] = 0
    comm.Barrier()
    return NodeMemory(memory, comm.rank, comm.size, library)


class _Made:
    """The file behind the memory, as long as others may still open it."""

    def __init__(self, handle: int, token: bytes) -> None:
        self._handle = handle
        self.path = f"/proc/{os.getpid()}/fd/{handle}"
        self.token = token

    @classmethod
    def new(cls, num_bytes: int) -> _Made:
        made = cls(os.memfd_create("mpistrat"), secrets.token_bytes(_TOKEN_BYTES))
        os.truncate(made._handle, num_bytes)
        os.pwrite(made._handle, made.token, 0)
        return made

    def close(self) -> None:
        os.close(self._handle)


def _mapped(path: str, token: bytes, num_bytes: int) -> np.ndarray | None:
    """Return the memory behind `path`, ``None`` if that is another file here."""
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(handle).st_size != num_bytes or os.pread(handle, len(token), 0) != token:
            return None
        return np.frombuffer(mmap.mmap(handle, num_bytes), np.uint8)
    finally:
        os.close(handle)
