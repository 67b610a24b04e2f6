"""One field of one open file: chunks as they are stored, decoded outside of HDF5."""

from __future__ import annotations

import itertools
import math
import operator
import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.data.filters import ChunkDecoder, make_decoder

__all__ = ["FieldAccess", "StoredRows"]


@dataclass(frozen=True)
class StoredRows:
    """Rows as they lie in the file: the chunks that begin with one row, side by side."""

    decoder: ChunkDecoder
    dtype: np.dtype
    """As stored, foreign byte order too."""
    chunk_shape: tuple[int, ...]
    chunks: list[tuple[tuple[int, ...], int, bytes]]
    """Of each the index of the first element but for the row, the filter mask and the content."""

    def decode(self, rows: np.ndarray) -> bool:
        """Fill `rows`. Local; other threads may run.

        Returns
        -------
        bool
            Whether it could be done. If not, `FieldAccess.read` can, or says why not.
        """
        num_bytes = math.prod(self.chunk_shape) * self.dtype.itemsize
        for origin, filter_mask, content in self.chunks:
            try:
                decoded = self.decoder.decode(content, filter_mask, num_bytes)
            except ValueError:
                return False
            elements = np.frombuffer(decoded, self.dtype).reshape(self.chunk_shape)
            # At the edges of the data set chunks stand out.
            ends = map(operator.add, origin, self.chunk_shape[1:])
            place = (slice(None), *map(slice, origin, ends))
            target = rows[place]
            target[...] = elements[tuple(map(slice, target.shape))]
        return True


class FieldAccess:
    """Reads rows of a data set. For one thread at a time.

    Parameters
    ----------
    dataset : h5py.Dataset
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        # Each of these asks HDF5 anew.
        self._shape, self._dtype, self._chunk_shape = dataset.shape, dataset.dtype, dataset.chunks
        self._identifier = dataset.id
        is_plain = dataset.chunks is not None and hdf5.is_stored_as(dataset, dataset.dtype)
        self._decoder = make_decoder(hdf5.filters_of(dataset)) if is_plain else None
        self._extent = hdf5.contiguous_extent(dataset)

    def fetch(self, start: int) -> StoredRows | None:
        """Return the chunks that begin with row `start`, without decoding them. Local.

        ``None`` where h5py must decode them, or where it fills in what was never written.
        """
        if self._decoder is None:
            return None
        starts = map(range, itertools.repeat(0), self._shape[1:], self._chunk_shape[1:])
        chunks = []
        for origin in itertools.product(*starts):
            try:
                filter_mask, content = self._identifier.read_direct_chunk((start, *origin))
            except (OSError, RuntimeError, ValueError):
                return None
            chunks.append((origin, filter_mask, content))
        return StoredRows(self._decoder, self._dtype, self._chunk_shape, chunks)

    def read(self, start: int, rows: np.ndarray) -> None:
        """Fill `rows`, which begin with row `start`, as h5py reads them. Local."""
        if rows.size:
            rows[...] = self.slice(
                start, start + len(rows)
            )  # several times faster than read_direct

    def slice(self, start: int, stop: int) -> np.ndarray:
        """Return the rows as a new array, in the byte order of the file. Local."""
        if self._extent is None:
            rows: np.ndarray = self._dataset[start:stop]
            return rows
        descriptor, offset = self._extent
        rows = np.empty((stop - start, *self._shape[1:]), self._dtype)
        row_bytes = rows.nbytes // max(stop - start, 1)
        content = rows.reshape(-1).view(np.uint8)
        if os.preadv(descriptor, [content.data], offset + start * row_bytes) != rows.nbytes:
            rows[...] = self._dataset[start:stop]  # which knows what is wrong
        return rows
