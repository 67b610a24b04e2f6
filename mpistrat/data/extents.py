"""Rows that lie in a file in one piece, as they do in an array: read without HDF5."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import hdf5

__all__ = ["Extent", "extent_of"]


@dataclass(frozen=True)
class Extent:
    """Where the rows of a data set lie in its file."""

    offset: int
    """Of the first byte."""
    dtype: np.dtype
    """As stored, foreign byte order too."""

    def read(self, descriptor: int, start: int, rows: np.ndarray) -> bool:
        """Fill `rows` with those from row `start` on. Local; other threads may run.

        Parameters
        ----------
        descriptor : int
            Of the open file.
        start : int
        rows : ndarray
            In C order and native byte order.

        Returns
        -------
        bool
            Whether all could be read. If not, HDF5 can, or says why not.
        """
        offset = self.offset + start * (rows.nbytes // len(rows))
        if os.preadv(descriptor, [rows.data], offset) != rows.nbytes:
            return False
        if not self.dtype.isnative:
            rows.byteswap(inplace=True)
        return True


def extent_of(dataset: Any) -> Extent | None:
    """Return the extent of an ``h5py.Dataset``; ``None`` where its rows lie otherwise. Local."""
    offset = hdf5.contiguous_offset(dataset)
    return None if offset is None else Extent(offset, dataset.dtype)
