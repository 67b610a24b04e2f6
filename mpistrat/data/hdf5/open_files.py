"""Open files of a reader: a limited number at a time, with a check that no file has changed."""

from __future__ import annotations

import errno
import itertools
import math
import operator
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from mpistrat import hdf5
from mpistrat.data.hdf5.catalog import Catalog, FileEntry
from mpistrat.data.hdf5.filters import ChunkDecoder, make_decoder
from mpistrat.data.hdf5.layouts import FilteredChunks
from mpistrat.data.hdf5.types import assign, dtype_of
from mpistrat.errors import DataError
from mpistrat.native import native_library

_T = TypeVar("_T")

_MAX_OPEN_FILES, _MAX_MAPPED_FILES = 256, 4096
"""HDF5 needs 0.6 MiB of memory per open file, but none for a mapped file."""

_SHARE_OF_LIMIT = 2
"""The readers of a process open at most half of the files that it may open."""

_LARGE_ROW_BYTES = 2**20
"""Rows of at least this size are read into their place, which takes h5py longer to prepare."""

_READ_ONLY = os.O_RDONLY | os.O_CLOEXEC

_CHECK_INTERVAL_S = 0.5
"""How often a file that is read is checked for changes."""


class OpenFiles:
    """Files by number; the most recently used ones stay open."""

    def __init__(self, catalog: Catalog, mappings: dict[int, np.ndarray] | None = None) -> None:
        self._catalog = catalog
        self._mappings = {} if mappings is None else mappings
        """The mapped bytes of files by number, which the readers of a source share."""
        self._open: OrderedDict[int, _OpenFile] = OrderedDict()
        self._checked_at: dict[int, float] = {}
        self.lock = threading.Lock()
        """Hold this lock while you use a field, because another thread might close its file."""

    def field(self, file: int, field: int) -> FieldAccess:
        """Return access to a field; the caller must hold `lock`."""
        opened = self._opened(file)
        access = opened.fields[field]
        if access is None:
            column = self._catalog.columns[field]
            try:
                dataset = self.file(file)[column.path]
            except KeyError:
                raise DataError(_changed(self._catalog.files[file].path)) from None
            access = opened.fields[field] = FieldAccess(dataset, column.axis, column.dtype)
        return access

    def fetch(self, file: int, field: int, start: int) -> StoredRows | None:
        """Return the encoded chunks that begin with row `start`; the caller must hold `lock`.

        ``None`` if only h5py can decode them.
        """
        chunks = self._catalog.files[file].layouts[field].chunks
        if isinstance(chunks, FilteredChunks):
            return StoredRows.of_chunk(chunks, *chunks.read(self.descriptor(file), start))
        return self.field(file, field).fetch(start)

    def file(self, file: int) -> Any:
        """Return an open file for HDF5; the caller must hold `lock`."""
        opened = self._opened(file)
        if opened.file is None:
            entry = self._catalog.files[file]
            opened.file = self._with_room(lambda: hdf5.open_file(entry.path, entry.is_live))
        return opened.file

    def descriptor(self, file: int) -> int:
        """Return the descriptor of a file; the caller must hold `lock`."""
        opened = self._opened(file)
        if opened.descriptor is None:
            path = self._catalog.files[file].path
            try:
                opened.descriptor = self._with_room(lambda: os.open(path, _READ_ONLY))
            except PermissionError as reason:
                raise DataError(hdf5.explain_permission(path)) from reason
        return opened.descriptor

    def mapping(self, file: int) -> np.ndarray | None:
        """Return the mapped bytes of a file, for compiled code; the caller must hold `lock`.

        Access to bytes that the file has lost since then raises a signal. ``None`` if the file
        system cannot map files.
        """
        self._opened(file)
        found = self._mappings.get(file)
        if found is None:
            while len(self._mappings) >= _MAX_MAPPED_FILES:
                self._mappings.pop(next(iter(self._mappings)))
            descriptor = self.descriptor(file)
            num_bytes = os.fstat(descriptor).st_size
            try:
                found = native_library().map_file(descriptor, num_bytes)
            except OSError:
                return None
            self._mappings[file] = found
        return found

    def forget_mappings(self) -> None:
        """Unmap all files, because their pages count as memory of the process."""
        with self.lock:
            self._mappings.clear()

    def check(self, file: int) -> None:
        """Check that a file has not changed, at most once per interval; in any thread."""
        now = time.monotonic()
        if now - self._checked_at.get(file, -math.inf) >= _CHECK_INTERVAL_S:
            _check_unchanged(self._catalog.files[file])
            self._checked_at[file] = now

    def _opened(self, number: int) -> _OpenFile:
        opened = self._open.get(number)
        if opened is None:
            self._checked_at.pop(number, None)  # the path may lead to a different file now
        self.check(number)
        if opened is None:
            # All readers of the process share the limit, but a reader can close only its own files.
            while self._open and _num_open.total >= _limit():
                self._close_oldest()
            opened = self._open[number] = _OpenFile(self._catalog.files[number])
        self._open.move_to_end(number)
        return opened

    def _with_room(self, open_it: Callable[[], _T]) -> _T:
        """Return the result of `open_it`; closes the oldest files if too many are open."""
        while True:
            try:
                opened = open_it()
                _num_open.add(1)
                return opened
            except (OSError, DataError) as error:
                reason = getattr(error.__cause__ or error, "errno", None)
                # The program has open files too, so the limit of the system may be reached before
                # the limit of `_limit`.
                if reason not in (errno.EMFILE, errno.ENFILE) or len(self._open) < 2:
                    raise
            self._close_oldest()

    def _close_oldest(self) -> None:
        self._open.popitem(last=False)[1].close()

    def close(self) -> None:
        """Close all files."""
        with self.lock:
            while self._open:
                self._close_oldest()


