"""Memory that the ranks of one node share, and the compiled code that works in it.

The memory is a file without a name (memfd_create(2)) that one rank makes and the others open by
its process: it ends with the last process, however the job ends, and needs no room in /dev/shm.
What the lanes in it are is told in ``node.c``.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import mmap
import os
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.compiled import find_library

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "HALF_BYTES",
    "ROUND_BYTES",
    "Lane",
    "Library",
    "NodeMemory",
    "node_library",
    "open_node_memory",
]

HALF_BYTES = 2**20
"""The largest block of a reduction. Pages that no reduction needs are never touched."""

_LINE_HEAD = 128
ROUND_BYTES = 2**14
"""What may travel with a round."""

_ROUND_HEAD = 64
_PAGE = 4096
_ROUND_LANE_BYTES = 2 * ROUND_BYTES + _PAGE
_TOKEN_BYTES = 16


@dataclass(frozen=True)
class Library:
    """The functions of ``node.c``."""

    start_round: Any
    round_done: Any
    meet: Any
    board: Any
    collect: Any
    reduce_board: Any
    reduce_unboard: Any
    reduce: Any
    reduce_slice: Any
    collect_slices: Any


@functools.lru_cache
def node_library() -> Library | None:
    """Return the compiled functions, ``None`` where there are none for this machine. Local."""
    folder = Path(__file__).parent
    digest = hashlib.sha256((folder / "node.c").read_bytes()).hexdigest()
    path = find_library(folder, "_node", digest)
    if path is None:
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int64
    # What returns at once keeps the interpreter lock; what may wait lets other threads run.
    quick, waiting = ctypes.PyDLL(path), ctypes.CDLL(path)
    start, done = quick.mpistrat_round_start, quick.mpistrat_round_done
    meet, reduce = quick.mpistrat_round_meet, waiting.mpistrat_reduce
    start.argtypes, start.restype = [pointer, pointer], None
    done.argtypes, done.restype = [pointer, pointer, integer], ctypes.c_int
    meet.argtypes, meet.restype = [pointer, pointer, pointer, integer], ctypes.c_int
    reduce.argtypes = [pointer, *[integer] * 5, pointer, integer, integer]
    reduce_board = waiting.mpistrat_reduce_board
    reduce_board.argtypes = [pointer, integer, integer, pointer, integer]
    unboard = quick.mpistrat_reduce_unboard
    unboard.argtypes = [pointer]
    reduce.restype = reduce_board.restype = unboard.restype = None
    board, collect = quick.mpistrat_round_board, quick.mpistrat_round_collect
    board.argtypes, board.restype = [pointer, pointer, integer], None
    collect.argtypes, collect.restype = [pointer, *[integer] * 3, pointer, integer], None
    part, gather = waiting.mpistrat_reduce_slice, waiting.mpistrat_collect_slices
    part.argtypes = [pointer, integer, integer, pointer, integer, pointer]
    gather.argtypes = [pointer, integer, pointer, integer]
    part.restype = gather.restype = None
    return Library(start, done, meet, board, collect, reduce_board, unboard, reduce, part, gather)


class Lane:
    """One sequence of steps of all ranks in shared memory, as ``node.c`` takes it.

    Attributes
    ----------
    pointer : int
        The address of the C structure, valid as long as this object.
    """

    def __init__(self, rank: int, half: int, lines: list[int], memory: np.ndarray) -> None:
        self._structure = np.array([len(lines), rank, 0, half, *lines], np.int64)
        self._memory = memory
        self.pointer: int = self._structure.ctypes.data


class NodeMemory:
    """Shared memory of the ranks of one node.

    Parameters
    ----------
    memory : numpy.ndarray
        All of it, uint8, zero, and mapped by every rank.
    rank, size : int
        Of this process among those that share it.
    library : Library

    Attributes
    ----------
    rounds, reductions, background : Lane
        For what goes on at the same time.
    """

    def __init__(self, memory: np.ndarray, rank: int, size: int, library: Library) -> None:
        self.rank = rank
        self.size = size
        self.library = library
        self._memory = memory
        self._base: int = memory.ctypes.data
        lines = [self._base + each * bytes_per_rank() for each in range(size)]
        halves = (_ROUND_HEAD + ROUND_BYTES, HALF_BYTES, HALF_BYTES)
        starts = _lane_starts()
        self.rounds, self.reductions, self.background = (
            Lane(rank, half, [line + start for line in lines], memory)
            for half, start in zip(halves, starts, strict=True)
        )


    def view(self, address: int, num_bytes: int) -> np.ndarray:
        """Return a part of the memory, which shall change with it. Local."""
        start = address - self._base
        return self._memory[start : start + num_bytes]


def _lane_starts() -> tuple[int, int, int]:
    """Return where each lane begins in the memory of a rank."""
    rounds = _ROUND_LANE_BYTES
    return 0, rounds, rounds + _PAGE + 2 * HALF_BYTES


def bytes_per_rank() -> int:
    """Return how much memory each rank has. Local."""
    return _ROUND_LANE_BYTES + 2 * (_PAGE + 2 * HALF_BYTES)


def open_node_memory(comm: MPI.Comm) -> NodeMemory | None:
    """Return memory that all ranks of `comm` share, ``None`` where that is not to be had.

    **Collective** over `comm`, whose ranks are on one node. It is None on all ranks, or on none.
    """
    library = node_library()
    made = None
    if comm.rank == 0 and library is not None:
        with contextlib.suppress(OSError, AttributeError):  # Linux has memfd_create
            made = _Made.new(bytes_per_rank() * comm.size)
    place: tuple[str, bytes] | None = comm.bcast(made and (made.path, made.token))
    memory = None
    if place is not None and library is not None:
        with contextlib.suppress(OSError, ValueError):
            path, token = place
            memory = _mapped(path, token, bytes_per_rank() * comm.size)
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
    handle = os.open(path, os.O_RDWR)
    try:
        if os.fstat(handle).st_size != num_bytes:
            return None
        memory = np.frombuffer(mmap.mmap(handle, num_bytes), np.uint8)
    finally:
        os.close(handle)
    is_the_same = memory[:_TOKEN_BYTES].tobytes() == token
    return memory if is_the_same else None
