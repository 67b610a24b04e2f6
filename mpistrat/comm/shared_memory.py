"""Shared memory of a node: anonymous files, sequences of steps, and an arena for results."""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import fcntl
import functools
import mmap
import os
import weakref
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.mpi.survival import revoked_on_loss
from mpistrat.native import native_library

if TYPE_CHECKING:
    from mpi4py import MPI

_MAP_FIXED = 0x10  # from <linux/mman.h>; the module mmap lacks it
_TOKEN_BYTES = 16


def share_memory_file(comm: MPI.Comm, num_bytes: int) -> np.ndarray | None:
    """Return zeros that all ranks of `comm`, on one node, map, if they can. **Collective**.

    Each page is stored near the core that first writes to it. The system frees the memory when the
    last process unmaps it, even a process that is killed.
    """
    file = _share(comm, num_bytes, is_sparse=False)
    return None if file is None else file.memory


def _share(comm: MPI.Comm, num_bytes: int, is_sparse: bool) -> NodeFile | None:
    """Return a file that all ranks of `comm` map, if they can. **Collective**."""
    made = MemoryFile.offer(num_bytes, is_sparse) if comm.rank == 0 else None
    place: Place | None = comm.bcast(made and made.place)
    file = None if place is None else map_file(place, num_bytes)
    is_shared = all_of(comm, file is not None)
    if made is not None:
        # Only now: /proc/PID/fd/N exists only as long as this rank has the file open, and by now
        # every other rank has opened it or has failed to.
        made.close()
    return file if is_shared else None  # on all ranks, or on none


def all_of(comm: MPI.Comm, is_true: bool) -> bool:
    """Return whether a condition is true on all ranks of `comm`. **Collective**."""
    from mpi4py import MPI

    found = np.array([is_true], np.uint8)
    comm.Allreduce(MPI.IN_PLACE, found, MPI.MIN)
    return bool(found[0])


class NodeFile:
    """Zeros that processes of a node share, with a lock; a page uses memory once written to."""

    def __init__(self, memory: np.ndarray, handle: int | None, token: bytes) -> None:
        self.memory = memory
        self.token = token
        """Bytes that identify the file."""
        self._handle = handle
        if handle is not None:
            # Only the lock needs the handle: a mapping stays valid when the handle is closed
            # (mmap(2)).
            weakref.finalize(self, os.close, handle)

    @classmethod
    def of_process(cls, num_bytes: int) -> NodeFile:
        """Return memory that is private to this process."""
        token, size = os.urandom(_TOKEN_BYTES), max(num_bytes, 1)
        with contextlib.suppress(OSError, AttributeError):
            made = MemoryFile.new(num_bytes)
            try:
                file = map_file(made.place, num_bytes)
            finally:
                made.close()
            if file is not None:
                return file
        return cls(np.frombuffer(mmap.mmap(-1, size), np.uint8), None, token)

    @classmethod
    def of_node(cls, comm: MPI.Comm, num_bytes: int, known: bytes | None) -> NodeFile | None:
        """Return memory of the ranks of each node of `comm`. **Collective**.

        ``None`` if they share the memory of the token `known` already, or cannot share any.
        """
        from mpi4py import MPI

        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        try:
            with revoked_on_loss(node):
                tokens = node.allgather(known)
            # Every rank of the node has the tokens of all, so either all return here, or none.
            if known is not None and tokens.count(known) == len(tokens):
                return None
            with revoked_on_loss(node):
                return _share(node, num_bytes, is_sparse=True)
        finally:
            node.Free()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out; the system unlocks it for a process that is killed."""
        if self._handle is None:
            yield
            return
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._handle, fcntl.LOCK_UN)


def _free_bytes() -> int:
    """Return how much memory is still available on the node, as Linux estimates it."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return sum(int(fields[name].split()[0]) for name in ("MemAvailable", "SwapFree")) * 1024


Place = tuple[str, bytes]
"""The path of a file, and the token behind its memory. Another rank may see a different /proc, for
example in a container: the token shows that it is the same file there."""


class MemoryFile:
    """The file behind the memory, open as long as other ranks may map it."""

    def __init__(self, handle: int, token: bytes) -> None:
        self._handle = handle
        self.place: Place = (f"/proc/{os.getpid()}/fd/{handle}", token)

    @classmethod
    def new(cls, num_bytes: int) -> MemoryFile:
        """Return a file of `num_bytes` zeros and a token."""
        made = cls(os.memfd_create("mpistrat"), os.urandom(_TOKEN_BYTES))
        # The token is stored behind the memory, where no rank writes. Pages of a hole read as
        # zeros.
        os.truncate(made._handle, num_bytes + _TOKEN_BYTES)
        os.pwrite(made._handle, made.place[1], num_bytes)
        return made

    @classmethod
    def offer(cls, num_bytes: int, is_sparse: bool = False) -> MemoryFile | None:
        """Return a new file, ``None`` if the node does not have enough memory."""
        with contextlib.suppress(OSError, AttributeError, KeyError):  # Linux has memfd_create
            # Otherwise the system would kill a rank that writes to memory that does not exist.
            if is_sparse or num_bytes <= _free_bytes():
                return cls.new(num_bytes)
        return None

    def close(self) -> None:
        """Close the file: ranks that have not mapped it yet no longer can."""
        os.close(self._handle)


