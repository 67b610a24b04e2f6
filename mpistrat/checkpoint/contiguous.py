"""Large arrays in an HDF5 file, written and read where they lie, past the HDF5 library.

The library serves one thread at a time. A program that trains reads its data while a checkpoint
is written beside it, so the bytes of large arrays take the file's own descriptor.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat.arrays import Array
from mpistrat.hdf5 import h5py

__all__ = ["InOrder", "create_unwritten", "read_at", "write_at"]


def create_unwritten(group: Any, path: str, array: Array) -> Any:
    """Return a new data set for `array`, which has its place in the file but no values. Local."""
    h5p, h5d = h5py().h5p, h5py().h5d
    plist = h5p.create(h5p.DATASET_CREATE)
    plist.set_layout(h5d.CONTIGUOUS)
    plist.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    plist.set_fill_time(h5d.FILL_TIME_NEVER)
    return group.create_dataset(path, shape=array.shape, dtype=array.dtype, dcpl=plist)


class InOrder:
    """Moves one part of an array after the other, from a place in a file on.

    Parameters
    ----------
    move : callable
        `read_at` or `write_at`.
    handle : int
    offset : int
        Where the first part begins.
    """

    def __init__(
        self, move: Callable[[int, int, np.ndarray], None], handle: int, offset: int
    ) -> None:
        self._move = move
        self._handle = handle
        self._offset = offset

    def __call__(self, part: np.ndarray) -> None:
        """Move the next `part`. Local."""
        self._move(self._handle, self._offset, part)
        self._offset += part.nbytes


def write_at(handle: int, offset: int, piece: np.ndarray) -> None:
    """Write the bytes of `piece` to an open file, and have the system begin to flush them. Local.

    Raises
    ------
    OSError
        If the system refuses.
    """
    left = memoryview(piece.reshape(-1).view(np.uint8).data)
    while left:
        written = os.pwrite(handle, left, offset)
        _begin_to_flush(handle, offset, written)
        left, offset = left[written:], offset + written


def _begin_to_flush(handle: int, offset: int, num_bytes: int) -> None:
    """Have the disk work from now on, where else it would begin at the fsync at the end."""
    if hasattr(os, "posix_fadvise"):
        # For Linux a request to write what is new: only pages that are on disk are dropped.
        os.posix_fadvise(handle, offset, num_bytes, os.POSIX_FADV_DONTNEED)


def read_at(handle: int, offset: int, piece: np.ndarray) -> None:
    """Fill `piece` with bytes of an open file. Local.

    Raises
    ------
    OSError
        If the system refuses, or the file ends before.
    """
    left = memoryview(piece.reshape(-1).view(np.uint8).data)
    while left:
        num_bytes = os.preadv(handle, [left], offset)
        if num_bytes == 0:
            raise OSError(f"the file ends at byte {offset}")
        left, offset = left[num_bytes:], offset + num_bytes
