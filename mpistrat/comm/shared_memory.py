"""Shared memory of a node: sequences of steps, and an arena for results."""

from __future__ import annotations

import bisect
import ctypes
import functools
import mmap
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.comm.node_file import MemoryFile, Place, map_file
from mpistrat.native import native_library

_MAP_FIXED = 0x10  # of <linux/mman.h>; the module mmap does not name it


class Arena:
    """Hands out whole pages of shared memory."""

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self._base: int = memory.ctypes.data
        self._free = [(0, memory.size)]
        """Start and stop of the free parts; sorted, and no two of them touch."""

    def take(self, num_bytes: int) -> int | None:
        """Return the address of `num_bytes` bytes, ``None`` where they are not left."""
        length = _whole_pages(num_bytes)
        for i, (start, stop) in enumerate(self._free):
            if stop - start >= length:
                self._free[i : i + 1] = [(start + length, stop)] if stop - start > length else []
                return self._base + start
        return None

    def give_back(self, address: int, num_bytes: int) -> None:
        """Take back what was handed out."""
        start = address - self._base
        stop = start + _whole_pages(num_bytes)
        # Free neighbours are merged at once. `take` looks for one part that is long enough, and
        # would find none between many short ones that touch.
        i = bisect.bisect(self._free, (start, stop))
        if i < len(self._free) and self._free[i][0] == stop:
            stop = self._free.pop(i)[1]
        if i > 0 and self._free[i - 1][1] == start:
            i -= 1
            start = self._free.pop(i)[0]
        self._free.insert(i, (start, stop))

    def leave(self, address: int, num_bytes: int) -> None:
        """Make what was handed out the memory of this process alone, with its content."""
        # Only in a process of one thread, such as a fork: others would see it empty for a moment.
        # The rank continues to write to the shared pages. MAP_FIXED puts private pages at the same
        # addresses (mmap(2)), so the arrays of the program keep their pointers and their content.
        content = ctypes.string_at(address, num_bytes)
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_FIXED
        if _mmap()(address, _whole_pages(num_bytes), protection, flags, -1, 0) != address:
            raise OSError(ctypes.get_errno(), "mmap of memory for results failed")
        ctypes.memmove(address, content, num_bytes)