def map_file(place: Place, num_bytes: int) -> NodeFile | None:
    """Return the memory of the file at `place`, ``None`` if there is none or a different one."""
    path, token = place
    try:
        # Opened again, so that each process has its own lock on it.
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        length = num_bytes + len(token)
        if os.fstat(handle).st_size == length and os.pread(handle, len(token), num_bytes) == token:
            memory = np.frombuffer(mmap.mmap(handle, length), np.uint8)[:num_bytes]
            return NodeFile(memory, handle, token)
    except (OSError, ValueError):
        pass
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None


class Arena:
    """Allocates whole pages of shared memory."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self._base: int = memory.ctypes.data
        self._free = [(0, memory.size)]
        """Start and stop of the free parts; sorted, and no two of them touch."""

    def take(self, num_bytes: int) -> int | None:
        """Return the address of `num_bytes` bytes, ``None`` if not enough are left."""
        length = _whole_pages(num_bytes)
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= length:
                self._free[i : i + 1] = [(start + length, stop)] if stop - start > length else []
                return self._base + start
        return None

    def give_back(self, address: int, num_bytes: int) -> None:
        """Free memory that `take` has returned."""
        start = address - self._base
        stop = start + _whole_pages(num_bytes)
        # Free neighbours are merged at once. `take` looks for one part that is long enough, and
        # would find none among many short ones that touch.
        i = bisect.bisect(self._free, (start, stop))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, stop))

    def leave(self, address: int, num_bytes: int) -> None:
        """Make memory that `take` has returned private to this process, with its content."""
        # Only in a process of one thread, such as a fork: other threads would see the memory empty
        # for a moment. The rank continues to write to the shared pages. MAP_FIXED puts private
        # pages at the same addresses (mmap(2)), so the program's arrays keep their pointers and
        # their content.
        content = ctypes.string_at(address, num_bytes)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        if _mmap()(address, _whole_pages(num_bytes), protection, flags, -1, 0) != address:
            raise OSError(ctypes.get_errno(), "mmap of memory for results failed")
        ctypes.memmove(address, content, num_bytes)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


# The class `mmap.mmap` cannot map to a chosen address.
@functools.lru_cache
def _mmap() -> Any:
    function = ctypes.CDLL(None, use_errno=True).mmap
    function.argtypes = [
        *(ctypes.c_void_p, ctypes.c_size_t),
        *(ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long),
    ]
    function.restype = ctypes.c_void_p
    return function


_HALF_BYTES = 2**20
"""Bytes of half a buffer of a reduction. Pages that no reduction needs are never touched."""

_ARENA_BYTES = 2**26
"""Bytes per rank for results. Results outside of the arena have to be copied out."""

_ROUND_BYTES = 2**14
_ROUND_HEAD = 64
_PAGE = mmap.PAGESIZE
# First the lines and halves of the rounds of all ranks. Every rank reads all of them, and the
# kernel keeps a page of its tables per 2 MiB from which a process reads. Stored far apart, they
# would cost each rank 4 KiB per other rank. Then for each rank the line and the halves of the
# reductions and of the background reductions, and the arena. The additional page of each holds the
# heads of the line and of its halves, and keeps the starts at whole pages.
_ROUND_SEQUENCE_BYTES = -(-2 * _ROUND_BYTES // _PAGE) * _PAGE + _PAGE
_BACKGROUND_START = _PAGE + 2 * _HALF_BYTES
_ARENA_START = 2 * _BACKGROUND_START
_BYTES_OF_DATA = _ARENA_START + _ARENA_BYTES
_BYTES_PER_RANK = _ROUND_SEQUENCE_BYTES + _BYTES_OF_DATA

# These must be changed together with the enum and `struct sequence` of native/sequences.c and .h.
_HAS_LEFT = 24
"""Bytes from the start of a rank's line to the flag that it no longer waits for others."""
_LINE_HEAD = 128
"""Bytes from the start of a rank's line to its halves."""
_STEP, _PATIENCE, _KEEPS_CORE, _NUM_PAST = 2, 6, 7, 9
"""Offsets in the C structure: the number of steps, how a wait uses the core, and how many copies
will go past the caches."""
_BUSY_NS, _SHARED_NS = 50_000, 10_000
"""How long a wait keeps its own core, and a shared core. Waking a thread takes 5 to 50 us."""


class WaitLeft(Exception):
    """A rank has left a wait in shared memory, because a different rank is dead."""


