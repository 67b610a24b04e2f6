"""Chunk layout of a source: which examples are read and decoded together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

CHUNK_OVERHEAD_BYTES = 2048
"""Memory that a chunk needs in addition to its rows, which matters if chunks are tiny."""

_ROW_OVERHEAD_BYTES = 24
"""Memory that a row of a window needs in addition: its number, a random number, its position."""


@dataclass(frozen=True)
class ChunkLayout:
    """The examples that are read and decoded together, by number."""

    starts: np.ndarray
    """First place of each chunk, ascending; the last entry is the number of places."""
    bytes_per_row: int
    """Size of one decoded example, all fields together."""
    order: np.ndarray | None = None
    """The number of the example at each place; ``None`` if numbers and places are the same."""

    @cached_property
    def rows_per_chunk(self) -> int:
        """Length of the longest chunk."""
        return int(np.diff(self.starts).max(initial=1))

    def rows_in(self, num_bytes: int) -> int:
        """Return how many rows a window of `num_bytes` of memory holds."""
        overhead = _ROW_OVERHEAD_BYTES + CHUNK_OVERHEAD_BYTES // self.rows_per_chunk
        return num_bytes // (self.bytes_per_row + overhead)

    def of_range(self, rows: range) -> ChunkLayout:
        """Return the chunks of the examples `rows`, which are numbered from 0 on."""
        if self.order is None:
            # Rounded up: the first place in the range at or after the start of each chunk.
            bounds = np.clip(-((rows.start - self.starts) // rows.step), 0, len(rows))
            return replace(self, starts=_distinct(bounds))
        if len(rows) == len(self.order):
            return self
        positions, misfit = np.divmod(self.order - rows.start, rows.step)
        is_in = (misfit == 0) & (positions >= 0) & (positions < len(rows))
        counts = np.concatenate([[0], np.cumsum(is_in)])
        return replace(self, starts=_distinct(counts[self.starts]), order=positions[is_in])

    def of_numbers(self, numbers: np.ndarray) -> ChunkLayout:
        """Return the chunks of the examples `numbers`, in any order, also with repetitions."""
        chunks = np.searchsorted(self.starts, self._places(numbers), "right") - 1
        are_sorted = (chunks[1:] >= chunks[:-1]).all()
        counts = np.bincount(chunks, minlength=len(self.starts) - 1)
        # Chunks are decoded whole, however few of their rows are used.
        num_rows = int(np.diff(self.starts)[counts > 0].sum())
        return ChunkLayout(
            _distinct(np.cumsum([0, *counts])),
            -(-self.bytes_per_row * num_rows // max(len(numbers), 1)),
            None if are_sorted else np.argsort(chunks, kind="stable"),
        )

    def _places(self, numbers: np.ndarray) -> np.ndarray:
        if self.order is None:
            return numbers
        places = np.empty(len(self.order), np.int64)
        places[self.order] = np.arange(len(self.order))
        taken: np.ndarray = places[numbers]
        return taken

    def merged(self, min_rows: int) -> ChunkLayout:
        """Return the layout with neighbouring chunks merged to at least `min_rows` rows."""
        if self.order is not None or self.rows_per_chunk >= min_rows:
            return self
        step = -(-min_rows // self.rows_per_chunk)
        return replace(self, starts=_distinct(np.append(self.starts[:-1:step], self.starts[-1])))

    @classmethod
    def joined(cls, layouts: Iterable[ChunkLayout]) -> ChunkLayout:
        """Return the layout of several sources, one after the other."""
        layouts = tuple(layouts)
        starts, orders, first = [np.zeros(1, np.int64)], [], 0
        for each in layouts:
            starts.append(each.starts[1:] + first)
            length = int(each.starts[-1])
            orders.append(first + (np.arange(length) if each.order is None else each.order))
            first += length
        are_plain = all(each.order is None for each in layouts)
        return cls(
            np.concatenate(starts),
            max(each.bytes_per_row for each in layouts),
            None if are_plain else np.concatenate(orders),
        )


def _distinct(starts: np.ndarray) -> np.ndarray:
    """Return ascending `starts` without chunks of length 0."""
    return np.append(starts[:-1][np.diff(starts) > 0], starts[-1])
