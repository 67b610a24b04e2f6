"""Decoded chunks of one field, in memory that is used again and again."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Container, Sequence
from concurrent.futures import Future, wait

import numpy as np

__all__ = ["ChunkStore"]

Load = Callable[[int, np.ndarray], "Future[None]"]
"""Begins to decode a chunk, by its number, into the rows given."""


class ChunkStore:
    """Chunks that are decoded, or being so, each in a slot of one array.

    Chunks are decoded in the order in which they were announced, as far as there are slots that
    no announced chunk needs. One thread uses the store.

    Parameters
    ----------
    num_slots : int
        How many chunks are held at most; 2 or more.
    slot_shape : tuple of int
        Rows of the longest chunk, and shape of a row.
    dtype : numpy.dtype
    load : callable
        Takes the number of a chunk and its slot.
    """

    def __init__(
        self, num_slots: int, slot_shape: tuple[int, ...], dtype: np.dtype, load: Load
    ) -> None:
        # Memory that no chunk has needed yet is not there: the system gives pages when written to.
        self._memory = np.empty((num_slots, *slot_shape), dtype)
        self._rows = self._memory.reshape(-1, *slot_shape[1:])
        self._rows_per_slot = slot_shape[0]
        self._load = load
        self._free = list(range(num_slots - 1, -1, -1))
        # The slot of each chunk, and who decodes it; nobody any more once it has been used.
        self._held: dict[int, tuple[int, Future[None] | None]] = {}
        # Held, but not wanted; those used last at the end.
        self._spare: OrderedDict[int, None] = OrderedDict()
        self._wanted: Counter[int] = Counter()
        self._queue: deque[int] = deque()

    def announce(self, chunks: Sequence[int]) -> None:
        """Note that these chunks will be needed, after those noted before. Local."""
        for chunk in chunks:
            self._wanted[chunk] += 1
            if chunk in self._held:
                self._spare.pop(chunk, None)
            else:
                self._queue.append(chunk)
        self._load_ahead()

    def release(self, chunks: Sequence[int]) -> None:
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
        needed, places = np.unique(chunks, return_inverse=True)
        num_slots = len(self._memory)
        for first in range(0, len(needed), num_slots):
            group = needed[first : first + num_slots].tolist()
            slots = self._hold(group)
            if len(group) == len(needed):
                wanted = slots[places] * self._rows_per_slot + rows
                # Indices are in bounds; any other mode than the default copies without a buffer.
                np.take(self._rows, wanted, 0, output, "clip")
            else:
                mine = (places >= first) & (places < first + num_slots)
                wanted = slots[places[mine] - first] * self._rows_per_slot + rows[mine]
                output[mine] = self._rows[wanted]

    def _hold(self, chunks: list[int]) -> np.ndarray:
        """Return the slots of `chunks`, all of them decoded."""
        keep = frozenset(chunks)
        for chunk in chunks:
            if chunk not in self._held:
                slot = self._spare_slot(keep)
                self._begin(chunk, self._slot_in_use(keep) if slot is None else slot)
            elif chunk in self._spare:
                self._spare.move_to_end(chunk)
        for chunk in chunks:
            self._wait_for(chunk)
        return np.array([self._held[chunk][0] for chunk in chunks], np.intp)

    def _wait_for(self, chunk: int) -> None:
        slot, future = self._held[chunk]
        if future is None:
            return
        try:
            future.result()
        except BaseException:
            self._drop(chunk)
            raise
        self._held[chunk] = (slot, None)

    def _load_ahead(self) -> None:
        while self._queue:
            chunk = self._queue[0]
            if chunk in self._wanted and chunk not in self._held:
                slot = self._spare_slot()
                if slot is None:
                    return
                self._begin(chunk, slot)
            self._queue.popleft()

    def _begin(self, chunk: int, slot: int) -> None:
        self._held[chunk] = (slot, self._load(chunk, self._memory[slot]))
        if chunk not in self._wanted:
            self._spare[chunk] = None

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
        slot, future = self._held.pop(chunk)
        self._spare.pop(chunk, None)
        if future is not None and not future.cancel():
            wait([future])  # until then it may write to the slot
        self._free.append(slot)

    def close(self) -> None:
        """Forget all chunks. Local."""
        self._queue.clear()
        self._wanted.clear()
        while self._held:
            self._drop(next(reversed(self._held)))
