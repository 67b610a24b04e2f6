"""Reader of HDF5 rows: threads decode whole chunks ahead of their use."""

from __future__ import annotations

import bisect
import contextlib
import itertools
import os
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.comm.pool import Pool
from mpistrat.data.hdf5.catalog import Catalog
from mpistrat.data.hdf5.chunk_cache import (
    ChunkBuffers,
    ChunkCache,
    RowCache,
    plan_fields,
    release_idle_buffers,
)
from mpistrat.data.hdf5.examples import Allocate, SingleReader, leaf_of
from mpistrat.data.hdf5.filters import DecodingThreads
from mpistrat.data.hdf5.layouts import CompressedChunks
from mpistrat.data.hdf5.open_files import OpenFiles, StoredRows
from mpistrat.data.hdf5.rows import (
    PlacedLeaf,
    RowCopies,
    is_placed,
    lies_in_one_piece,
)
from mpistrat.data.order import Block
from mpistrat.data.spec import known_shape
from mpistrat.errors import DataError
from mpistrat.system.background import clean_up

_READ_ERRORS = (OSError, KeyError, TypeError, ValueError, RuntimeError)  # from h5py

_TINY_CHUNK_BYTES = 2**14
"""Chunks up to this size are decoded when they are announced: starting a task takes longer."""
_FIRST = np.zeros((), np.intp)  # the number of the only file
_AHEAD_BYTES = 2**23  # of rows with known places that are requested from the disk
_MIN_RUN_ROWS = 8
"""Shorter runs may occur by chance in shuffled rows, so they are read in blocks and cached."""

_Columns = dict[int, tuple[np.ndarray, np.ndarray]]
"""For each field, the chunk of each row, and the rows."""


