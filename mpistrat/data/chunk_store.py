"""Decoded chunks of one field, in memory that is used again and again."""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait

import numpy as np

from mpistrat.data.recycling import recycled, recycled_empty

__all__ = ["ChunkStore"]

Load = Callable[[Sequence[tuple[int, np.ndarray]]], "Future[None]"]
"""Begins to decode some chunks, given by their numbers, into the rows that come with each."""

_TASK_BYTES = 2**20
"""Chunks are decoded several at a time: handing a task over, and waiting for it, has its price."""

_ABSENT = -1

_ONE = np.int32(1)
"""Of the dtype of the counts, or NumPy would convert at each row."""


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
        # Of each chunk its slot, and for how many rows it is announced.
        self._slot_of = np.full(num_chunks, _ABSENT, np.int32)
        self._wanted = np.zeros(num_chunks, np.int32)
        # Of each slot its chunk, and what decodes it, until that has been waited for.
        self._chunk_in = np.full(num_slots, _ABSENT, np.int64)
        self._is_loading = np.zeros(num_slots, np.bool_)
        self._tasks: dict[int, tuple[Future[None], list[int]]] = {}
        # Chunks to decode; and some that were not wanted any more, all of these among them.
        self._queue: deque[int] = deque()
        self._spare: OrderedDict[int, None] = OrderedDict()

    def announce(self, chunks: np.ndarray) -> None:
        """Note the chunks of rows that will be read, after those noted before. Local."""
        self._queue.extend(_distinct(chunks[self._wanted[chunks] == 0]))
        np.add.at(self._wanted, chunks, _ONE)
        self._load_ahead()

    def release(self, chunks: np.ndarray) -> None:
        """Take an announcement back: its rows have been read. Local."""
        self._unwant(chunks)
        self._load_ahead()

    def _unwant(self, chunks: np.ndarray) -> None:
        np.subtract.at(self._wanted, chunks, _ONE)
        self._spare.update(dict.fromkeys(chunks[self._wanted[chunks] == 0].tolist()))

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
        if (slots == _ABSENT).any() or (self._tasks and self._is_loading[slots].any()):
            needed = _distinct(chunks)
            if len(needed) > len(self._memory):
                half = len(chunks) // 2
                for part in (slice(half), slice(half, None)):
                    self.take(chunks[part], rows[part], output[part])
                return
            self._hold(np.array(needed))
            slots = self._slot_of[chunks]
        # All indices are in bounds. In the default mode NumPy would copy by way of a buffer.
        np.take(self._rows, slots * np.intp(self._memory.shape[1]) + rows, 0, output, "clip")

    def _hold(self, chunks: np.ndarray) -> None:
        """Have all of `chunks` decoded, which are distinct."""
        self._wanted[chunks] += 1
        try:
            absent = chunks[self._slot_of[chunks] == _ABSENT].tolist()
            for chunk in absent:
                slot = self._spare_slot()
                self._put(chunk, self._slot_in_use(chunks) if slot is None else slot)
            self._begin(absent)
            # From the last on: tasks end in the order in which they begin, so one wait may do.
            for slot in self._slot_of[chunks[::-1]].tolist():
                if self._is_loading[slot]:
                    self._finish(slot)
        finally:
            self._unwant(chunks)

    def _finish(self, slot: int) -> None:
        """Wait for the task that fills `slot`, and other slots."""
        future, slots = self._tasks[slot]
        try:
            future.result()
        except BaseException:
            self._drop(slot)
            raise
        self._is_loading[slots] = False
        for each in slots:
            self._tasks.pop(each, None)

    def _load_ahead(self) -> None:
        put = []
        while self._queue:
            chunk = self._queue[0]
            if self._wanted[chunk] and self._slot_of[chunk] == _ABSENT:
                slot = self._spare_slot()
                if slot is None:
                    break
                self._put(chunk, slot)
                put.append(chunk)
            self._queue.popleft()
        self._begin(put)

    def _put(self, chunk: int, slot: int) -> None:
        self._slot_of[chunk] = slot
        self._chunk_in[slot] = chunk

    def _begin(self, chunks: list[int]) -> None:
        """Begin to decode chunks that have their slots."""
        for first in range(0, len(chunks), self._chunks_per_task):
            task = chunks[first : first + self._chunks_per_task]
            slots = self._slot_of[task].tolist()
            future = self._load([(c, self._memory[s]) for c, s in zip(task, slots, strict=True)])
            self._is_loading[slots] = True
            self._tasks.update(dict.fromkeys(slots, (future, slots)))

    def _spare_slot(self) -> int | None:
        """Return a slot without a chunk that is wanted, if there is one."""
        while not self._free and self._spare:
            oldest, _ = self._spare.popitem(last=False)
            if not self._wanted[oldest] and self._slot_of[oldest] != _ABSENT:
                self._drop(int(self._slot_of[oldest]))
        return self._free.pop() if self._free else None

    def _slot_in_use(self, keep: np.ndarray) -> int:
        """Return the slot of a chunk that is needed later, which so has to come again."""
        slot = int(np.flatnonzero(~np.isin(self._chunk_in, keep))[0])
        self._queue.append(int(self._chunk_in[slot]))
        self._drop(slot)
        return self._free.pop()

    def _drop(self, slot: int) -> None:
        """Empty a slot that holds a chunk."""
        task = self._tasks.pop(slot, None)
        if task is not None:
            future, slots = task
            wait([future])  # until then it may write to the slot
            slots.remove(slot)
            self._is_loading[slot] = False
        self._slot_of[self._chunk_in[slot]] = _ABSENT
        self._chunk_in[slot] = _ABSENT
        self._free.append(slot)

    def close(self) -> None:
        """Give back the memory, once all tasks have ended or were cancelled. Local."""
        recycled(self._block)


def _distinct(chunks: np.ndarray) -> list[int]:
    """Return each number once, where it is first."""
    return list(dict.fromkeys(chunks.tolist()))
