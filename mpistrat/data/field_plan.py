"""Which rows of a field are read and decoded together, and how many of them are kept."""

from __future__ import annotations

import bisect
import dataclasses
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mpistrat.data.hdf5_catalog import Catalog
from mpistrat.data.order import CHUNK_OVERHEAD_BYTES
from mpistrat.sharding import ceil_div

__all__ = ["FieldPlan", "plan_fields"]

_MIN_CAPACITY_BYTES = 2**25
"""Decoded size of the chunks that are kept at least, of the field with the largest rows."""

_SMALL_FIELD_BYTES = 2**23
"""The same of each other field. One of at most that size stays in memory whole."""

_SMALL_SHARE = 0.02
"""A field with at most this part of an example's bytes may be read whole by every rank."""

_SMALL_FIELD_BLOCK_BYTES = 2**20

_MAX_WHOLE_CHUNKS = 64
"""A small field is read at once if it has no more chunks: few files and short work."""


@dataclass(frozen=True)
class FieldPlan:
    """The chunks of one field over all files, numbered from 0 on.

    Data without chunks are read in blocks of rows, which are treated alike.
    """

    rows_of_file: np.ndarray
    """Length of each file."""
    rows_per_chunk: np.ndarray
    """For each file."""
    is_whole: bool = False
    """Whether all chunks are read together, and kept."""
    num_slots: int = 0
    """How many chunks to keep otherwise."""

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
        """Return the chunk of each row, and its number within the chunk. Local.

        Parameters
        ----------
        files, rows : ndarray of int
            The file of each row, or of all, and their numbers within the file.
        """
        chunks, within = np.divmod(rows, self.rows_per_chunk[files])
        return chunks + self._first_chunk[files], within

    def extent(self, chunk: int) -> tuple[int, int, int]:
        """Return the file of a chunk, its first row there and the row after its last. Local."""
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


def plan_fields(catalog: Catalog, window_rows: int) -> list[FieldPlan]:
    """Return the plan of each field, in the order of `Catalog.names`. Local.

    Parameters
    ----------
    catalog : Catalog
    window_rows : int
        How many rows are mixed at a time: as many are in use, and as many decoded ahead.
    """
    rows_of_file = np.array([file.num_rows for file in catalog.files])
    plans = []
    for field, row_bytes in enumerate(catalog.row_sizes):
        lengths = np.array(
            [_block_rows(catalog, file, field) for file in range(len(catalog.files))]
        )
        plan = FieldPlan(rows_of_file, lengths)
        if _is_small(catalog, field) and plan.num_chunks <= _MAX_WHOLE_CHUNKS:
            plans.append(dataclasses.replace(plan, is_whole=True))
            continue
        least_bytes = _MIN_CAPACITY_BYTES if field == catalog.widest else _SMALL_FIELD_BYTES
        num_slots = max(
            # An eighth more than two windows, because lanes do not end with whole chunks.
            ceil_div(window_rows * 9, plan.rows_per_slot * 4),
            least_bytes // (plan.rows_per_slot * row_bytes + CHUNK_OVERHEAD_BYTES),
        )
        plans.append(dataclasses.replace(plan, num_slots=max(min(num_slots, plan.num_chunks), 2)))
    return plans


def _block_rows(catalog: Catalog, file: int, field: int) -> int:
    """Return how many rows of a field to read together."""
    layouts = catalog.files[file].layouts
    if layouts[field].is_chunked or field == catalog.widest:
        return layouts[field].rows_per_chunk
    if _is_small(catalog, field):
        return max(_SMALL_FIELD_BLOCK_BYTES // max(catalog.row_sizes[field], 1), 1)
    # The rows of one chunk, which are needed together.
    return layouts[catalog.widest].rows_per_chunk


def _is_small(catalog: Catalog, field: int) -> bool:
    row_bytes = catalog.row_sizes[field]
    num_bytes = int(catalog.offsets[-1]) * row_bytes
    return num_bytes <= _SMALL_FIELD_BYTES and row_bytes <= _SMALL_SHARE * sum(catalog.row_sizes)