class Hdf5Reader:
    """Reads examples by their numbers, in any order."""

    # Threads decode whole chunks, outside of HDF5 if their filters are known, in the order in which
    # `expect` announces them. Runs of rows without chunks are read as slices. The readers of a
    # source share the caches of small fields. While a batch is used, threads copy the next one.

    def __init__(
        self,
        catalog: Catalog,
        window_rows: int,
        row_caches: dict[int, RowCache],
        empty: Allocate | None = None,
        mappings: dict[int, np.ndarray] | None = None,
        single_caches: dict[int, dict[int, Any]] | None = None,
    ) -> None:
        self._catalog = catalog
        self.fills_given_memory = empty is not None
        empty = empty or Pool().take  # the first access to new memory takes as long as the read
        self.empty = empty
        self._offsets = catalog.offsets
        self._starts: list[int] = self._offsets.tolist()
        self._files = OpenFiles(catalog, mappings)
        self._threads = DecodingThreads()
        # Helpers do not pay for runs of rows, which are copied faster than a task is started.
        self._num_helpers = self._threads.count - 1 if window_rows else 0
        self._pid, self._plans = os.getpid(), plan_fields(catalog, window_rows)
        specs = [layout.spec for layout in catalog.files[0].layouts]
        self._specs = [(known_shape(spec), spec.dtype) for spec in specs]
        caches = {} if single_caches is None else single_caches
        self._singles = [
            SingleReader(catalog, number, self._files, caches.setdefault(number, {}))
            for number in range(len(catalog.singles))
        ]
        self._filled = [field for field, size in enumerate(catalog.row_sizes) if size]
        self._chunked = [
            field
            for field in self._filled
            if any(file.layouts[field].is_chunked for file in catalog.files)
        ]
        self._row_caches = row_caches
        self._cached = [field for field in self._filled if self._plans[field].is_cached]
        others = [field for field in self._filled if field not in self._cached]
        placed = [field for field in others if is_placed(catalog, field)]
        # Of compound rows, only the members that are needed are copied.
        self._placed = [
            PlacedLeaf(number, field, output.leaf.members, catalog, self._files, empty)
            for number, output in enumerate(catalog.outputs)
            if (field := output.column) is not None and field in placed
        ]
        self._are_placed = set(placed)
        # If slices of runs supply fewer columns than this, other fields must be read.
        self._num_to_read = len(self._filled) + len(self._singles)
        others = [field for field in others if field not in placed]
        # If rows are shuffled, data without chunks are read in blocks, which are treated as chunks.
        self._announced = [field for field in others if window_rows or field in self._chunked]
        self._sliced = [field for field in others if field not in self._announced]
        if not window_rows:
            self._sliced += [field for field in placed if lies_in_one_piece(catalog, field)]
        self._chunk_caches: dict[int, ChunkCache] = {}
        self._expected = _ExpectedRows()
        self._begun: tuple[np.ndarray, dict[int, RowCopies], _Columns] | None = None
        """The next rows and the copies of them that are under way: by leaf if their place in the
        file is known, by field if they were decoded."""
        if self._announced:
            widest = self._plans[catalog.widest]
            # The rows of one window: `plan_fields` plans slots for 9/4 of a window.
            self.lookahead_rows = max(widest.num_slots * widest.rows_per_slot * 4 // 9, 1)
        elif self._placed and window_rows:  # nothing to decode, but the disk can read ahead
            self.lookahead_rows = max(_AHEAD_BYTES // sum(catalog.row_sizes), 1)
        else:  # runs are read whole
            self.lookahead_rows = 0

    def expect(self, block: Block) -> None:
        """Record that the rows `block` will be read, after those announced before."""
        self._check_process()
        numbers = np.asarray(block, np.int64)
        files, rows = self._locate(numbers)
        for field in self._announced:
            self._chunk_cache(field).announce(self._plans[field].locate(files, rows)[0])
        if self._placed:
            self._ask_for(files, rows)
        self._expected.add(numbers)

    def read(self, block: Block) -> Any:
        """Return the examples `block`, as a nest of arrays of shape ``(len(block), *shape)``."""
        self._check_process()
        numbers = np.asarray(block, np.int64)
        columns, leaves = dict[int, np.ndarray](), dict[int, np.ndarray]()
        if len(numbers):
            if self._sliced and _is_run(numbers):
                columns = self._slices(int(numbers[0]), int(numbers[-1]) + 1)
            if len(columns) < self._num_to_read:
                files, rows = self._locate(numbers)
                if self._cached:
                    self._take_cached(numbers, files, rows, columns)
                begun, begun_columns = self._take_begun(numbers)
                for placed in self._placed:
                    if placed.field not in columns and placed.number not in begun:
                        begun[placed.number] = placed.begin(files, rows, self._num_helpers)
                # Do this before the wait below, so that helpers go on without being woken again.
                self._begin_placed(len(numbers))
                for placed in self._placed:
                    if placed.field not in columns:
                        leaves[placed.number] = placed.end(begun[placed.number])
                self._gather(files, rows, columns, begun_columns)
                for reader in self._singles:
                    leaves |= reader.columns(numbers, files, rows, self.empty)
                self._begin_decoded()
        for number, each in enumerate(self._catalog.outputs):
            column = None if each.column is None else columns.get(each.column)
            if column is not None and not each.leaf.members:
                leaves[number] = column
            elif number not in leaves:
                leaves[number] = leaf_of(each, columns, len(numbers), self.empty)
        return nests.unflatten(self._catalog.structure, [leaves[n] for n in sorted(leaves)])

    @property
    def reads_runs(self) -> bool:
        """Whether `read_runs` is faster than reading each row."""
        # Members of compound rows, and matches, are not stored next to each other.
        are_plain = not any(c.dtype.names or c.is_matches for c in self._catalog.columns)
        return are_plain and not self._singles and len(self._are_placed) == len(self._filled)

    def expect_runs(self, firsts: np.ndarray, length: int) -> None:
        """Record that `read_runs` will be called; only if `reads_runs` is true."""
        self._check_process()
        for rows in (firsts, firsts + (length - 1)):
            self._ask_for(*self._locate(rows))

    def read_runs(self, firsts: np.ndarray, length: int) -> Any:
        """Return the rows from each of `firsts` on, `length` of them, one run after the other."""
        self._check_process()
        files, rows = self._locate(firsts)
        # A run that continues in the next file is read row by row.
        if files.ndim and (files != self._locate(firsts + (length - 1))[0]).any():
            return self.read((firsts[:, None] + np.arange(length)).ravel())
        placed_of = {placed.number: placed for placed in self._placed}
        leaves = []
        for number, found in enumerate(self._catalog.outputs):
            shape = known_shape(found.spec)
            if number in placed_of:
                placed = placed_of[number]
                output = placed.end(placed.begin(files, rows, self._num_helpers, length), True)
            else:
                output = self.empty((len(firsts), length, *shape), found.spec.dtype)
            leaves.append(output.reshape(-1, *shape))
        return nests.unflatten(self._catalog.structure, leaves)

    def _take_cached(
        self,
        numbers: np.ndarray,
        files: np.ndarray,
        rows: np.ndarray,
        outputs: dict[int, np.ndarray],
    ) -> None:
        """Add the small fields to `outputs`, provided that their files are unchanged."""
        # Cached rows are taken without opening their files, so a change of a file would go
        # unnoticed.
        self._check_files(files)
        for field in self._cached:
            shape, dtype = self._specs[field]
            cache = self._row_caches.get(field)
            if cache is None:
                cache = RowCache(self._plans[field], self._offsets, shape, dtype)
                # Readers in several threads may create a cache at the same time. All use the first
                # one.
                cache = self._row_caches.setdefault(field, cache)
            output = outputs[field] = self.empty((len(numbers), *shape), dtype)
            cache.take(numbers, files, rows, partial(self._decode, field), output)

    def _ask_for(self, files: np.ndarray, rows: np.ndarray) -> None:
        """Have the system begin to read rows whose place in the file is known."""
        for file in np.unique(files).tolist() if files.ndim else (0,):
            own = rows[files == file] if files.ndim else rows
            asked: set[int] = set()
            with self._files.lock:
                descriptor = self._files.descriptor(file)
                for placed in self._placed:
                    if placed.field not in asked:  # a request for one member reads whole rows
                        placed.rows.ask_for(descriptor, file, own)
                    asked.add(placed.field)

    def _begin_placed(self, count: int) -> None:
        """Begin to copy the rows after the next `count` ones in other threads."""
        numbers = self._expected.first(count, skip=count) if self._num_helpers else None
        if numbers is None:
            return
        files, rows = self._locate(numbers)
        copies: dict[int, RowCopies] = {}
        with contextlib.suppress(DataError):  # the error is raised again when the rows are read
            for placed in self._placed:
                copies[placed.number] = placed.begin(files, rows, self._num_helpers)
        self._begun = numbers, copies, {}

    def _begin_decoded(self) -> None:
        """Begin to copy the fields of the same rows that are decoded already."""
        if self._begun is None or not self._announced:
            return
        numbers, _, columns = self._begun
        files, rows = self._locate(numbers)
        for field in self._announced:
            shape, dtype = self._specs[field]
            empty = partial(self.empty, (len(rows), *shape), dtype)
            chunks, within = self._plans[field].locate(files, rows)
            output = self._chunk_cache(field).begin(chunks, within, empty)
            if output is not None:
                columns[field] = chunks, output

    def _take_begun(self, numbers: np.ndarray) -> tuple[dict[int, RowCopies], _Columns]:
        """Return the copies that are under way, if they are of these rows."""
        begun, self._begun = self._begun, None
        return begun[1:] if begun and begun[0].tobytes() == numbers.tobytes() else ({}, {})

    def _gather(
        self,
        files: np.ndarray,
        rows: np.ndarray,
        outputs: dict[int, np.ndarray],
        begun: _Columns,
    ) -> None:
        """Add the fields that are missing in `outputs`, copied from decoded chunks."""
        # The caches count only announced rows. Releasing other rows would make the counts negative,
        # or too low for rows that are still to come.
        are_announced = bool(self._expected)
        for field in self._filled:
            if field in outputs or field in self._are_placed:
                continue
            cache = self._chunk_cache(field)
            if field in begun:
                chunks, outputs[field] = begun[field]
                cache.end()
            else:
                chunks, within = self._plans[field].locate(files, rows)
                shape, dtype = self._specs[field]
                outputs[field] = self.empty((len(rows), *shape), dtype)
                cache.take(chunks, within, outputs[field])
            if are_announced and field in self._announced:
                cache.release(chunks)
        self._expected.drop(len(rows))

    def _locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the file of each example, or the only file, and the rows there."""
        if len(self._starts) == 2:
            return _FIRST, numbers
        files = np.searchsorted(self._offsets, numbers, "right") - 1
        return files, numbers - self._offsets[files]

    def _slices(self, first: int, end: int) -> dict[int, np.ndarray]:
        """Return the rows [first, end) of the fields that are read as slices."""
        shapes = {field: self._specs[field] for field in self._sliced}
        outputs = {f: self.empty((end - first, *s), dtype) for f, (s, dtype) in shapes.items()}
        start = first
        while start < end:
            file = bisect.bisect_right(self._starts, start) - 1
            stop = min(end, self._starts[file + 1])
            for field in self._sliced:
                rows = outputs[field][start - first : stop - first]
                self._read(file, field, start - self._starts[file], rows)
            start = stop
        return outputs

    def _chunk_cache(self, field: int) -> ChunkCache:
        """Return the chunk cache of a field, which is created on first use to save memory."""
        cache = self._chunk_caches.get(field)
        if cache is None:
            plan, (shape, dtype) = self._plans[field], self._specs[field]
            slot_shape = (plan.rows_per_slot, *shape)
            submit = partial(self._submit, field)
            sizes, helpers = (plan.num_chunks, plan.num_slots, slot_shape), self._num_helpers
            cache = self._chunk_caches[field] = ChunkCache(*sizes, dtype, submit, helpers)
        return cache

    def _submit(self, field: int, chunks: ChunkBuffers) -> Future[None]:
        """Begin to decode some chunks."""
        if chunks[0][1].nbytes <= _TINY_CHUNK_BYTES:
            done: Future[None] = Future()
            try:
                self._decode(field, chunks)
            except Exception as error:  # raised when a row of these chunks is read
                done.set_exception(error)
            else:
                done.set_result(None)
            return done
        return self._threads.submit(self._decode, field, chunks)

    def _decode(self, field: int, chunks: ChunkBuffers) -> None:
        """Decode some chunks, in any thread."""
        row_ranges = [self._plans[field].row_range(chunk) for chunk, _ in chunks]
        done = self._decode_in_place(field, row_ranges, [slot for _, slot in chunks])
        row_ranges, chunks = row_ranges[done:], chunks[done:]
        # All are fetched under one lock, because threads that wait for the lock slow each other.
        stored = self._fetch(field, row_ranges)
        for (file, start, stop), (_, slot), content in zip(row_ranges, chunks, stored, strict=True):
            rows = slot[: stop - start]
            if content is None:
                self._read(file, field, start, rows)
                continue
            # A damaged chunk is not left to h5py, which cannot decode it either, but returns a
            # chunk that is too short without an error.
            try:
                content.decode(rows)
            except ValueError as reason:
                raise self._catalog.read_error(reason, file, field, start, stop) from reason

    def _decode_in_place(
        self, field: int, row_ranges: Sequence[tuple[int, int, int]], slots: list[np.ndarray]
    ) -> int:
        """Have compiled code decode the first chunks, all of one file; return their number."""
        file = row_ranges[0][0]
        chunks = self._catalog.files[file].layouts[field].chunks
        if not isinstance(chunks, CompressedChunks):
            return 0
        # Only the look-up needs the lock; decoding uses the bytes of the mapping.
        with self._files.lock:
            mapped = self._files.mapping(file)
        of_file = itertools.takewhile(lambda row_range: row_range[0] == file, row_ranges)
        starts = [start for _, start, _ in of_file]
        return 0 if mapped is None else chunks.decode(mapped, starts, slots[: len(starts)])

    def _fetch(self, field: int, row_ranges: list[tuple[int, int, int]]) -> list[StoredRows | None]:
        """Return chunks as they are stored; ``None`` for chunks that h5py must decode."""
        stored: list[StoredRows | None] = []
        with self._files.lock:
            for file, start, stop in row_ranges:
                if not self._catalog.files[file].layouts[field].is_chunked:
                    stored.append(None)
                    continue
                try:
                    stored.append(self._files.fetch(file, field, start))
                except DataError:
                    raise
                except _READ_ERRORS as reason:
                    raise self._catalog.read_error(reason, file, field, start, stop) from reason
        return stored

    def _read(self, file: int, field: int, start: int, rows: np.ndarray) -> None:
        """Fill `rows` with the rows of a file from row `start` on, in this thread."""
        storage = self._catalog.files[file].layouts[field].storage
        try:
            with self._files.lock:
                if not (storage and storage.read(self._files.descriptor(file), start, rows)):
                    self._files.field(file, field).read(start, rows)
        except DataError:
            raise
        except _READ_ERRORS as reason:
            stop = start + len(rows)
            raise self._catalog.read_error(reason, file, field, start, stop) from reason

    def check(self, block: Block) -> None:
        """Raise DataError if the rows `block`, which were read, must not be used any more."""
        self._check_process()
        self._check_files(self._locate(block)[0])

    def _check_files(self, files: np.ndarray) -> None:
        for file in np.unique(files).tolist() if files.ndim else (0,):
            self._files.check(file)

    def _check_process(self) -> None:
        if (pid := os.getpid()) != self._pid:
            raise DataError(
                f"The iterator was begun in process {self._pid} and is used in {pid}: its threads "
                "and files do not outlive a fork. Begin a new one there with iter(...)."
            )

    def close(self) -> None:
        """End the threads, close the files and forget the chunks."""
        if os.getpid() == self._pid:
            clean_up(self._release)

    def trim(self, is_last: bool) -> None:
        """Release pages of files, and after the last pass also the caches for further passes."""
        self._files.forget_mappings()
        if is_last:
            self._row_caches.clear()
            release_idle_buffers()

    def _release(self) -> None:
        self._begun = None
        # The threads end before the caches are closed, because the next reader gets the memory of
        # the caches, and no task may write to it any more.
        self._threads.close()
        for cache in self._chunk_caches.values():
            cache.close()
        self._files.close()


class _ExpectedRows:
    """Queue of rows that were announced and not read yet."""

    def __init__(self) -> None:
        self._blocks: deque[Block] = deque()
        self._start = 0
        """Number of rows of the first block that were read."""

    def __bool__(self) -> bool:
        return bool(self._blocks)

    def add(self, block: Block) -> None:
        """Append rows."""
        if len(block):
            self._blocks.append(block)

    def first(self, count: int, skip: int) -> Block | None:
        """Return `count` rows after the next `skip` ones; ``None`` if there are fewer."""
        parts: list[Block] = []
        start = self._start + skip
        for block in self._blocks:
            if start >= len(block):
                start -= len(block)
                continue
            part = block[start : start + count]
            # Usually all rows of a batch are in one block, and nothing is copied.
            if len(part) == count and not parts:
                return part
            parts.append(part)
            count, start = count - len(part), 0
            if not count:
                return np.concatenate(parts)
        return None

    def drop(self, count: int) -> None:
        """Remove the next rows, or all if there are fewer."""
        self._start += count
        while self._blocks and self._start >= len(self._blocks[0]):
            self._start -= len(self._blocks.popleft())
        if not self._blocks:
            self._start = 0


def _is_run(numbers: np.ndarray) -> bool:
    """Return whether rows are consecutive, and at least `_MIN_RUN_ROWS`."""
    first, count = int(numbers[0]), len(numbers)
    if count < _MIN_RUN_ROWS or numbers[-1] != first + count - 1:
        return False
    return np.arange(first, first + count).tobytes() == numbers.tobytes()
