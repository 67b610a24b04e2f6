"""Chunk plan of each field: which rows are decoded together, and how many are cached."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpistrat.data.chunks import CHUNK_OVERHEAD_BYTES
from mpistrat.data.hdf5.catalog import Catalog
from mpistrat.sharding import ceil_div

_MIN_CAPACITY_BYTES = 2**25
"""Decoded size of the chunks that are cached at least, of the field with the largest rows."""

_SMALL_FIELD_BYTES = 2**23
"""The same of each other field."""

_ROW_CACHE_BYTES = 2**23
"""So much of a data set stays in memory over its passes: the smallest fields, often all of them."""

_SMALL_SHARE = 0.02
"""A cached field with at most this part of an example's bytes may be read in large blocks, of which
every rank needs most."""

_SMALL_FIELD_BLOCK_BYTES = 2**20


@dataclass(frozen=True)
class ChunkPlan:
    """The chunks of one field over all files, numbered from 0 on."""

    # Data without chunks are read in blocks of rows, which are treated as chunks.

    rows_of_file: np.ndarray
    """Length of each file."""
    rows_per_chunk: np.ndarray
    """For each file."""
    is_cached: bool = False
    """Whether its rows stay in a `RowCache` over passes."""
    num_slots: int = 0
    """How many chunks a `ChunkCache` holds otherwise."""

    @property
    def rows_per_slot(self) -> int:
        """Length of the longest chunk."""
        return int(np.minimum(self.rows_per_chunk, self.rows_of_file).max(initial=1))

    @property
    def num_chunks(self) -> int:
        """Of all files together."""
        return int(self._first_chunk[-1])

    @cached_property
    def _first_chunk(self) -> np.ndarray:
        return np.cumsum([0, *(-(-self.rows_of_file // self.rows_per_chunk))])

    def locate(self, files: np.ndarray, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the chunk of each row, and its number within the chunk."""
        if not files.ndim:  # one file, and NumPy divides by one number much faster
            length = self._as_lists[1][int(files)]
            chunks = rows // length
            return chunks + self._as_lists[0][int(files)], rows - chunks * length
        chunks, within = np.divmod(rows, self.rows_per_chunk[files])
        return chunks + self._first_chunk[files], within

    def row_range(self, chunk: int) -> tuple[int, int, int]:
        """Return the file of a chunk, its first row there and the row after its last."""
        first_chunks, rows_per_chunk, rows_of_file = self._as_lists
        file = bisect.bisect_right(first_chunks, chunk) - 1
        start = (chunk - first_chunks[file]) * rows_per_chunk[file]
        return file, start, min(start + rows_per_chunk[file], rows_of_file[file])

    @cached_property
    def _as_lists(self) -> tuple[list[int], list[int], list[int]]:
        # One number is found in a list sooner than in an array.
        arrays = self._first_chunk, self.rows_per_chunk, self.rows_of_file
        first_chunks, rows_per_chunk, rows_of_file = map(np.ndarray.tolist, arrays)
        return first_chunks, rows_per_chunk, rows_of_file


def plan_fields(catalog: Catalog, window_rows: int) -> list[ChunkPlan]:
    """Return the plan of each field, in the order of `Catalog.columns`."""
    rows_of_file = np.array([file.num_rows for file in catalog.files])
    cached = _cached_fields(catalog)
    plans = []
    for field, row_bytes in enumerate(catalog.row_sizes):
        lengths = np.array(
            [_block_rows(catalog, file, field, cached) for file in range(len(catalog.files))]
        )
        plan = ChunkPlan(rows_of_file, lengths, field in cached)
        if plan.is_cached:
            plans.append(plan)
            continue
        # What is decoded counts, also where a few members of it are kept.
        layouts = [file.layouts[field] for file in catalog.files]
        decoded_bytes = max(row_bytes, *(each.decoded_row_bytes for each in layouts))
        least_bytes = _MIN_CAPACITY_BYTES if field == catalog.widest else _SMALL_FIELD_BYTES
        num_slots = max(
            # An eighth more than two windows, because partitions do not end with whole chunks.
            ceil_div(window_rows * 9, plan.rows_per_slot * 4),
            least_bytes // (plan.rows_per_slot * decoded_bytes + CHUNK_OVERHEAD_BYTES),
        )
        plans.append(dataclasses.replace(plan, num_slots=max(min(num_slots, plan.num_chunks), 2)))
    return plans


def _cached_fields(catalog: Catalog) -> set[int]:
    """Return the smallest fields, as many as may stay in memory."""
    num_rows, sizes = int(catalog.offsets[-1]), catalog.row_sizes
    # Of equal ones the widest last, whose chunks decide what is read ahead.
    ascending = sorted(range(len(sizes)), key=lambda field: (sizes[field], field == catalog.widest))
    totals = itertools.accumulate(num_rows * sizes[field] for field in ascending)
    return {
        field for field, total in zip(ascending, totals, strict=True) if total <= _ROW_CACHE_BYTES
    }


def _block_rows(catalog: Catalog, file: int, field: int, cached: set[int]) -> int:
    """Return how many rows of a field to read together."""
    layouts = catalog.files[file].layouts
    if layouts[field].is_chunked or field == catalog.widest:
        return layouts[field].rows_per_chunk
    row_bytes = catalog.row_sizes[field]
    if field in cached and row_bytes <= _SMALL_SHARE * sum(catalog.row_sizes):
        return max(_SMALL_FIELD_BLOCK_BYTES // max(row_bytes, 1), 1)
    # The rows of one chunk, which are needed together.
    return layouts[catalog.widest].rows_per_chunk
