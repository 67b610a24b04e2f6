"""Rows of HDF5 files: whole chunks decoded by threads, ahead of their use."""

from __future__ import annotations

import bisect
import os
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.data.hdf5.catalog import Catalog
from mpistrat.data.hdf5.chunk_cache import ChunkCache, RowCache
from mpistrat.data.hdf5.chunk_plan import plan_fields
from mpistrat.data.hdf5.files import OpenFiles, StoredRows
from mpistrat.data.order import Block
from mpistrat.errors import DataError
from mpistrat.settings import environment, settings
from mpistrat.system.cpu import num_cores

__all__ = ["Hdf5Reader", "num_decoding_threads"]

_MAX_THREADS = 8
"""Python's own part of reading a chunk keeps more from helping."""

_RANKS_OF_NODE = (
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALNRANKS",
    "SLURM_STEP_TASKS_PER_NODE",
    "PALS_LOCAL_SIZE",
)
"""Variables in which launchers tell how many ranks share this node."""


def num_decoding_threads() -> int:
    """Return the number of threads of a reader. Local.

    ``MPISTRAT_DATA_THREADS``; by default this rank's share of the cores, up to eight.
    """
    chosen = settings().data_threads
    if chosen is not None:
        return chosen
    cores = num_cores()
    if cores == os.cpu_count():  # else the launcher has given this rank cores of its own
        cores //= _ranks_of_node()
    return max(1, min(cores, _MAX_THREADS))


def _ranks_of_node() -> int:
    variables = environment()
    for name in _RANKS_OF_NODE:
        digits = re.match(r"\d+", variables.get(name, ""))  # of Slurm's "4(x2),3" the first
        if digits:
            return max(int(digits[0]), 1)
    return 1


_READ_ERRORS = (OSError, KeyError, TypeError, ValueError, RuntimeError)
"""What h5py raises."""

_TINY_CHUNK_BYTES = 2**14
"""Chunks of at most that size are decoded where they are announced: most of that is Python's work,
of which threads get no more done, and handing it over takes longer."""

_MIN_RUN_ROWS = 8
"""Fewer rows in a row may still be a part of disorder: then a block is read and kept."""


