"""Chunk cache of a reader, the plan of its size, and the row cache of small fields.

A *slot* is the memory for one decoded chunk.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat.data.chunks import CHUNK_OVERHEAD_BYTES
from mpistrat.data.hdf5.catalog import Catalog
from mpistrat.native import native_library
from mpistrat.sharding import ceil_div

_MIN_CAPACITY_BYTES = 2**25
"""Smallest size of the cache of decoded chunks of the field with the largest rows."""

_SMALL_FIELD_BYTES = 2**23
"""Smallest size of the cache of each other field."""

_ROW_CACHE_BYTES = 2**23
"""The smallest fields of a dataset stay in memory for all passes, up to this many bytes. Often
these are all fields."""

_SMALL_SHARE = 0.02
"""A cached field with at most this part of an example's bytes is read in large blocks if it has
no chunks, because every rank needs most of each block."""

_SMALL_FIELD_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of one field over all files, numbered from 0 on."""

    # Data without chunks are read in blocks of rows, which are treated as chunks.

    rows_of_file: np.ndarray
    """Length of each file."""
    rows_per_chunk: np.ndarray
    """Length of a chunk in each file."""
    is_cached: bool = False
    """Whether the rows stay in a `RowCache` for all passes."""
    num_slots: int = 0
    """Number of chunks in the `ChunkCache`, if there is no `RowCache`."""

    @property
    def rows_per_slot(self) -> int:
        """Length of the longest chunk."""
        return int(np.minimum(self.rows_per_chunk, self.rows_of_file).max(initial=1))

    @property
    def num_chunks(self) -> int:
        """Number of chunks in all files together."""
        return int(self._first_chunk[-1])

    @cached_property
    def _first_chunk(self) -> np.ndarray:
        return np.cumsum([0, *(-(-self.rows_of_file // self.rows_per_chunk))])

    def locate(self, files: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the chunk of each row, and its number within the chunk."""
        if not files.ndim:  # one file: NumPy divides much faster by a single number
            length = self._as_lists[1][int(files)]
            chunks = rows // length
            return chunks + self._as_lists[0][int(files)], rows - chunks * length
        chunks, within = np.divmod(rows, self.rows_per_chunk[files])
        return chunks + self._first_chunk[files], within

    def row_range(self, chunk: int) -> tuple[int, int, int]:
        """Return the file of a chunk, its first row there and the row after its last row."""
        first_chunks, rows_per_chunk, rows_of_file = self._as_lists
        file = bisect.bisect_right(first_chunks, chunk) - 1
        start = (chunk - first_chunks[file]) * rows_per_chunk[file]
        return file, start, min(start + rows_per_chunk[file], rows_of_file[file])

    @cached_property
    def _as_lists(self) -> tuple[list[int], list[int], list[int]]:
        # To find one number, a list is faster than an array.
        arrays = self._first_chunk, self.rows_per_chunk, self.rows_of_file
        first_chunks, rows_per_chunk, rows_of_file = map(np.ndarray.tolist, arrays)
        return first_chunks, rows_per_chunk, rows_of_file


def plan_fields(catalog: Catalog, window_rows: int) -> list[ChunkPlan]:
    """Return the plan of each field, in the order of `Catalog.columns`."""
    rows_of_file = np.array([file.num_rows for file in catalog.files])
    cached = _cached_fields(catalog)
    plans = []
    for field, row_bytes in enumerate(catalog.row_sizes):
        lengths = np.array(
            [_block_rows(catalog, file, field, cached) for file in range(len(catalog.files))]
        )
        plan = ChunkPlan(rows_of_file, lengths, field in cached)
        if plan.is_cached:
            plans.append(plan)
            continue
        # The decoded size counts, even if only a few members of each row are kept.
        layouts = [file.layouts[field] for file in catalog.files]
        decoded_bytes = max(row_bytes, *(each.decoded_row_bytes for each in layouts))
        least_bytes = _MIN_CAPACITY_BYTES if field == catalog.widest else _SMALL_FIELD_BYTES
        num_slots = max(
            # 9/8 of two windows, because partitions do not end with whole chunks.
            ceil_div(window_rows * 9, plan.rows_per_slot * 4),
            least_bytes // (plan.rows_per_slot * decoded_bytes + CHUNK_OVERHEAD_BYTES),
        )
        plans.append(dataclasses.replace(plan, num_slots=max(min(num_slots, plan.num_chunks), 2)))
    return plans


def _cached_fields(catalog: Catalog) -> set[int]:
    """Return the smallest fields, as many as fit into `_ROW_CACHE_BYTES`."""
    num_rows, sizes = int(catalog.offsets[-1]), catalog.row_sizes
    # Among equal sizes, the widest field is last, because its chunks decide what is read ahead.
    ascending = sorted(range(len(sizes)), key=lambda field: (sizes[field], field == catalog.widest))
    totals = itertools.accumulate(num_rows * sizes[field] for field in ascending)
    return {
        field for field, total in zip(ascending, totals, strict=True) if total <= _ROW_CACHE_BYTES
    }


def _block_rows(catalog: Catalog, file: int, field: int, cached: set[int]) -> int:
    """Return how many rows of a field to read together."""
    layouts = catalog.files[file].layouts
    if layouts[field].is_chunked or field == catalog.widest:
        return layouts[field].rows_per_chunk
    row_bytes = catalog.row_sizes[field]
    if field in cached and row_bytes <= _SMALL_SHARE * sum(catalog.row_sizes):
        return max(_SMALL_FIELD_BLOCK_BYTES // max(row_bytes, 1), 1)
    # As many rows as one chunk of the widest field has, because they are needed together.
    return layouts[catalog.widest].rows_per_chunk


ChunkBuffers = Sequence[tuple[int, np.ndarray]]
"""Numbers of chunks, and the array of rows that each is decoded into."""

_TASK_BYTES = 2**22
"""Size of the chunks that one task decodes: starting a task, and waiting for it, takes time."""

_ABSENT = -1

_ONE = np.int32(1)
"""Has the dtype of the counts, because NumPy would otherwise convert it for each row."""


class ChunkCache:
    """Chunks that are decoded or being decoded, each in a slot of one array, for one thread."""

    # Chunks are decoded in the order in which they were announced, as long as there are slots that
    # no announced chunk needs.

    def __init__(
        self,
        num_chunks: int,
        num_slots: int,
        slot_shape: tuple[int, ...],
        dtype: np.dtype,
        submit: Callable[[ChunkBuffers], Future[None]],
        num_helpers: int = 0,
    ) -> None:
        # All slots are in one block, so that one list of places is enough to copy rows of many
        # chunks.
        self._block = _buffers.empty(num_slots * math.prod(slot_shape) * dtype.itemsize)
        self._memory = self._block.view(dtype).reshape(num_slots, *slot_shape)
        self._rows = self._memory.reshape(num_slots * slot_shape[0], *slot_shape[1:])
        self._library = native_library()
        self._num_helpers = num_helpers  # threads that copy rows
        self._copy: Any = None  # the copy that was begun
        self._submit = submit  # starts to decode chunks
        self._chunks_per_task = max(_TASK_BYTES // max(self._memory[0].nbytes, 1), 1)
        # `pop` takes the lowest slot first, so a short epoch touches only the first pages of the
        # block.
        self._free = list(range(num_slots - 1, -1, -1))
        # For each chunk: its slot, and for how many rows it is announced.
        self._slot_of = np.full(num_chunks, _ABSENT, np.int32)
        self._wanted = np.zeros(num_chunks, np.int32)
        # For each slot: its chunk, whether it is being decoded, and the task that decodes it.
        self._chunk_in = np.full(num_slots, _ABSENT, np.int64)
        self._is_loading = np.zeros(num_slots, np.bool_)
        self._tasks: dict[int, tuple[Future[None], list[int]]] = {}
        # Chunks to decode, and chunks that may be dropped, which include all unwanted ones.
        self._queue: deque[int] = deque()
        self._spare: OrderedDict[int, None] = OrderedDict()

    def announce(self, chunks: np.ndarray) -> None:
        """Announce the chunks of rows that will be read, after those announced before."""
        if self._library is not None:
            # `count_rows` returns the chunks that were not announced before, each once.
            self._queue.extend(self._library.count_rows(self._wanted, chunks, 1))
        else:
            self._queue.extend(_distinct(chunks[self._wanted[chunks] == 0]))
            np.add.at(self._wanted, chunks, _ONE)
        self._load_ahead()

    def release(self, chunks: np.ndarray) -> None:
        """Remove an announcement, because its rows have been read."""
        self._unwant(chunks)
        self._load_ahead()

    def _unwant(self, chunks: np.ndarray) -> None:
        if self._library is not None:
            unwanted = self._library.count_rows(self._wanted, chunks, -1)
        else:
            np.subtract.at(self._wanted, chunks, _ONE)
            unwanted = chunks[self._wanted[chunks] == 0].tolist()
        # A spare chunk stays in its slot until the slot is needed. If it is announced again before
        # that, it is not decoded again.
        self._spare.update(dict.fromkeys(unwanted))

    def take(self, chunks: np.ndarray, rows: np.ndarray, output: np.ndarray) -> None:
        """Copy rows to `output`; waits for chunks that are not decoded yet."""
        slots = self._slot_of[chunks]
        if (slots == _ABSENT).any() or (self._tasks and self._is_loading[slots].any()):
            needed = _distinct(chunks)
            # There are more chunks than slots. Each half needs fewer slots, and a single row needs
            # one, so the recursion ends.
            if len(needed) > len(self._memory):
                half = len(chunks) // 2
                for part in (slice(half), slice(half, None)):
                    self.take(chunks[part], rows[part], output[part])
                return
            self._hold(np.array(needed))
            slots = self._slot_of[chunks]
        if self._library is not None:
            self._library.end_copy(self._begin_copy(slots, rows, output))
            return
        # All indices are in bounds, so "clip" changes none. In the default mode NumPy would copy
        # through a buffer.
        np.take(self._rows, self._places(slots, rows), 0, output, "clip")

    def begin(
        self, chunks: np.ndarray, rows: np.ndarray, empty: Callable[[], np.ndarray]
    ) -> np.ndarray | None:
        """Have threads begin to copy rows to a new array of `empty`, and return the array.

        `end` waits for the copy. If rows are not decoded yet, nothing is copied, and ``None`` is
        returned.
        """
        if self._library is None:
            return None
        slots = self._slot_of[chunks]
        if (slots == _ABSENT).any() or not self._are_decoded(slots):
            return None
        output = empty()
        self._copy = self._begin_copy(slots, rows, output)
        return output

    def end(self) -> None:
        """Wait for the copy that was begun, if there is one."""
        copy, self._copy = self._copy, None
        if copy is not None:
            self._library.end_copy(copy)

    def _begin_copy(self, slots: np.ndarray, rows: np.ndarray, output: np.ndarray) -> Any:
        row_bytes = self._rows.nbytes // len(self._rows)
        offsets = self._places(slots, rows) * row_bytes
        return self._library.begin_copy(self._block, offsets, None, output, self._num_helpers)

    def _places(self, slots: np.ndarray, rows: np.ndarray) -> np.ndarray:
        places: np.ndarray = slots * np.intp(self._memory.shape[1]) + rows
        return places

    def _are_decoded(self, slots: np.ndarray) -> bool:
        """Return whether all slots are filled, without waiting."""
        for slot in _distinct(slots[self._is_loading[slots]]) if self._tasks else ():
            if self._is_loading[slot]:
                # A failed task is left to `take`, which raises its error when a row of the chunk is
                # read.
                future, _ = self._tasks[slot]
                if not future.done() or future.exception() is not None:
                    return False
                self._finish(slot)
        return True

    def _hold(self, chunks: np.ndarray) -> None:
        """Have all of `chunks` decoded; each occurs once."""
        # They are marked as wanted, so that none of them is dropped to free a slot for another.
        self._wanted[chunks] += 1
        try:
            # All get their slots before decoding begins, so that one task can decode several.
            absent = chunks[self._slot_of[chunks] == _ABSENT].tolist()
            for chunk in absent:
                slot = self._spare_slot()
                self._put(chunk, self._slot_in_use(chunks) if slot is None else slot)
            self._begin(absent)
            # Begin with the last one: tasks end in the order in which they begin, so one wait may
            # be enough.
            for slot in self._slot_of[chunks[::-1]].tolist():
                if self._is_loading[slot]:
                    self._finish(slot)
        finally:
            self._unwant(chunks)

    def _finish(self, slot: int) -> None:
        """Wait for the task that fills `slot` and perhaps other slots."""
        future, slots = self._tasks[slot]
        try:
            future.result()
        except BaseException:
            # The slot must not keep the remains of the failed task, so that the next read decodes
            # the chunk again and raises the error again.
            self._drop(slot)
            raise
        self._is_loading[slots] = False
        for each in slots:
            self._tasks.pop(each, None)

    def _load_ahead(self) -> None:
        put = []
        # The first chunk stays in the queue until there is a slot for it, so that chunks are
        # decoded in the order in which they were announced.
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
            future = self._submit([(c, self._memory[s]) for c, s in zip(task, slots, strict=True)])
            self._is_loading[slots] = True
            self._tasks.update(dict.fromkeys(slots, (future, slots)))

    def _spare_slot(self) -> int | None:
        """Return a slot that holds no wanted chunk, if there is one."""
        while not self._free and self._spare:
            oldest, _ = self._spare.popitem(last=False)
            # The chunk may have been announced again, or dropped, since it became spare.
            if not self._wanted[oldest] and self._slot_of[oldest] != _ABSENT:
                self._drop(int(self._slot_of[oldest]))
        return self._free.pop() if self._free else None

    def _slot_in_use(self, keep: np.ndarray) -> int:
        """Return the slot of a chunk that is needed only later."""
        slot = int(np.flatnonzero(~np.isin(self._chunk_in, keep))[0])
        # The chunk is still wanted, so it must be decoded again.
        self._queue.append(int(self._chunk_in[slot]))
        self._drop(slot)
        return self._free.pop()

    def _drop(self, slot: int) -> None:
        """Empty a slot that holds a chunk."""
        self.end()  # the copy may read from the slot
        task = self._tasks.pop(slot, None)
        if task is not None:
            future, slots = task
            wait([future])  # the task may write to the slot until it has ended
            # All slots of the task share this list: when it is finished for the others, it must not
            # mark this slot, which may hold a different chunk by then.
            slots.remove(slot)
            self._is_loading[slot] = False
        self._slot_of[self._chunk_in[slot]] = _ABSENT
        self._chunk_in[slot] = _ABSENT
        self._free.append(slot)

    def close(self) -> None:
        """Release the memory, once all tasks have ended or were cancelled."""
        # A copy that is under way reads from the block, which the next owner would overwrite.
        self.end()
        _buffers.release(self._block)


def _distinct(chunks: np.ndarray) -> list[int]:
    """Return each number once, in the order of first occurrence."""
    return list(dict.fromkeys(chunks.tolist()))


class RowCache:
    """One field of all files; each chunk is read when one of its rows is first needed."""

    # Readers in several threads may share it: if two decode a chunk, both write the same values. So
    # it needs no lock, which could stay locked forever in a forked process.

    def __init__(
        self, plan: ChunkPlan, offsets: np.ndarray, shape: tuple[int, ...], dtype: np.dtype
    ) -> None:
        self._plan, self._offsets = plan, offsets
        self._rows = np.empty((int(offsets[-1]), *shape), dtype)
        self._is_there = np.zeros(plan.num_chunks, np.bool_)
        self._is_complete = False

    def take(
        self,
        numbers: np.ndarray,
        files: np.ndarray,
        rows: np.ndarray,
        decode: Callable[[ChunkBuffers], None],
        output: np.ndarray,
    ) -> None:
        """Copy the rows `numbers` to `output`: `rows` within `files`, or within the only file."""
        if not self._is_complete:
            chunks, _ = self._plan.locate(files, rows)
            missing = np.unique(chunks[~self._is_there[chunks]]).tolist()
            if missing:
                self._add(missing, decode)
        # All indices are in bounds, so "clip" changes none. In the default mode NumPy would copy
        # through a buffer.
        self._rows.take(numbers, 0, output, "clip")

    def _add(self, chunks: list[int], decode: Callable[[ChunkBuffers], None]) -> None:
        # Chunks are not decoded in place, because another thread could read rows before their bytes
        # are in native order.
        targets = [self._rows_of(chunk) for chunk in chunks]
        decoded = [np.empty_like(target) for target in targets]
        decode(list(zip(chunks, decoded, strict=True)))
        for target, content in zip(targets, decoded, strict=True):
            target[...] = content
        # This is set after the rows are written, because other threads then read them at once.
        self._is_there[chunks] = True
        self._is_complete = bool(self._is_there.all())

    def _rows_of(self, chunk: int) -> np.ndarray:
        file, start, stop = self._plan.row_range(chunk)
        first = int(self._offsets[file])
        return self._rows[first + start : first + stop]


class _BufferPool:
    """Memory of closed caches for reuse, because the system clears each page of new memory."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: list[np.ndarray] = []

    def empty(self, num_bytes: int) -> np.ndarray:
        """Return `num_bytes` of uninitialised memory, as uint8."""
        with self._lock:
            for number, block in enumerate(self._idle):
                if num_bytes <= block.nbytes <= _MAX_EXCESS * num_bytes:
                    return self._idle.pop(number)[:num_bytes]
        return np.empty(num_bytes, np.uint8)

    def release(self, block: np.ndarray) -> None:
        """Take back memory that `empty` has returned; the caller must not use it any more."""
        # `empty` may have returned the beginning of a larger block. The whole block goes back.
        whole = block if block.base is None else block.base
        with self._lock:
            self._idle.append(whole)
            while sum(each.nbytes for each in self._idle) > _MAX_IDLE_BYTES:
                self._idle.pop(0)

    def clear(self) -> None:
        """Return idle memory to the system."""
        with self._lock:
            self._idle.clear()


_MAX_IDLE_BYTES = 2**27
_MAX_EXCESS = 4
"""A buffer may be up to this many times larger than requested."""


def release_idle_buffers() -> None:
    """Return the memory of closed caches to the system."""
    _buffers.clear()


_buffers = _BufferPool()