def _limit() -> int:
    return max(1, min(_MAX_OPEN_FILES, hdf5.max_open_files() // _SHARE_OF_LIMIT))


class _Count:
    """The number of files that all readers of the process have open."""

    def __init__(self) -> None:
        self.total = 0
        self._lock = threading.Lock()

    def add(self, number: int) -> None:
        """Count files that were opened or, with -1, closed."""
        with self._lock:
            self.total += number


_num_open = _Count()


class _OpenFile:
    """A file that is open: in HDF5, by a descriptor, or both."""

    def __init__(self, entry: FileEntry) -> None:
        self.file: Any = None
        self.descriptor: int | None = None
        self.fields: list[FieldAccess | None] = [None] * len(entry.layouts)
        self._entry = entry

    def close(self) -> None:
        if self.file is not None:
            self.fields.clear()
            hdf5.close_file(self._entry.path, self.file, self._entry.is_live)
            _num_open.add(-1)
        if self.descriptor is not None:
            os.close(self.descriptor)
            _num_open.add(-1)


def _check_unchanged(entry: FileEntry) -> None:
    try:
        changed = entry.changed_path()
    except FileNotFoundError as reason:
        raise DataError(
            f"The file {reason.filename} was removed after the dataset was created. Files must "
            "exist until the last epoch has ended."
        ) from None
    except PermissionError as reason:
        where = " for a folder above it"
        raise DataError(hdf5.explain_permission(reason.filename, where)) from reason
    except OSError as reason:
        raise DataError(
            f"The file {reason.filename} can no longer be reached: {reason.strerror}."
        ) from reason
    if changed is not None:
        raise DataError(_changed(changed))


def _changed(path: str) -> str:
    return (
        f"The file {path} has changed since the dataset was created: its size, time of "
        "modification or inode is different. Write to a new name and rename the file, or create "
        "the dataset again."
    )


class FieldAccess:
    """Reads rows of a dataset along an axis as a dtype; one thread at a time may use it."""

    def __init__(self, dataset: Any, axis: int, dtype: np.dtype) -> None:
        self._dataset = dataset
        self._axis = axis
        # They are kept, because each access to these attributes calls HDF5.
        self._shape, self._chunk_shape = dataset.shape, dataset.chunks
        self._dtype = dtype_of(dataset)
        self._identifier = dataset.id
        self._memory_type = hdf5.memory_type(dtype) if dtype.names else None
        is_plain = (
            dataset.chunks is not None
            and hdf5.is_stored_as(dataset.id, self._dtype)
            and hdf5.filters_edge_chunks(dataset)
        )
        self._may_be_left = not hdf5.fills_unwritten(dataset)
        filters = hdf5.filters_of(dataset)
        row_bytes = math.prod(_others(self._shape, axis)) * self._dtype.itemsize
        self._is_large = row_bytes >= _LARGE_ROW_BYTES
        if self._is_large and not filters:  # HDF5 copies such chunks directly into their places
            is_plain = False
        self._decoder = make_decoder(filters) if is_plain else None
        self._chunk_regions = (
            _chunk_regions(_others(self._shape, axis), _others(self._chunk_shape, axis))
            if is_plain
            else []
        )

    def fetch(self, start: int) -> StoredRows | None:
        """Return the encoded chunks that begin with row `start`, or ``None``."""
        # None if only h5py can decode them, or if a chunk was never written, so that h5py must fill
        # it in. If no chunk of the dataset was written, h5py raises MemoryError.
        if self._decoder is None:
            return None
        chunks = []
        for origin, region in self._chunk_regions:
            place = (*origin[: self._axis], start, *origin[self._axis :])
            try:
                filter_mask, content = self._identifier.read_direct_chunk(place)
            except (MemoryError, OSError, RuntimeError, ValueError):
                return None
            chunks.append((region, filter_mask, content))
        return StoredRows(self._decoder, self._dtype, self._chunk_shape, self._axis, chunks)

    def read(self, start: int, rows: np.ndarray) -> None:
        """Fill `rows` with the rows from `start` on, read by h5py."""
        if not rows.size:
            return
        is_direct = self._is_large and not self._axis and self._dtype == rows.dtype
        # HDF5 does not touch elements that were never written and have no fill value.
        if self._memory_type is not None or (is_direct and self._dtype.kind in "iuf"):
            # HDF5 copies only the members that `rows` has, each once.
            place, axis = np.zeros(rows.ndim, np.intp), self._axis
            place[axis] = start
            shape = (*rows.shape[1 : axis + 1], len(rows), *rows.shape[axis + 1 :])
            elements = np.zeros(shape, rows.dtype) if axis else rows
            if not axis and self._may_be_left:
                rows.reshape(-1).view(np.uint8).fill(0)
            space = self._identifier.get_space()
            space.select_hyperslab(tuple(place.tolist()), shape)
            target = hdf5.h5py().h5s.create_simple(shape)
            self._identifier.read(target, space, elements, mtype=self._memory_type)
            if axis:
                rows[...] = np.moveaxis(elements, axis, 0)
            return
        # Slicing is several times faster than read_direct.
        part = (*[slice(None)] * self._axis, slice(start, start + len(rows)))
        assign(rows, np.moveaxis(self._dataset[part], self._axis, 0))


def _others(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]


def _chunk_regions(
    shape: tuple[int, ...], chunk_shape: tuple[int, ...]
) -> list[tuple[tuple[int, ...], _Region]]:
    """Return for each chunk of a row where it begins in the row, and which region it fills."""
    starts = itertools.product(*map(range, itertools.repeat(0), shape, chunk_shape))
    regions = []
    for start in starts:
        ends = map(operator.add, start, chunk_shape)
        regions.append((start, (slice(None), *map(slice, start, ends))))
    return regions


_Region = tuple[slice, ...]


@dataclass(frozen=True)
class StoredRows:
    """Rows as they are stored: the encoded chunks that begin with the same row."""

    decoder: ChunkDecoder
    dtype: np.dtype
    """The stored dtype, perhaps in foreign byte order."""
    chunk_shape: tuple[int, ...]
    axis: int
    chunks: Sequence[tuple[_Region, int, bytes]]
    """For each chunk, the region of the rows that it fills, its filter mask and its content."""

    @classmethod
    def of_chunk(cls, chunks: FilteredChunks, filter_mask: int, content: bytes) -> StoredRows:
        """Return whole rows, which are in one chunk."""
        of_rows = [((slice(None),), filter_mask, content)]
        return cls(chunks.decoder, chunks.dtype, chunks.chunk_shape, 0, of_rows)

    def decode(self, rows: np.ndarray) -> None:
        """Fill `rows`; raise ValueError if a chunk is damaged."""
        num_bytes = math.prod(self.chunk_shape) * self.dtype.itemsize
        for region, filter_mask, content in self.chunks:
            decoded = self.decoder.decode(content, filter_mask, num_bytes)
            elements = np.frombuffer(decoded, self.dtype).reshape(self.chunk_shape)
            elements = np.moveaxis(elements, self.axis, 0) if self.axis else elements
            target = rows[region]
            # Chunks extend beyond the edges of the dataset.
            assign(target, elements[tuple(map(slice, target.shape))])
