"""Layouts of columns: how many rows of a data set are read together, and where they lie."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.data.hdf5.listing import Listing
from mpistrat.data.hdf5.storage import (
    Chunks,
    CompressedChunks,
    Storage,
    find_chunks,
    find_contiguous,
)
from mpistrat.data.hdf5.stored_types import Form, Leaf, dtype_of
from mpistrat.data.spec import ArraySpec
from mpistrat.native import native_library

_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 2**15, 2**18
"""Rows of data without chunks are read so much at a time: long reads are fast, and short ones mix
small files well."""

_BLOCKS_PER_FILE = 512

_MIN_RUN_BYTES, _MAX_STRIDED_BYTES = 2**10, 2**24
"""Along another axis than the first, one row lies in many pieces, which are as long as this where
the block stays small enough."""


@dataclass(frozen=True)
class ColumnLayout:
    """One column in one file."""

    spec: ArraySpec
    """Shape and dtype of one row, in native byte order."""
    rows_per_chunk: int
    """How many rows are read together."""
    is_chunked: bool
    """Whether HDF5 must decode a whole chunk to give one row of it."""
    storage: Storage | None
    """Where the rows lie, if nothing has to be decoded."""
    chunks: Chunks | None
    """Where the chunks lie, if they can be decoded without HDF5."""
    decoded_row_bytes: int = 0
    """Size of one row with the members of compound rows that are not kept, where it is decoded."""

    @property
    def row_bytes(self) -> int:
        """Size of one row in memory."""
        return self.spec.dtype.itemsize * math.prod(self.spec._known_shape)


def layout_of(dataset: Any, path: str, axis: int, dtype: np.dtype, is_live: bool) -> ColumnLayout:
    """Return the layout of a data set of the file `path`, read as `dtype` along `axis`."""
    others = dataset.shape[:axis] + dataset.shape[axis + 1 :]
    spec = ArraySpec(others + dtype.shape, dtype.base)
    row_bytes = max(dtype.itemsize * math.prod(others), 1)
    # The places of what is being written may change.
    has_places = not axis and not is_live
    if dataset.chunks:
        found = find_chunks(dataset, path) if has_places else None
        storage = found if isinstance(found, Storage) else None
        chunks = None if isinstance(found, Storage) else found
        if dtype != dtype_of(dataset) and isinstance(chunks, CompressedChunks):
            chunks = None  # compiled code fills whole rows
        decoded_bytes = row_bytes // max(dtype.itemsize, 1) * dataset.dtype.itemsize
        return ColumnLayout(spec, dataset.chunks[axis], True, storage, chunks, decoded_bytes)
    length = dataset.shape[axis]
    rows = _rows_of_block(length, row_bytes)
    if axis:
        run_bytes = dtype_of(dataset).itemsize * math.prod(dataset.shape[axis + 1 :])
        long_enough = min(_MIN_RUN_BYTES // max(run_bytes, 1), _MAX_STRIDED_BYTES // row_bytes)
        rows = max(rows, min(long_enough, length))
    storage = find_contiguous(dataset, path) if has_places else None
    return ColumnLayout(spec, rows, False, storage, None)


def _rows_of_block(length: int, row_bytes: int) -> int:
    """Return how many of `length` rows without chunks are read together."""
    share = length * row_bytes // _BLOCKS_PER_FILE
    block_bytes = min(max(share, _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES)
    return max(block_bytes // row_bytes, 1)


def contiguous_layout(spec: ArraySpec, length: int, storage: Storage) -> ColumnLayout:
    """Return the layout of `length` rows of `spec` in one piece, which begins in `storage`."""
    row_bytes = max(spec.dtype.itemsize * math.prod(spec._known_shape), 1)
    return ColumnLayout(spec, _rows_of_block(length, row_bytes), False, storage, None)


def layout_of_matches(
    listings: Sequence[Listing | None], leaves: Any, shape: tuple[int | None, ...]
) -> list[ColumnLayout] | None:
    """Return the layout of data sets of one shape as rows; ``None`` if some lie in pieces."""
    if native_library() is None or None in shape or not isinstance(leaves, Leaf):
        return None
    if leaves.members or leaves.form is not Form.FIXED:
        return None
    spec = leaves.spec(shape)
    layouts = []
    for listing in listings:
        if listing is None or (listing.offsets < 0).any():
            return None
        row_bytes = spec.dtype.itemsize * math.prod(spec._known_shape)
        if not row_bytes or listing.width != spec.dtype.itemsize:
            return None
        storage = Storage(listing.offsets, 1, spec.dtype, row_bytes)
        layouts.append(ColumnLayout(spec, 1, False, storage, None))
    return layouts
