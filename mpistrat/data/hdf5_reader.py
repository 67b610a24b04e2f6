"""Rows of HDF5 files: whole chunks decoded by threads, ahead of their use."""

from __future__ import annotations

import bisect
import os
from collections.abc import Sequence
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
        specs = [layout.spec for layout in catalog.files[0].layouts]
        self._specs = [(spec.known_shape, spec.dtype) for spec in specs]
        self._filled = [field for field, size in enumerate(catalog.row_sizes) if size]
        self._chunked = [
            field
            for field in self._filled
            if any(file.layouts[field].is_chunked for file in catalog.files)
        ]
        # In disorder data without chunks are read in blocks, which are treated like chunks.
        self._announced = self._filled if window_rows else self._chunked
        self._sliced = [field for field in self._filled if field not in self._announced]
        self._stores: dict[int, ChunkStore] = {}
        self._num_announced = 0
        widest = self._plans[catalog.widest]
        if window_rows or self._chunked:
            self.lookahead_rows = max(widest.num_slots * widest.rows_per_slot * 4 // 9, 1)
        else:  # nothing to decode, and runs are read whole
            self.lookahead_rows = 0

    def expect(self, block: Block) -> None:
        """Note that the rows `block` are going to be read, after those noted before. Local."""
        self._check_process()
        files, rows = self._locate(np.asarray(block, np.int64))
        for field in self._announced:
            self._store(field).announce(self._plans[field].locate(files, rows)[0])
        self._num_announced += len(rows)

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
        outputs: dict[int, np.ndarray] = {}
        if len(numbers):
            if self._sliced and _is_run(numbers):
                outputs = self._slices(numbers, self._sliced)
            if len(outputs) < len(self._filled):
                self._gather(numbers, outputs)
        leaves = []
        for field, (shape, dtype) in enumerate(self._specs):
            leaf = outputs.get(field)
            leaves.append(np.empty((len(numbers), *shape), dtype) if leaf is None else leaf)
        return nests.unflatten(self._catalog.structure, leaves)

    def _gather(self, numbers: np.ndarray, outputs: dict[int, np.ndarray]) -> None:
        """Add the fields that are missing in `outputs`, picked from their chunks."""
        files, rows = self._locate(numbers)
        are_announced = self._num_announced > 0
        for field in self._filled:
            if field in outputs:
                continue
            chunks, within = self._plans[field].locate(files, rows)
            shape, dtype = self._specs[field]
            outputs[field] = np.empty((len(rows), *shape), dtype)
            store = self._store(field)
            store.take(chunks, within, outputs[field])
            if are_announced and field in self._announced:
                store.release(chunks)
        self._num_announced -= len(rows) * are_announced

    def _locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the file of each example, or of all, and their rows there."""
        if len(self._starts) == 2:
            return np.zeros((), np.intp), numbers
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

    def _store(self, field: int) -> ChunkStore:
        """Return the decoded chunks of a field; they take memory from the first use on."""
        store = self._stores.get(field)
        if store is None:
            plan, (shape, dtype) = self._plans[field], self._specs[field]
            slot_shape = (plan.rows_per_slot, *shape)
            load = partial(self._begin_to_load, field)
            store = self._stores[field] = ChunkStore(
                plan.num_chunks, plan.num_slots, slot_shape, dtype, load
            )
        return store

    def _begin_to_load(self, field: int, chunks: Sequence[tuple[int, np.ndarray]]) -> Future[None]:
        return self._pool.submit(self._load_all, field, chunks)

    def _load_all(self, field: int, chunks: Sequence[tuple[int, np.ndarray]]) -> None:
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
