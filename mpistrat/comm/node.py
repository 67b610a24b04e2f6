"""Memory that the ranks of one node share, and the compiled code that works in it.

The memory is a file without a name (memfd_create(2)) that one rank makes and the others open by
its process: it ends with the last process, however the job ends, and needs no room in /dev/shm.
What the lanes in it are is told in ``native/lanes.c``.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.comm.arena import Arena
from mpistrat.native import native_library

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["HALF_BYTES", "ROUND_BYTES", "Lane", "NodeMemory", "open_node_memory"]

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
