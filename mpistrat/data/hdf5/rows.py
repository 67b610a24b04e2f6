"""Rows whose place in their file is known: each is copied once, from the file into the batch.

Contiguous datasets, and chunks of whole rows without filters, need neither HDF5 nor a cache: the
system has them in memory, or reads them from the disk ahead of time on request.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.data.hdf5.catalog import Catalog
from mpistrat.data.hdf5.layouts import Storage
from mpistrat.data.hdf5.open_files import OpenFiles
from mpistrat.data.spec import known_shape
from mpistrat.native import native_library


def is_placed(catalog: Catalog, field: int) -> bool:
    """Return whether compiled code can read the rows of a field by their place in each file."""
    storages = [file.layouts[field].storage for file in catalog.files]
    is_known = all(storage is not None and storage.dtype.isnative for storage in storages)
    return is_known and native_library() is not None


def lies_in_one_piece(catalog: Catalog, field: int) -> bool:
    """Return whether consecutive rows of a placed field can be read in one call per file."""
    # For such rows a mapping is slower, because of its page tables.
    if any(each.column == field and each.leaf.members for each in catalog.outputs):
        return False
    storages = [file.layouts[field].storage for file in catalog.files]
    return all(storage is not None and storage.is_contiguous for storage in storages)


Rows = tuple[np.ndarray, np.ndarray | None, np.ndarray]
"""Numbers of rows, or of the first rows of runs, their places in the output, and the output."""


def _rows_of_runs(firsts: np.ndarray, places: np.ndarray | None, output: np.ndarray) -> Rows:
    """Return the rows of runs, their places, and the output of shape ``(rows, *shape)``."""
    steps = np.arange(output.shape[1])
    places = np.arange(len(firsts)) if places is None else places
    rows = (firsts[:, None] + steps).ravel()
    row_places = (places[:, None] * len(steps) + steps).ravel()
    return rows, row_places, output.reshape(-1, *output.shape[2:])


@dataclass
class RowCopies:
    """Copies of rows of one field that are under way."""

    output: np.ndarray
    parts: list[tuple[list[Any] | None, int, np.ndarray, np.ndarray | None]]
    """For each file: the copies to end, its number, the rows there, and their places."""


class PlacedField:
    """One column of all files, or a member of it, read by the places of the rows."""

    def __init__(self, catalog: Catalog, field: int, members: tuple[str, ...] = ()) -> None:
        self._storages = [file.layouts[field].storage for file in catalog.files]
        self._row_bytes = catalog.row_sizes[field]
        self._begins = [0] * len(catalog.files)
        """The offset of the member in a row, which may differ between files."""
        if members:
            dtypes = [each.dtype for each in self._storages if each is not None]
            places = [_place_of(dtype, members) for dtype in dtypes]
            self._begins = [begin for begin, _ in places]
            self._row_bytes = places[0][1]
        self._library = native_library()
        self._num_rows = [file.num_rows for file in catalog.files]
        self._block_rows = min(file.layouts[field].rows_per_chunk for file in catalog.files)
        self._asked_for: list[np.ndarray | None] = [None] * len(catalog.files)
        """For each file, the blocks that were already requested from the system."""

    def begin(
        self,
        mapped: np.ndarray,
        file: int,
        rows: np.ndarray,
        places: np.ndarray | None,
        output: np.ndarray,
        num_helpers: int,
    ) -> list[Any]:
        """Begin to fill the rows `places` of `output`, by default all, with rows of a mapped file.

        Helper threads begin the copy, and `end` takes the returned list. The arrays must not change
        until then.
        """
        offsets = self._storage(file).offsets(rows)
        if self._begins[file]:
            offsets += self._begins[file]
        return [self._library.begin_copy(mapped, offsets, places, output, num_helpers)]

    def end(self, copies: list[Any]) -> None:
        """Do the rest of the copies; raise OSError if the file has become shorter."""
        # Access to the part of a mapping that the file has lost raises SIGBUS. Compiled code
        # catches it (native/rows.c) and returns false.
        if not all(map(self._library.end_copy, copies)):
            raise OSError("the file has become shorter, or its disk fails")

    def begin_runs(
        self,
        mapped: np.ndarray,
        file: int,
        firsts: np.ndarray,
        places: np.ndarray | None,
        output: np.ndarray,
        num_helpers: int,
    ) -> list[Any]:
        """Begin to fill `output`, of shape ``(runs, length, *shape)``, with runs of rows."""
        # A run that crosses the end of a chunk continues at a different place in the file, so it is
        # copied row by row.
        are_whole = self._storage(file).are_in_one_piece(firsts, output.shape[1])
        if are_whole.all():
            return self.begin(mapped, file, firsts, places, output, num_helpers)
        places = np.arange(len(firsts)) if places is None else places
        rest = _rows_of_runs(firsts[~are_whole], places[~are_whole], output)
        copies = self.begin(mapped, file, *rest, num_helpers)
        if are_whole.any():
            whole = firsts[are_whole], places[are_whole], output
            copies += self.begin(mapped, file, *whole, num_helpers)
        return copies

    def _storage(self, file: int) -> Storage:
        storage = self._storages[file]
        if storage is None:
            raise RuntimeError("the place of these rows is not known")
        return storage

    def read_slowly(
        self,
        descriptor: int,
        file: int,
        rows: np.ndarray,
        places: np.ndarray | None,
        output: np.ndarray,
    ) -> None:
        """Fill `output` in this call, from a file that cannot be mapped."""
        storage = self._storage(file)
        flat = output.view(np.uint8).reshape(len(output), -1)
        offsets = (storage.offsets(rows) + self._begins[file]).tolist()
        targets = range(len(rows)) if places is None else places.tolist()
        for offset, target in zip(offsets, targets, strict=True):
            if os.preadv(descriptor, [flat[target].data], offset) != self._row_bytes:
                raise OSError("the file has become shorter")

    def ask_for(self, descriptor: int, file: int, rows: np.ndarray) -> None:
        """Have the system begin to read the blocks of `rows`, each block once."""
        storage = self._storages[file]
        if storage is None:
            return
        blocks = rows // self._block_rows
        asked_for = self._asked_for[file]
        if asked_for is None:
            num_blocks = self._num_rows[file] // self._block_rows + 1
            asked_for = self._asked_for[file] = np.zeros(num_blocks, np.bool_)
        new = blocks[~asked_for[blocks]]
        if not len(new):
            return
        asked_for[new] = True
        new = np.flatnonzero(np.bincount(new))
        offsets = storage.offsets(new * self._block_rows)
        self._library.ask_for(descriptor, offsets, self._block_rows * storage.row_bytes)


def _place_of(dtype: np.dtype, members: tuple[str, ...]) -> tuple[int, int]:
    """Return the offset of a member in compound rows, and its size."""
    begin = 0
    for name in members:
        if dtype.fields is None:
            raise RuntimeError("the stored type has no such member")
        dtype, offset = dtype.fields[name][:2]
        begin += offset
    return begin, dtype.itemsize


class PlacedLeaf:
    """A leaf of the examples whose rows are copied from their place."""

    def __init__(
        self,
        number: int,
        field: int,
        members: tuple[str, ...],
        catalog: Catalog,
        files: OpenFiles,
        empty: Callable[..., np.ndarray],
    ) -> None:
        self.number, self.field = number, field
        self.rows = PlacedField(catalog, field, members)
        self._catalog, self._files, self._empty = catalog, files, empty
        spec = catalog.outputs[number].spec
        self._shape, self._dtype = known_shape(spec), spec.dtype

    def begin(
        self, files: np.ndarray, rows: np.ndarray, num_helpers: int, *length: int
    ) -> RowCopies:
        """Begin to copy rows, or, with a `length`, runs that start at `rows`."""
        begin = self.rows.begin_runs if length else self.rows.begin
        output = self._empty((len(rows), *length, *self._shape), self._dtype)
        parts = []
        for file in np.unique(files).tolist() if files.ndim else (0,):
            places = None if not files.ndim else np.flatnonzero(files == file)
            own = rows if places is None else rows[places]
            # The lock is needed only to look up the mapping. The array keeps it alive while the
            # rows are copied.
            with self._files.lock:
                mapped = self._files.mapping(file)
            copy = None
            if mapped is not None:
                copy = begin(mapped, file, own, places, output, num_helpers)
            parts.append((copy, file, own, places))
        return RowCopies(output, parts)

    def end(self, copies: RowCopies, are_runs: bool = False) -> np.ndarray:
        """Return the rows whose copies were begun."""
        output = copies.output
        for copy, file, own, places in copies.parts:
            try:
                if copy is not None:
                    self.rows.end(copy)
                    continue
                rows_to = (own, places, output)
                rows_to = _rows_of_runs(*rows_to) if are_runs else rows_to
                with self._files.lock:  # the file cannot be mapped
                    self.rows.read_slowly(self._files.descriptor(file), file, *rows_to)
            except OSError as reason:
                first, last = int(own.min()), int(own.max())
                error = self._catalog.read_error(reason, file, self.field, first, last + 1)
                raise error from reason
        return output
