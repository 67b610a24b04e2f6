"""Decoded chunks of one field, in memory that is used again and again."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Container, Iterable
from concurrent.futures import Future, wait

import numpy as np

from mpistrat.data.recycling import recycled, recycled_empty

__all__ = ["ChunkStore"]

Load = Callable[[list[tuple[int, np.ndarray]]], "Future[None]"]
"""Begins to decode some chunks, given by their numbers, into the rows that come with each."""

_TASK_BYTES = 2**18
"""Chunks that are small are decoded several at a time: handing a task over has its price."""

_ABSENT = -1


class ChunkStore:
    """Chunks that are decoded, or being so, each in a slot of one array.

    Chunks are decoded in the order in which they were announced, as far as there are slots that
    no announced chunk needs. One thread uses the store.

    Parameters
    ----------
    num_chunks, num_slots : int
        How many there are, and how many are held at most; 2 or more.
    slot_shape : tuple of int
        Rows of the longest chunk, and shape of a row.
    dtype : numpy.dtype
    load : callable
        Takes the numbers of some chunks, and the slot of each.
    """

    def __init__(
        self,
        num_chunks: int,
        num_slots: int,
        slot_shape: tuple[int, ...],
        dtype: np.dtype,
        load: Load,
    ) -> None:
        self._block = recycled_empty(num_slots * math.prod(slot_shape) * dtype.itemsize)
        self._memory = self._block.view(dtype).reshape(num_slots, *slot_shape)
        self._rows = self._memory.reshape(num_slots * slot_shape[0], *slot_shape[1:])
        self._load = load
        self._chunks_per_task = max(_TASK_BYTES // max(self._memory[0].nbytes, 1), 1)
        self._free = list(range(num_slots - 1, -1, -1))
        # The slot of each chunk that is ready.
        self._slot_of = np.full(num_chunks, _ABSENT, np.int32)
        self._held: dict[int, int] = {}
        self._futures: dict[int, Future[None]] = {}
        self._wanted: Counter[int] = Counter()
        # Held, but not wanted.
        self._spare: OrderedDict[int, None] = OrderedDict()
        self._queue: deque[int] = deque()

    def announce(self, chunks: Iterable[int]) -> None:
        """Note that these chunks will be needed, after those noted before. Local."""
        for chunk in chunks:
            self._wanted[chunk] += 1
            if chunk in self._held:
                self._spare.pop(chunk, None)
            else:
                self._queue.append(chunk)
        self._load_ahead()

    def release(self, chunks: Iterable[int]) -> None:
        """Take one announcement of each chunk back: it has been used. Local."""
        for chunk in chunks:
            self._wanted[chunk] -= 1
            if not self._wanted[chunk]:
                del self._wanted[chunk]
                if chunk in self._held:
                    self._spare[chunk] = None
        self._load_ahead()

    def take(self, chunks: np.ndarray, rows: np.ndarray, output: np.ndarray) -> None:
        """Copy rows to `output`, and wait for them where need be. Local.

        Parameters
        ----------
        chunks, rows : ndarray of int
            The chunk of each row, and its number within the chunk.
        output : ndarray
            Shape ``(len(rows), *shape)``.

        Raises
        ------
        DataError
            If a chunk cannot be read.
        """
        slots = self._slot_of[chunks]
        if (slots == _ABSENT).any():
            needed = dict.fromkeys(chunks.tolist())
            if len(needed) > len(self._memory):
                half = len(chunks) // 2
                for part in (slice(half), slice(half, None)):
                    self.take(chunks[part], rows[part], output[part])
                return
            self._hold(needed)
            slots = self._slot_of[chunks]
        # All indices are in bounds. In the default mode NumPy would copy by way of a buffer.
        np.take(self._rows, slots * np.intp(self._memory.shape[1]) + rows, 0, output, "clip")

    def _hold(self, chunks: Collection[int]) -> None:
        """Have all of `chunks` decoded."""
        absent = [chunk for chunk in chunks if chunk not in self._held]
        for chunk in absent:
            slot = self._spare_slot(chunks)
            self._put(chunk, self._slot_in_use(chunks) if slot is None else slot)
        self._begin(absent)
        for chunk in chunks:
            future = self._futures.get(chunk)
            if future is None:
                continue
            try:
                future.result()
            except BaseException:
                self._drop(chunk)
                raise
            del self._futures[chunk]
            self._slot_of[chunk] = self._held[chunk]

    def _load_ahead(self) -> None:
        put = []
        while self._queue:
            chunk = self._queue[0]
            if chunk in self._wanted and chunk not in self._held:
                slot = self._spare_slot()
                if slot is None:
                    break
                self._put(chunk, slot)
                put.append(chunk)
            self._queue.popleft()
        self._begin(put)

    def _put(self, chunk: int, slot: int) -> None:
        self._held[chunk] = slot
        if chunk not in self._wanted:
            self._spare[chunk] = None

    def _begin(self, chunks: list[int]) -> None:
        """Begin to decode chunks that have their slots."""
        for first in range(0, len(chunks), self._chunks_per_task):
            task = chunks[first : first + self._chunks_per_task]
            future = self._load([(chunk, self._memory[self._held[chunk]]) for chunk in task])
            self._futures.update(dict.fromkeys(task, future))

    def _spare_slot(self, keep: Container[int] = ()) -> int | None:
        """Return a slot without a chunk that was announced or is in `keep`, if there is one."""
        if not self._free:
            oldest = next((chunk for chunk in self._spare if chunk not in keep), None)
            if oldest is None:
                return None
            self._drop(oldest)
        return self._free.pop()

    def _slot_in_use(self, keep: Container[int]) -> int:
        """Return the slot of a chunk that is needed later, which so has to come again."""
        later = next(chunk for chunk in self._held if chunk not in keep)
        self._drop(later)
        self._queue.append(later)
        return self._free.pop()

    def _drop(self, chunk: int) -> None:
        self._spare.pop(chunk, None)
        future = self._futures.pop(chunk, None)
        if future is not None and not future.done():
            wait([future])  # until then it may write to the slot
        self._slot_of[chunk] = _ABSENT
        self._free.append(self._held.pop(chunk))

    def close(self) -> None:
        """Forget all chunks, whose tasks have ended or were cancelled. Local."""
        self._queue.clear()
        self._wanted.clear()
        for chunk in reversed(list(self._held)):
            self._drop(chunk)
        recycled(self._block)