def _whole_pages(num_bytes: int) -> int:
    return -(-num_bytes // _PAGE) * _PAGE


# The class `mmap.mmap` cannot map to a given address.
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
"""Of a buffer of a reduction. Pages that no reduction needs are never touched."""

_ARENA_BYTES = 2**26
"""Of each rank, for results. Others come from elsewhere, and have to be copied out."""

_ROUND_BYTES = 2**14
_ROUND_HEAD = 64
_PAGE = mmap.PAGESIZE
# Of each rank, one behind the other: the line and the halves of the rounds, of the reductions, of
# the reductions in the background, and the arena. The additional page of each has room for the
# heads of the line and of its halves, and keeps the starts on whole pages.
_ROUND_SEQUENCE_BYTES = 2 * _ROUND_BYTES + _PAGE
_BACKGROUND_START = _ROUND_SEQUENCE_BYTES + _PAGE + 2 * _HALF_BYTES
_ARENA_START = -(-(_BACKGROUND_START + _PAGE + 2 * _HALF_BYTES) // _PAGE) * _PAGE
_BYTES_PER_RANK = _ARENA_START + _ARENA_BYTES

# These must be changed together with the enum and `struct sequence` of native/sequences.c and .h.
_HAS_LEFT = 24
"""Bytes from the start of a rank's line: whether it waits for others no longer."""
_LINE_HEAD = 128
"""Bytes from the start of a rank's line to its halves."""
_STEP, _PATIENCE, _KEEPS_CORE = 2, 6, 7
"""Where the C structure has the number of steps, and how it waits."""
_BUSY_NS, _SHARED_NS = 50_000, 10_000
"""How long a wait takes a core for itself, and one that others need. To wake a thread takes 5 to 50
us."""


class WaitLeft(Exception):
    """A rank has left what all wait for in shared memory, as another one is dead."""


class StepSequence:
    """One sequence of steps of all ranks in shared memory, as ``native/sequences.c`` takes it."""

    def __init__(
        self, rank: int, half: int, lines: list[int], arena: int = 0, arena_bytes: int = 0
    ) -> None:
        head = [len(lines), rank, 0, half, arena, arena_bytes, _BUSY_NS, True]
        self._structure = np.array([*head, *lines], np.int64)
        self._has_left = ctypes.c_int64.from_address(lines[rank] + _HAS_LEFT)
        self.pointer: int = self._structure.ctypes.data
        """The address of the C structure, valid as long as this object."""

    @property
    def step(self) -> int:
        """The steps at which this rank has arrived."""
        return int(self._structure[_STEP])

    def leave(self) -> None:
        """Have every rank leave the waits of this sequence, for good, from any thread."""
        # Only this rank writes to its line, so this needs no lock. Who sleeps looks at it again
        # within a few milliseconds, without being woken.
        self._has_left.value = 1

    def check(self) -> None:
        """Raise where a wait has ended because ranks leave."""
        # A wait that ends because a different rank has left sets the flag in its line too.
        if self._has_left.value:
            raise WaitLeft

    def wait_busily(self, is_busy: bool) -> None:
        """Have waits keep the core until they are long, or only while they are short."""
        self._structure[_PATIENCE] = _BUSY_NS if is_busy else _SHARED_NS
        self._structure[_KEEPS_CORE] = is_busy


class NodeMemory:
    """Shared memory of the ranks of one node."""

    BLOCK_BYTES = _HALF_BYTES
    """The largest block of a reduction."""
    ROUND_BYTES = _ROUND_BYTES
    """How much may travel with a round."""

    def __init__(
        self, memory: np.ndarray, rank: int, size: int, library: Any, shares_cores: bool = False
    ) -> None:
        self.rank = rank
        self.size = size
        self.library = library
        self._memory = memory
        self._base: int = memory.ctypes.data
        lines = [self._base + each * _BYTES_PER_RANK for each in range(size)]
        # One sequence for each kind of work that goes on at the same time.
        self.rounds = StepSequence(rank, _ROUND_HEAD + _ROUND_BYTES, lines)
        self.reductions, self.background = (
            StepSequence(
                rank, _HALF_BYTES, [line + start for line in lines], _ARENA_START - start, length
            )
            for start, length in ((_ROUND_SEQUENCE_BYTES, _ARENA_BYTES), (_BACKGROUND_START, 0))
        )
        first = _LINE_HEAD + _ROUND_HEAD
        # The two halves are used in turn: `half_of` in native/sequences.c takes the one of `step &
        # 1`.
        self._brought = [
            [
                memory[start : start + _ROUND_BYTES].data
                for start in range(half, memory.size, _BYTES_PER_RANK)
            ]
            for half in (first, first + _ROUND_HEAD + _ROUND_BYTES)
        ]
        self.shares_cores = shares_cores
        """Whether there are more ranks than cores."""
        # Its thread waits while the main thread computes, and must not take a core from it.
        self.background.wait_busily(False)
        self.wait_busily(True)
        start = rank * _BYTES_PER_RANK + _ARENA_START
        self.arena = Arena(memory[start : start + _ARENA_BYTES])
        """Memory for results of the reductions of this rank."""

    @staticmethod
    def offer(num_ranks: int) -> MemoryFile | None:
        """Return a file for the memory of `num_ranks` ranks on this node, if there can be one."""
        return MemoryFile.offer(_BYTES_PER_RANK * num_ranks)

    @classmethod
    def open(cls, place: Place, rank: int, size: int, num_cores: int) -> NodeMemory | None:
        """Return the memory that the ranks of a node, on so many cores, share, if this one can."""
        file, library = map_file(place, _BYTES_PER_RANK * size), native_library()
        if file is None or library is None:
            return None
        return cls(file.memory, rank, size, library, size > num_cores)

    def wait_busily(self, is_busy: bool) -> None:
        """Set how the calling thread waits: busily only where each rank has a core."""
        for sequence in (self.rounds, self.reductions):
            sequence.wait_busily(is_busy and not self.shares_cores)

    def brought(self) -> Sequence[memoryview]:
        """Return what each rank has brought to the last round: views, until the next one."""
        return self._brought[self.rounds.step & 1]

    def leave(self) -> None:
        """Have every rank leave its waits, for good, from any thread."""
        for sequence in (self.rounds, self.reductions, self.background):
            sequence.leave()

    def view(self, address: int, num_bytes: int) -> np.ndarray:
        """Return a view of a part of the memory."""
        start = address - self._base
        return self._memory[start : start + num_bytes]
