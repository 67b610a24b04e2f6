"""One field of one open file: chunks as they are stored, decoded outside of HDF5."""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.data.filters import ChunkDecoder, make_decoder

__all__ = ["FieldAccess", "StoredRows"]

_Place = tuple[slice, ...]


@dataclass(frozen=True)
class StoredRows:
    """Rows as they lie in the file: the chunks that begin with one row, side by side."""

    decoder: ChunkDecoder
    dtype: np.dtype
    """As stored, foreign byte order too."""
    chunk_shape: tuple[int, ...]
    chunks: list[tuple[_Place, int, bytes]]
    """Of each which part of the rows it fills, the filter mask and the content."""

    def decode(self, rows: np.ndarray) -> bool:
        """Fill `rows`. Local; other threads may run.

        Returns
        -------
        bool
            Whether it could be done. If not, `FieldAccess.read` can, or says why not.
        """
        num_bytes = math.prod(self.chunk_shape) * self.dtype.itemsize
        for place, filter_mask, content in self.chunks:
            try:
                decoded = self.decoder.decode(content, filter_mask, num_bytes)
            except ValueError:
                return False
            elements = np.frombuffer(decoded, self.dtype).reshape(self.chunk_shape)
            target = rows[place]
            # At the edges of the data set chunks stand out.
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
        self._places = _places(self._shape[1:], self._chunk_shape[1:]) if is_plain else []

    def fetch(self, start: int) -> StoredRows | None:
        """Return the chunks that begin with row `start`, without decoding them. Local.

        ``None`` where h5py must decode them, or where it fills in what was never written.
        """
        if self._decoder is None:
            return None
        chunks = []
        for origin, place in self._places:
            try:
                filter_mask, content = self._identifier.read_direct_chunk((start, *origin))
            except (OSError, RuntimeError, ValueError):
                return None
            chunks.append((place, filter_mask, content))
        return StoredRows(self._decoder, self._dtype, self._chunk_shape, chunks)

    def read(self, start: int, rows: np.ndarray) -> None:
        """Fill `rows`, which begin with row `start`, as h5py reads them. Local."""
        if rows.size:
            # Several times faster than read_direct.
            rows[...] = self._dataset[start : start + len(rows)]


def _places(
    shape: tuple[int, ...], chunk_shape: tuple[int, ...]
) -> list[tuple[tuple[int, ...], _Place]]:
    """Return where each of the chunks side by side begins in a row, and what it fills of rows."""
    starts = itertools.product(*map(range, itertools.repeat(0), shape, chunk_shape))
    places = []
    for start in starts:
        ends = map(operator.add, start, chunk_shape)
        places.append((start, (slice(None), *map(slice, start, ends))))
    return places
