"""Rows of HDF5 files: whole chunks through a cache, contiguous data by slices."""

from __future__ import annotations

from collections import OrderedDict
from functools import partial
from typing import Any

import numpy as np

from mpistrat import hdf5, nests
from mpistrat.data.chunk_cache import ChunkCache
from mpistrat.data.hdf5_catalog import Catalog, FieldLayout
from mpistrat.data.order import Block
from mpistrat.errors import DataError

__all__ = ["Hdf5Reader"]

_MAX_OPEN_FILES = 64


class Hdf5Reader:
    """Reads examples by their numbers, in any order.

    Parameters
    ----------
    catalog : Catalog
    cache_bytes : int
        Size of the decoded chunks to keep.
    """

    def __init__(self, catalog: Catalog, cache_bytes: int) -> None:
        self._catalog = catalog
        self._offsets = catalog.offsets
        self._cache = ChunkCache(cache_bytes)
        self._open_files: OrderedDict[int, Any] = OrderedDict()

    lookahead_rows = 0

    def expect(self, block: Block) -> None:
        """Nothing to prepare. Local."""

    def read(self, block: Block) -> Any:
        """Return the examples `block`, as a nest of arrays of shape ``(len(block), *shape)``.

        Local.

        Raises
        ------
        DataError
            If a file has vanished or cannot be decoded.
        """
        numbers = block.astype(np.int64)
        layouts = self._catalog.files[0].layouts
        outputs = [
            np.empty((len(numbers), *each.spec.known_shape), each.spec.dtype) for each in layouts
        ]
        file_of_row = np.searchsorted(self._offsets, numbers, "right") - 1
        for file in np.unique(file_of_row).tolist():
            places = np.flatnonzero(file_of_row == file)
            rows = numbers[places] - self._offsets[file]
            for field, output in enumerate(outputs):
                self._fill(output, places, file, field, rows)
        return nests.unflatten(self._catalog.structure, outputs)

    def _fill(
        self, output: np.ndarray, places: np.ndarray, file: int, field: int, rows: np.ndarray
    ) -> None:
        layout = self._catalog.files[file].layouts[field]
        if not layout.is_chunked and _are_consecutive(rows) and _are_consecutive(places):
            start, stop = int(rows[0]), int(rows[-1]) + 1
            output[places[0] : places[-1] + 1] = self._read_rows(file, field, layout, start, stop)
            return
        chunk_of_row = rows // layout.rows_per_chunk
        by_chunk = np.argsort(chunk_of_row, kind="stable")
        chunks, firsts = np.unique(chunk_of_row[by_chunk], return_index=True)
        for chunk, members in zip(chunks.tolist(), np.split(by_chunk, firsts[1:]), strict=True):
            start = chunk * layout.rows_per_chunk
            stop = min(start + layout.rows_per_chunk, self._catalog.files[file].num_rows)
            decoded = self._cache.get(
                (file, field, chunk),
                partial(self._read_rows, file, field, layout, start, stop),
            )
            output[places[members]] = decoded[rows[members] - start]

    def _read_rows(
        self, file: int, field: int, layout: FieldLayout, start: int, stop: int
    ) -> np.ndarray:
        name = self._catalog.names[field]
        try:
            dataset = self._opened(file)[name]
            rows = np.empty((stop - start, *layout.spec.known_shape), layout.spec.dtype)
            if rows.size:
                dataset.read_direct(rows, np.s_[start:stop])
        except (OSError, KeyError, TypeError, ValueError) as reason:
            if isinstance(reason, DataError):
                raise
            raise DataError(
                f"Rows {start} to {stop - 1} of the field {name!r} of "
                f"{self._catalog.files[file].path} cannot be read: {reason}. The file is damaged, "
                "or it changed after the data set was made."
            ) from reason
        return rows

    def _opened(self, file: int) -> Any:
        if file in self._open_files:
            self._open_files.move_to_end(file)
            return self._open_files[file]
        opened = hdf5.open_for_reading(self._catalog.files[file].path, DataError)
        self._open_files[file] = opened
        if len(self._open_files) > _MAX_OPEN_FILES:
            self._open_files.popitem(last=False)[1].close()
        return opened

    def close(self) -> None:
        """Close the files and forget the chunks. Local."""
        self._cache.clear()
        while self._open_files:
            self._open_files.popitem()[1].close()


def _are_consecutive(numbers: np.ndarray) -> bool:
    return bool(np.all(np.diff(numbers) == 1))