class Hdf5Reader:
    """Reads examples by their numbers, in any order.

    Whole chunks are decoded, by threads and outside of HDF5 where their filters are known, in the
    order in which `expect` has heard of them. Runs of rows of data without chunks are read by
    slices. Small fields are read once and kept.

    Parameters
    ----------
    catalog : Catalog
    window_rows : int
        How many rows are mixed at a time.
    kept : dict from int to RowCache
        Small fields, by their numbers, as far as earlier readers of the same files have needed
        them. The others are added.
    """

    def __init__(self, catalog: Catalog, window_rows: int, kept: dict[int, RowCache]) -> None:
        self._catalog = catalog
        self._offsets = catalog.offsets
        self._starts: list[int] = self._offsets.tolist()
        self._files = OpenFiles(catalog)
        self._pool: ThreadPoolExecutor | None = None
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
        picked = [field for field in self._filled if not self._plans[field].is_kept]
        self._kept = [field for field in self._filled if field not in picked]
        self._kept_rows = kept
        # In disorder data without chunks are read in blocks, which are treated like chunks.
        self._announced = [field for field in picked if window_rows or field in self._chunked]
        self._sliced = [field for field in picked if field not in self._announced]
        self._stores: dict[int, ChunkCache] = {}
        self._num_announced = 0
        widest = self._plans[catalog.widest]
        if self._announced:
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
                outputs = self._slices(int(numbers[0]), int(numbers[-1]) + 1)
            if len(outputs) < len(self._filled):
                files, rows = self._locate(numbers)
                if self._kept:
                    self._take_kept(numbers, files, rows, outputs)
                self._gather(files, rows, outputs)
        leaves = []
        for field, (shape, dtype) in enumerate(self._specs):
            leaf = outputs.get(field)
            leaves.append(np.empty((len(numbers), *shape), dtype) if leaf is None else leaf)
        return nests.unflatten(self._catalog.structure, leaves)

    def _take_kept(
        self,
        numbers: np.ndarray,
        files: np.ndarray,
        rows: np.ndarray,
        outputs: dict[int, np.ndarray],
    ) -> None:
        """Add the small fields to `outputs`, provided that their files are what they were."""
        for file in np.unique(files).tolist() if files.ndim else (0,):
            self._files.check(file)
        for field in self._kept:
            kept = self._kept_rows.get(field)
            if kept is None:
                kept = RowCache(self._plans[field], self._offsets, *self._specs[field])
                kept = self._kept_rows.setdefault(field, kept)
            outputs[field] = kept.take(numbers, files, rows, partial(self._load_all, field))

    def _gather(self, files: np.ndarray, rows: np.ndarray, outputs: dict[int, np.ndarray]) -> None:
        """Add the fields that are missing in `outputs`, picked from what was decoded."""
        are_announced = self._num_announced > 0
        for field in self._filled:
            if field in outputs:
                continue
            shape, dtype = self._specs[field]
            output = outputs[field] = np.empty((len(rows), *shape), dtype)
            plan = self._plans[field]
            chunks, within = plan.locate(files, rows)
            store = self._store(field)
            store.take(chunks, within, output)
            if are_announced and field in self._announced:
                store.release(chunks)
        self._num_announced -= len(rows) * are_announced

    def _locate(self, numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the file of each example, or of all, and their rows there."""
        if len(self._starts) == 2:
            return np.zeros((), np.intp), numbers
        files = np.searchsorted(self._offsets, numbers, "right") - 1
        return files, numbers - self._offsets[files]

    def _slices(self, first: int, end: int) -> dict[int, np.ndarray]:
        """Return the rows [first, end) of the fields that are read by slices."""
        outputs = {}
        for field in self._sliced:
            shape, dtype = self._specs[field]
            outputs[field] = np.empty((end - first, *shape), dtype)
        start = first
        while start < end:
            file = bisect.bisect_right(self._starts, start) - 1
            stop = min(end, self._starts[file + 1])
            for field in self._sliced:
                rows = outputs[field][start - first : stop - first]
                self._read(file, field, start - self._starts[file], rows)
            start = stop
        return outputs

    def _store(self, field: int) -> ChunkCache:
        """Return the decoded chunks of a field; they take memory from the first use on."""
        store = self._stores.get(field)
        if store is None:
            plan, (shape, dtype) = self._plans[field], self._specs[field]
            slot_shape = (plan.rows_per_slot, *shape)
            load = partial(self._begin_to_load, field)
            store = self._stores[field] = ChunkCache(
                plan.num_chunks, plan.num_slots, slot_shape, dtype, load
            )
        return store

    def _begin_to_load(self, field: int, chunks: Sequence[tuple[int, np.ndarray]]) -> Future[None]:
        if chunks[0][1].nbytes <= _TINY_CHUNK_BYTES:
            done: Future[None] = Future()
            try:
                self._load_all(field, chunks)
            except Exception as error:  # to be raised where a row of them is read
                done.set_exception(error)
            else:
                done.set_result(None)
            return done
        if self._pool is None:
            self._pool = ThreadPoolExecutor(num_decoding_threads(), "mpistrat-decode")
        return self._pool.submit(self._load_all, field, chunks)

    def _load_all(self, field: int, chunks: Sequence[tuple[int, np.ndarray]]) -> None:
        """Fill the slots of some chunks. For any thread."""
        extents = [self._plans[field].extent(chunk) for chunk, _ in chunks]
        # Together, because threads that wait for the lock stand in each other's way.
        stored = self._fetch(field, extents)
        for (file, start, stop), (_, slot), content in zip(extents, chunks, stored, strict=True):
            rows = slot[: stop - start]
            if content is None or not content.decode(rows):
                self._read(file, field, start, rows)

    def _fetch(self, field: int, extents: list[tuple[int, int, int]]) -> list[StoredRows | None]:
        """Return chunks as they are stored; ``None`` for those that h5py has to decode."""
        stored: list[StoredRows | None] = []
        with self._files.lock:
            for file, start, stop in extents:
                if not self._catalog.files[file].layouts[field].is_chunked:
                    stored.append(None)
                    continue
                try:
                    stored.append(self._files.field(file, field).fetch(start))
                except DataError:
                    raise
                except _READ_ERRORS as reason:
                    raise self._named(reason, file, field, start, stop) from reason
        return stored

    def _read(self, file: int, field: int, start: int, rows: np.ndarray) -> None:
        """Fill `rows`, which begin with row `start` of a file, without the threads' help."""
        extent = self._catalog.files[file].layouts[field].extent
        try:
            with self._files.lock:
                if not (extent and extent.read(self._files.descriptor(file), start, rows)):
                    self._files.field(file, field).read(start, rows)
        except DataError:
            raise
        except _READ_ERRORS as reason:
            raise self._named(reason, file, field, start, start + len(rows)) from reason

    def _named(self, reason: Exception, file: int, field: int, start: int, stop: int) -> DataError:
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
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
            for store in self._stores.values():
                store.close()
            self._files.close()


def _is_run(numbers: np.ndarray) -> bool:
    first, count = int(numbers[0]), len(numbers)
    if count < _MIN_RUN_ROWS or numbers[-1] != first + count - 1:
        return False
    return np.arange(first, first + count).tobytes() == numbers.tobytes()
