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
from mpistrat.data.hdf5.filters import ChunkDecoder, Codec, find_codec, make_decoder
from mpistrat.data.hdf5.stored_types import dtype_of
from mpistrat.native import native_library


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


@dataclass(frozen=True)
class FilteredChunks:
    """Chunks of whole rows behind other filters, which Python decodes once they are read."""

    places: np.ndarray
    """As those of `CompressedChunks`."""
    dtype: np.dtype
    """As stored, foreign byte order too."""
    chunk_shape: tuple[int, ...]
    filters: tuple[tuple[int, tuple[int, ...]], ...]
    """Number and client data of each, as they were applied."""

    @cached_property
    def decoder(self) -> ChunkDecoder:
        """What decodes a chunk."""
        decoder = make_decoder(self.filters)
        if decoder is None:
            raise RuntimeError("only HDF5 knows the filters of these chunks")
        return decoder

    def read(self, descriptor: int, start: int) -> tuple[int, bytes]:
        """Return the filter mask and the content of the chunk that begins with row `start`."""
        offset, size, mask = self.places[start // self.chunk_shape[0]].tolist()
        content = os.pread(descriptor, size, offset)
        if len(content) != size:
            raise OSError("the file has become shorter")
        return mask, content


Chunks = CompressedChunks | FilteredChunks
"""Chunks whose places are known."""


def find_contiguous(dataset: Any, path: str) -> Storage | None:
    """Return the storage of a data set in the file `path`; ``None`` where rows lie otherwise."""
    dtype = dtype_of(dataset)
    is_here = hdf5.is_in_file(dataset, path)
    offset = hdf5.contiguous_offset(dataset, dtype) if is_here else None
    if offset is None:
        return None
    row_bytes = dataset.nbytes // max(len(dataset), 1)
    return Storage(np.array([offset]), max(len(dataset), 1), dtype, row_bytes)


def find_chunks(dataset: Any, path: str) -> Storage | Chunks | None:
    """Return where chunks of whole rows lie; ``None`` if only HDF5 knows."""
    filters = hdf5.filters_of(dataset)
    if dataset.chunks[1:] != dataset.shape[1:]:
        return None
    codec = find_codec(filters[0][0]) if len(filters) == 1 else None
    if codec is None and filters and make_decoder(filters) is None:
        return None
    if not hdf5.is_in_file(dataset, path):
        return None
    dtype = dtype_of(dataset)
    if not hdf5.is_stored_as(dataset.id, dtype):
        return None
    num_chunks = -(-len(dataset) // dataset.chunks[0])
    if filters and codec is None and num_chunks > _MAX_FILTERED_CHUNKS:
        return None
    found = hdf5.places_of_chunks(dataset)
    if found is None:
        return None
    places = np.array(found, np.int64).reshape(-1, 3)
    rows_per_chunk = dataset.chunks[0]
    if not filters:
        starts = np.ascontiguousarray(places[:, 0])
        row_bytes = dataset.nbytes // max(len(dataset), 1)
        return Storage(starts, rows_per_chunk, dtype, row_bytes)
    if not hdf5.filters_edge_chunks(dataset):
        return None
    if codec is not None and native_library() is not None and dtype.isnative:
        return CompressedChunks(places, rows_per_chunk, codec)
    if make_decoder(filters) is None:
        return None
    return FilteredChunks(places, dtype, dataset.chunks, tuple(filters))


_MAX_FILTERED_CHUNKS = 2**16
"""To list more of them, HDF5 needs longer than it needs to read a few."""
