"""Rows of HDF5 files: whole chunks decoded by threads, ahead of their use."""

from __future__ import annotations

import bisect
import os
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.arrays import native
from mpistrat.data.chunk_store import ChunkStore
from mpistrat.data.field_plan import plan_fields
from mpistrat.data.hdf5_catalog import Catalog
from mpistrat.data.open_files import OpenFiles
from mpistrat.data.order import Block
from mpistrat.data.threads import num_decoding_threads
from mpistrat.errors import DataError

__all__ = ["Hdf5Reader"]

_PIECE_ROWS = 256
"""Announced rows are given up in pieces of so many, once they have been read."""

_READ_ERRORS = (OSError, KeyError, TypeError, ValueError, RuntimeError)
"""What h5py raises."""

_MIN_RUN_ROWS = 8
"""Fewer rows in a row may still be a part of disorder: then a block is read and kept."""


class Hdf5Reader:
    """Reads examples by their numbers, in any order.

    Whole chunks are decoded, by threads and outside of HDF5 where their filters are known, in the
    order in which `expect` has heard of them. Runs of rows of data without chunks are read by
    slices.

    Parameters
    ----------
    catalog : Catalog
    window_rows : int
        How many rows are mixed at a time.
    """

    def __init__(self, catalog: Catalog, window_rows: int) -> None:
        self._catalog = catalog
        self._offsets = catalog.offsets
        self._starts: list[int] = self._offsets.tolist()
        self._files = OpenFiles(catalog)
        self._pool = ThreadPoolExecutor(num_decoding_threads(), "mpistrat-decode")
        self._pid = os.getpid()
        self._plans = plan_fields(catalog, window_rows)
        self._row_sizes = catalog.row_sizes
        self._all = list(range(len(self._row_sizes)))
        self._empty = [field for field, size in enumerate(self._row_sizes) if not size]
        self._filled = [field for field, size in enumerate(self._row_sizes) if size]
        self._chunked = [
            field
            for field in self._filled
            if any(file.layouts[field].is_chunked for file in catalog.files)
        ]
        self._unchunked = [field for field in self._filled if field not in self._chunked]
        self._stores: dict[int, ChunkStore] = {}
        # Announced pieces: how many rows, and for each field with chunks in use, which.
        self._expected: deque[tuple[int, dict[int, list[int]]]] = deque()
        self._num_read = 0
        widest = self._plans[catalog.widest]
        if window_rows or self._chunked:
            self.lookahead_rows = max(widest.num_slots * widest.rows_per_slot * 4 // 9, 1)
        else:  # nothing to decode, and runs are read whole
            self.lookahead_rows = 0

    def expect(self, block: Block) -> None:
        """Note that the rows `block` are going to be read, after those noted before. Local."""
        self._check_process()
        numbers = np.asarray(block, np.int64)
        for first in range(0, len(numbers), _PIECE_ROWS):
            piece = numbers[first : first + _PIECE_ROWS]
            by_chunks = self._sliced_and_gathered(piece)[1]
            files, rows = self._locate(piece)
            needs: dict[int, list[int]] = {}
            for field in by_chunks:
                chunks, _ = self._plans[field].locate(files, rows)
                needs[field] = list(dict.fromkeys(chunks.tolist()))
                self._store(field).announce(needs[field])
            self._expected.append((len(piece), needs))

    def read(self, block: Block) -> Any:
        """Return the examples `block`, as a nest of arrays of shape ``(len(block), *shape)``.

        Local.

        Raises
        ------
        DataError
            If a file has vanished or changed, or cannot be decoded.
        """
        self._check_process()
        numbers = np.asarray(block, np.int64)
        by_slices, by_chunks = self._sliced_and_gathered(numbers)
        outputs = self._slices(numbers, by_slices) if by_slices else {}
        if by_chunks:
            files, rows = self._locate(numbers)
            for field in by_chunks:
                outputs[field] = self._gathered(field, files, rows)
        for field in self._all if not len(numbers) else self._empty:
            if field not in outputs:
                spec = self._catalog.files[0].layouts[field].spec
                outputs[field] = np.empty((len(numbers), *spec.known_shape), spec.dtype)
        self._release(len(numbers))
        return nests.unflatten(self._catalog.structure, map(outputs.__getitem__, sorted(outputs)))

    def _sliced_and_gathered(self, numbers: np.ndarray) -> tuple[list[int], list[int]]:
        """Return the fields to read by slices, and those to pick from chunks."""
        if not len(numbers):
            return [], []
        is_run = _is_run(numbers)
        return (self._unchunked, self._chunked) if is_run else ([], self._filled)

    def _locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the file of each example, and its row there."""
        files = np.searchsorted(self._offsets, numbers, "right") - 1
        return files, numbers - self._offsets[files]

    def _slices(self, numbers: np.ndarray, fields: list[int]) -> dict[int, np.ndarray]:
        """Return a run of rows of some fields, from each file one slice."""
        first, end = int(numbers[0]), int(numbers[-1]) + 1
        parts: list[dict[int, np.ndarray]] = []
        while first < end:
            file = bisect.bisect_right(self._starts, first) - 1
            stop = min(end, self._starts[file + 1])
            bounds = (first - self._starts[file], stop - self._starts[file])
            parts.append({field: self._slice(file, field, *bounds) for field in fields})
            first = stop
        if len(parts) == 1:
            return parts[0]
        return {field: np.concatenate([part[field] for part in parts]) for field in fields}

    def _slice(self, file: int, field: int, start: int, stop: int) -> np.ndarray:
        try:
            with self._files.lock:
                return native(self._files.field(file, field).slice(start, stop))
        except DataError:
            raise
        except _READ_ERRORS as reason:
            raise self._named(reason, file, field, start, stop) from reason

    def _gathered(self, field: int, files: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Return rows of one field, picked from its chunks."""
        spec = self._catalog.files[0].layouts[field].spec
        output = np.empty((len(rows), *spec.known_shape), spec.dtype)
        self._store(field).take(*self._plans[field].locate(files, rows), output)
        return output

    def _store(self, field: int) -> ChunkStore:
        """Return the decoded chunks of a field; they take memory from the first use on."""
        store = self._stores.get(field)
        if store is None:
            plan, spec = self._plans[field], self._catalog.files[0].layouts[field].spec
            shape = (plan.rows_per_slot, *spec.known_shape)
            load = partial(self._begin_to_load, field)
            store = self._stores[field] = ChunkStore(
                plan.num_chunks, plan.num_slots, shape, spec.dtype, load
            )
        return store

    def _begin_to_load(self, field: int, chunks: list[tuple[int, np.ndarray]]) -> Future[None]:
        return self._pool.submit(self._load_all, field, chunks)

    def _load_all(self, field: int, chunks: list[tuple[int, np.ndarray]]) -> None:
        """Fill the slots of some chunks. Runs in a thread of the pool."""
        for chunk, slot in chunks:
            self._load(field, chunk, slot)

    def _load(self, field: int, chunk: int, slot: np.ndarray) -> None:
        """Fill `slot` with a chunk."""
        file, start, stop = self._plans[field].extent(chunk)
        rows = slot[: stop - start]
        try:
            with self._files.lock:
                stored = self._files.field(file, field).fetch(start)
            if stored is None or not stored.decode(rows):
                with self._files.lock:
                    self._files.field(file, field).read(start, rows)
        except DataError:
            raise
        except _READ_ERRORS as reason:
            raise self._named(reason, file, field, start, stop) from reason

    def _named(
        self, reason: Exception, file: int, field: int, start: int, stop: int
    ) -> DataError:
        """Return the error that says where h5py has raised `reason`."""
        return DataError(
            f"Rows {start} to {stop - 1} of the field {self._catalog.names[field]!r} of "
            f"{self._catalog.files[file].path} cannot be read: {reason}. The file is damaged, "
            "or it changed after the data set was made."
        )

    def _release(self, num_rows: int) -> None:
        """Give up the announced pieces that have been read whole."""
        self._num_read += num_rows
        while self._expected and self._expected[0][0] <= self._num_read:
            num_expected, needs = self._expected.popleft()
            self._num_read -= num_expected
            for field, chunks in needs.items():
                self._store(field).release(chunks)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise DataError(
                f"The iterator was begun in process {self._pid} and is used in {os.getpid()}: "
                "its threads and files do not outlive a fork. Begin a new one there with iter(...)."
            )

    def close(self) -> None:
        """End the threads, close the files and forget the chunks. Local."""
        if os.getpid() == self._pid:
            self._pool.shutdown(cancel_futures=True)
            for store in self._stores.values():
                store.close()
            self._files.close()


def _is_run(numbers: np.ndarray) -> bool:
    if len(numbers) < _MIN_RUN_ROWS or numbers[-1] - numbers[0] != len(numbers) - 1:
        return False
    return bool((numbers[1:] - numbers[:-1] == 1).all())
