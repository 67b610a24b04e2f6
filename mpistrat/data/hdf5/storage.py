"""Where the rows or the chunks of a data set lie in its file, for reading without HDF5."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.data.hdf5.plugins import Codec, find_codec
from mpistrat.data.hdf5.stored_types import dtype_of
from mpistrat.native import native_library

__all__ = ["CompressedChunks", "Storage", "find_chunks", "find_contiguous"]


@dataclass(frozen=True)
class Storage:
    """Where the rows of a data set lie in its file, as they are in memory."""

    starts: np.ndarray
    """The offset of each chunk, of shape (chunks,); of data without chunks there is one."""
    rows_per_chunk: int
    dtype: np.dtype
    """As stored, foreign byte order too."""
    row_bytes: int
    """From one row to the next in a chunk."""

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether all rows lie one behind the other."""
        return len(self.starts) == 1

    @cached_property
    def _begin(self) -> int:
        return int(self.starts[0])

    def offsets(self, rows: np.ndarray) -> np.ndarray:
        """Return where each of `rows` begins in the file."""
        if self.is_contiguous:
            found: np.ndarray = rows * self.row_bytes
            found += self._begin
        elif self.rows_per_chunk == 1:
            found = self.starts[rows]
        else:
            chunks = rows // self.rows_per_chunk  # several times faster than divmod
            within = rows - chunks * self.rows_per_chunk
            found = self.starts[chunks] + within * self.row_bytes
        return found

    def are_in_one_piece(self, firsts: np.ndarray, length: int) -> np.ndarray:
        """Return whether each run of `length` rows lies one behind the other."""
        if self.is_contiguous:
            return np.ones(len(firsts), np.bool_)
        within: np.ndarray = firsts % self.rows_per_chunk + length <= self.rows_per_chunk
        return within

    def read(self, descriptor: int, start: int, rows: np.ndarray) -> bool:
        """Fill `rows`, which begin with row `start`; False where only HDF5 can, or says why not."""
        if rows.dtype.names:  # only some of the members
            return False
        if not self.is_contiguous:
            return self._read_each(descriptor, start, rows)
        offset = int(self.starts[0]) + start * self.row_bytes
        if os.preadv(descriptor, [rows.data], offset) != rows.nbytes:
            return False
        if not self.dtype.isnative:
            rows.byteswap(inplace=True)
        return True

    def _read_each(self, descriptor: int, start: int, rows: np.ndarray) -> bool:
        """Fill `rows` one by one where each is a data set; else False."""
        if self.rows_per_chunk > 1 or not self.dtype.isnative:
            return False
        flat = rows.reshape(len(rows), -1).view(np.uint8)
        starts = self.starts[start : start + len(rows)].tolist()
        return all(
            os.preadv(descriptor, [row.data], offset) == self.row_bytes
            for row, offset in zip(flat, starts, strict=True)
        )


@dataclass(frozen=True)
class CompressedChunks:
    """Chunks of whole rows behind a single filter, which compiled code decodes to their place."""

    places: np.ndarray
    """Of each chunk its offset, its size in the file and its filter mask, of shape (chunks, 3)."""
    rows_per_chunk: int
    codec: Codec

    def decode(
        self, mapped: np.ndarray, starts: Sequence[int], targets: Sequence[np.ndarray]
    ) -> int:
        """Fill `targets` with the chunks that begin with the rows `starts` of a mapped file.

        Returns how many were filled before the first that cannot be decoded so.
        """
        rows = self.rows_per_chunk
        # What is shorter than a chunk has no room for it, as the last chunk of a cached field.
        have_room = itertools.takewhile(lambda target: len(target) >= rows, targets)
        whole = [target[:rows] for target in have_room]
        places = self.places[np.array(starts[: len(whole)], np.intp) // rows]
        done: int = native_library().decode_chunks(*self.codec, mapped, places, whole)
        return done


def find_contiguous(dataset: Any, path: str) -> Storage | None:
    """Return the storage of a data set in the file `path`; ``None`` where rows lie otherwise."""
    # An external link leads to a data set of another file.
    is_here = os.path.samefile(dataset.file.filename, path)
    dtype = dtype_of(dataset)
    offset = hdf5.contiguous_offset(dataset, dtype) if is_here else None
    if offset is None:
        return None
    row_bytes = dataset.nbytes // max(len(dataset), 1)
    return Storage(np.array([offset]), max(len(dataset), 1), dtype, row_bytes)


def find_chunks(dataset: Any, path: str) -> tuple[Storage | None, CompressedChunks | None]:
    """Return where chunks of whole rows lie: unchanged by filters, or changed by a known one."""
    filters = hdf5.filters_of(dataset)
    codec = find_codec(filters[0][0]) if len(filters) == 1 else None
    if dataset.chunks[1:] != dataset.shape[1:] or (filters and codec is None):
        return None, None
    if not os.path.samefile(dataset.file.filename, path):
        return None, None
    dtype = dtype_of(dataset)
    if not hdf5.is_stored_as(dataset.id, dtype):
        return None, None
    found = hdf5.places_of_chunks(dataset)
    if found is None:
        return None, None
    places = np.array(found, np.int64).reshape(-1, 3)
    rows_per_chunk = dataset.chunks[0]
    if codec is None:
        starts = np.ascontiguousarray(places[:, 0])
        row_bytes = dataset.nbytes // max(len(dataset), 1)
        return Storage(starts, rows_per_chunk, dtype, row_bytes), None
    if native_library() is None or not (dtype.isnative and hdf5.filters_edge_chunks(dataset)):
        return None, None
    return None, CompressedChunks(places, rows_per_chunk, codec)