class StepSequence:
    """One sequence of steps of all ranks in shared memory, used by ``native/sequences.c``."""

    def __init__(
        self, rank: int, half: int, lines: list[int], arena: int = 0, arena_bytes: int = 0
    ) -> None:
        head = [len(lines), rank, 0, half, arena, arena_bytes, _BUSY_NS, True, 0, 0]
        self._structure = np.array([*head, *lines], np.int64)
        self._has_left = ctypes.c_int64.from_address(lines[rank] + _HAS_LEFT)
        self.pointer: int = self._structure.ctypes.data
        """The address of the C structure, valid as long as this object."""

    @property
    def step(self) -> int:
        """Number of steps at which this rank has arrived."""
        return int(self._structure[_STEP])

    def leave(self) -> None:
        """Let every rank leave the waits of this sequence, permanently, from any thread."""
        # Only this rank writes to its line, so this needs no lock. A sleeping rank looks at it
        # within a few milliseconds, without being woken.
        self._has_left.value = 1

    def check(self) -> None:
        """Raise if a wait has ended because ranks leave."""
        # A wait that ends because a different rank has left sets the flag in its own line too.
        if self._has_left.value:
            raise WaitLeft

    def copy_past_caches(self, num_copies: int) -> None:
        """Let the next `num_copies` go past the caches, as if copies had turned out slow."""
        self._structure[_NUM_PAST] = num_copies

    def wait_busily(self, is_busy: bool) -> None:
        """Set whether waits keep the core until they are long, or only while they are short."""
        self._structure[_PATIENCE] = _BUSY_NS if is_busy else _SHARED_NS
        self._structure[_KEEPS_CORE] = is_busy


class NodeMemory:
    """Shared memory of the ranks of one node."""

    BLOCK_BYTES = _HALF_BYTES
    """The largest block of a reduction."""
    ROUND_BYTES = _ROUND_BYTES
    """How many bytes can be sent with a round."""

    def __init__(
        self, memory: np.ndarray, rank: int, size: int, library: Any, shares_cores: bool = False
    ) -> None:
        self.rank = rank
        self.size = size
        self.library = library
        self._memory = memory
        self._base: int = memory.ctypes.data
        # One sequence per kind of work, because the kinds run at the same time.
        end_of_rounds = size * _ROUND_SEQUENCE_BYTES
        lines = range(self._base, self._base + end_of_rounds, _ROUND_SEQUENCE_BYTES)
        self.rounds = StepSequence(rank, _ROUND_HEAD + _ROUND_BYTES, list(lines))
        begin = self._base + end_of_rounds
        self.reductions, self.background = (
            StepSequence(
                rank,
                _HALF_BYTES,
                [begin + each * _BYTES_OF_DATA + start for each in range(size)],
                _ARENA_START - start,
                length,
            )
            for start, length in ((0, _ARENA_BYTES), (_BACKGROUND_START, 0))
        )
        first = _LINE_HEAD + _ROUND_HEAD
        # The two halves are used in turn: `half_of` in native/sequences.c selects half `step & 1`.
        self._brought = [
            [
                memory[start : start + _ROUND_BYTES].data
                for start in range(half, end_of_rounds, _ROUND_SEQUENCE_BYTES)
            ]
            for half in (first, first + _ROUND_HEAD + _ROUND_BYTES)
        ]
        self.shares_cores = shares_cores
        """Whether there are more ranks than cores."""
        # The background thread waits while the main thread computes, and must not take a core from
        # it.
        self.background.wait_busily(False)
        self.wait_busily(True)
        start = end_of_rounds + rank * _BYTES_OF_DATA + _ARENA_START
        self.arena = Arena(memory[start : start + _ARENA_BYTES])
        """Memory for results of the reductions of this rank."""

    @staticmethod
    def offer(num_ranks: int) -> MemoryFile | None:
        """Return a file for the memory of `num_ranks` ranks on this node, if possible."""
        return MemoryFile.offer(_BYTES_PER_RANK * num_ranks)

    @classmethod
    def open(cls, place: Place, rank: int, size: int, num_cores: int) -> NodeMemory | None:
        """Return the memory that the ranks of a node share, if this rank can map it."""
        file, library = map_file(place, _BYTES_PER_RANK * size), native_library()
        if file is None or library is None:
            return None
        return cls(file.memory, rank, size, library, size > num_cores)

    def wait_busily(self, is_busy: bool) -> None:
        """Set how the calling thread waits: busily only if each rank has a core."""
        for sequence in (self.rounds, self.reductions):
            sequence.wait_busily(is_busy and not self.shares_cores)

    def brought(self) -> Sequence[memoryview]:
        """Return each rank's contribution to the last round; valid until the next round."""
        return self._brought[self.rounds.step & 1]

    def leave(self) -> None:
        """Let every rank leave its waits, permanently, from any thread."""
        for sequence in (self.rounds, self.reductions, self.background):
            sequence.leave()

    def view(self, address: int, num_bytes: int) -> np.ndarray:
        """Return a view of a part of the memory."""
        start = address - self._base
        return self._memory[start : start + num_bytes]
