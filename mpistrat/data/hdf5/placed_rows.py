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
from mpistrat.native import native_library
from mpistrat.sharding import cut

__all__ = ["PlacedField", "is_placed"]

_BYTES_PER_THREAD = 2**20
"""To hand less to another thread takes longer than to copy it."""

_MAX_PARTS = 8


def is_placed(catalog: Catalog, field: int) -> bool:
    """Return whether compiled code can read the rows of a field, by their place in each file."""
    storages = [file.layouts[field].storage for file in catalog.files]
    is_known = all(storage is not None and storage.dtype.isnative for storage in storages)
    return is_known and native_library() is not None


class PlacedField:
    """One field of all files, read by the places of its rows."""

    def __init__(self, catalog: Catalog, field: int) -> None:
        self._storages = [file.layouts[field].storage for file in catalog.files]
        self._row_bytes = catalog.row_sizes[field]
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
        storage = self._storages[file]
        if storage is None:
            raise RuntimeError("the place of these rows is not known")
        offsets = storage.offsets(rows, self._row_bytes)
        num_parts = min(max(offsets.size * self._row_bytes // _BYTES_PER_THREAD, 1), _MAX_PARTS)
        length = -(-offsets.size // num_parts)
        run(
            [
                partial(self._fill, mapped, offsets, places, output, part)
                for part in cut(offsets.size, length)
            ]
        )

    def read_slowly(
        self,
        descriptor: int,
        file: int,
        rows: np.ndarray,
        places: np.ndarray | None,
        output: np.ndarray,
    ) -> None:
        """Fill `output` as `read` does, from a file that cannot be mapped."""
        storage = self._storages[file]
        if storage is None:
            raise RuntimeError("the place of these rows is not known")
        flat = output.view(np.uint8).reshape(len(output), -1)
        offsets = storage.offsets(rows, self._row_bytes).tolist()
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
        offsets = storage.offsets(new * self._block_rows, self._row_bytes)
        self._library.ask_for(descriptor, offsets, self._block_rows * self._row_bytes)
