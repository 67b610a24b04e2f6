"""Rows whose place in their file is known: each is copied once, from the file into the batch.

Contiguous data sets, and chunks of whole rows that no filter has changed, need neither HDF5 nor a
cache: the system has them in memory, or reads them from the disk when it is asked ahead of time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from mpistrat.data.hdf5.catalog import Catalog
from mpistrat.data.hdf5.storage import Storage
from mpistrat.native import native_library
from mpistrat.sharding import cut

__all__ = ["PlacedField", "is_placed", "rows_of_runs"]

_BYTES_PER_THREAD = 2**20
"""To hand less to another thread takes longer than to copy it."""

_MAX_PARTS = 8


def is_placed(catalog: Catalog, field: int) -> bool:
    """Return whether compiled code can read the rows of a field, by their place in each file."""
    storages = [file.layouts[field].storage for file in catalog.files]
    is_known = all(storage is not None and storage.dtype.isnative for storage in storages)
    return is_known and native_library() is not None


Rows = tuple[np.ndarray, np.ndarray | None, np.ndarray]
"""Numbers of rows, or of the first ones of runs, their places, and the output."""


def rows_of_runs(firsts: np.ndarray, places: np.ndarray | None, output: np.ndarray) -> Rows:
    """Return the rows of runs, their places, and the output of shape ``(rows, *shape)``."""
    steps = np.arange(output.shape[1])
    places = np.arange(len(firsts)) if places is None else places
    rows = (firsts[:, None] + steps).ravel()
    row_places = (places[:, None] * len(steps) + steps).ravel()
    return rows, row_places, output.reshape(-1, *output.shape[2:])


class PlacedField:
    """One column of all files, or a member of it, read by the places of its rows."""

    def __init__(self, catalog: Catalog, field: int, members: tuple[str, ...] = ()) -> None:
        self._storages = [file.layouts[field].storage for file in catalog.files]
        self._row_bytes = catalog.row_sizes[field]
        self._begins = [0] * len(catalog.files)
        """Where the member begins in a row, which each file may have elsewhere."""
        if members:
            dtypes = [each.dtype for each in self._storages if each is not None]
            places = [_place_of(dtype, members) for dtype in dtypes]
            self._begins = [begin for begin, _ in places]
            self._row_bytes = places[0][1]
        self._library = native_library()
        self._num_rows = [file.num_rows for file in catalog.files]
        self._block_rows = min(file.layouts[field].rows_per_chunk for file in catalog.files)
        self._asked_for: list[np.ndarray | None] = [None] * len(catalog.files)
        """Of each file its blocks that the system has been asked for."""

    def read(
        self,
        mapped: np.ndarray,
        file: int,
        rows: np.ndarray,
        places: np.ndarray | None,
        output: np.ndarray,
        run: Callable[[Sequence[Callable[[], None]]], None],
    ) -> None:
        """Fill the rows `places` of `output`, by default all, with `rows` of a mapped file.

        Raises OSError where the file has become shorter. `run` does tasks in several threads.
        """
        offsets = self._storage(file).offsets(rows) + self._begins[file]
        num_bytes = offsets.size * (output.nbytes // max(len(output), 1))
        num_parts = min(max(num_bytes // _BYTES_PER_THREAD, 1), _MAX_PARTS)
        length = -(-offsets.size // num_parts)
        run(
            [
                partial(self._fill, mapped, offsets, places, output, part)
                for part in cut(offsets.size, length)
            ]
        )

    def read_runs(
        self,
        mapped: np.ndarray,
        file: int,
        firsts: np.ndarray,
        places: np.ndarray | None,
        output: np.ndarray,
        run: Callable[[Sequence[Callable[[], None]]], None],
    ) -> None:
        """Fill `output` as `read` does, of shape ``(runs, length, *shape)``, with runs of rows."""
        are_whole = self._storage(file).are_in_one_piece(firsts, output.shape[1])
        if are_whole.all():
            self.read(mapped, file, firsts, places, output, run)
            return
        places = np.arange(len(firsts)) if places is None else places
        if are_whole.any():
            self.read(mapped, file, firsts[are_whole], places[are_whole], output, run)
        rest = rows_of_runs(firsts[~are_whole], places[~are_whole], output)
        self.read(mapped, file, *rest, run)

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
        """Fill `output` as `read` does, from a file that cannot be mapped."""
        storage = self._storage(file)
        flat = output.view(np.uint8).reshape(len(output), -1)
        offsets = (storage.offsets(rows) + self._begins[file]).tolist()
        targets = range(len(rows)) if places is None else places.tolist()
        for offset, target in zip(offsets, targets, strict=True):
            if os.preadv(descriptor, [flat[target].data], offset) != self._row_bytes:
                raise OSError("the file has become shorter")

    def _fill(
        self,
        mapped: np.ndarray,
        offsets: np.ndarray,
        places: np.ndarray | None,
        output: np.ndarray,
        part: slice,
    ) -> None:
        target = output[part] if places is None else output
        own = None if places is None else places[part]
        if not self._library.copy_rows(mapped, offsets[part], own, target):
            raise OSError("the file has become shorter, or its disk fails")

    def ask_for(self, descriptor: int, file: int, rows: np.ndarray) -> None:
        """Have the system begin to read the blocks of `rows`, each once."""
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
    """Return where a member begins in compound rows, and its size."""
    begin = 0
    for name in members:
        if dtype.fields is None:
            raise RuntimeError("the stored type has no such member")
        dtype, offset = dtype.fields[name][:2]
        begin += offset
    return begin, dtype.itemsize
