"""Chunks of an output dataset: their shape, their numbers and their owners. Pure arithmetic."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from mpistrat.sharding import ceil_div

_MAX_CHUNK_BYTES = 2**20
_ROWS_BYTES, _MAX_ROWS = 2**16, 1024
"""Limits for chunks of growing datasets: each step writes the last, partial chunk again."""


def automatic_chunks(shape: Sequence[int | None], item_bytes: int) -> tuple[int, ...]:
    """Return a chunk shape that depends only on shape and item size; ``None`` is the growing axis.

    A chunk has at most 1 MiB, unless one element has more. Chunks of growing datasets have one row,
    or rows of at most 64 KiB together.
    """
    inner = [max(length or 0, 1) for length in shape[1:]]
    row_bytes = max(math.prod(inner) * item_bytes, 1)
    if shape[0] is None:
        rows = min(max(_ROWS_BYTES // row_bytes, 1), _MAX_ROWS)
    else:
        rows = min(max(_MAX_CHUNK_BYTES // row_bytes, 1), max(shape[0], 1))
    while rows == 1 and math.prod(inner) * item_bytes > _MAX_CHUNK_BYTES and max(inner) > 1:
        longest = inner.index(max(inner))
        inner[longest] = ceil_div(inner[longest], 2)
    return (rows, *inner)


class Piece(NamedTuple):
    """The part of an array that belongs to one chunk."""

    block: int
    """Number of the chunk along the first axis."""
    cell: int
    """Number of the chunk among those of its block."""
    rows: np.ndarray | slice
    """Rows within the chunk."""
    source_rows: np.ndarray | slice
    """Rows of the array."""
    starts: tuple[int, ...]
    """Where the piece begins in the chunk, along all axes except the first."""
    source: tuple[slice, ...]
    """The part of the array along all axes except the first."""


@dataclass(frozen=True)
class Geometry:
    """The division of a dataset into chunks, by chunk shape and the lengths of all axes but one."""

    chunk: tuple[int, ...]
    inner: tuple[int, ...]
    """Shape of a row."""

    def __post_init__(self) -> None:
        pairs = zip(self.inner, self.chunk[1:], strict=True)
        object.__setattr__(self, "grid", tuple(ceil_div(length, size) for length, size in pairs))
        object.__setattr__(self, "num_cells", math.prod(self.grid))
        strides = [1]
        for length in reversed(self.chunk[1:]):
            strides.insert(0, strides[0] * length)
        object.__setattr__(self, "strides", tuple(strides))

    grid: tuple[int, ...] = ()
    """Number of chunks along each axis except the first."""
    num_cells: int = 0
    """Number of chunks in a block, which has all chunks with the same rows."""
    strides: tuple[int, ...] = ()
    """For each axis: the number of elements from one index to the next within a chunk."""

    def owner(self, block: int, cell: int, size: int) -> int:
        """Return the rank that encodes and writes a chunk."""
        return (block * self.num_cells + cell) % size

    def offsets(self, block: int, cell: int) -> tuple[int, ...]:
        """Return the index of the first element of a chunk."""
        if not cell:  # without NumPy, which takes longer than everything else here
            return (block * self.chunk[0], *(0 for _ in self.grid))
        place = np.unravel_index(cell, self.grid) if self.grid else ()
        sizes = self.chunk[1:]
        return (block * self.chunk[0], *(int(p) * s for p, s in zip(place, sizes, strict=True)))

    def place_of(self, offsets: Sequence[int]) -> tuple[int, int]:
        """Return block and cell of the chunk that begins at `offsets`."""
        block, *place = (start // size for start, size in zip(offsets, self.chunk, strict=True))
        cell = int(np.ravel_multi_index(tuple(place), self.grid)) if place else 0
        return block, cell

    def inner_shape(self, cell: int) -> tuple[int, ...]:
        """Return the shape of a row of a chunk, without what is beyond the edges."""
        starts = self.offsets(0, cell)[1:]
        triples = zip(starts, self.chunk[1:], self.inner, strict=True)
        return tuple(min(size, length - start) for start, size, length in triples)

    def elements_of_row(self, cell: int) -> int:
        """Return the number of elements in a row of a chunk."""
        return math.prod(self.inner_shape(cell))

    def pieces(
        self, rows: range | np.ndarray, starts: Sequence[int], lengths: Sequence[int]
    ) -> Iterator[Piece]:
        """Divide an array that begins at `starts` along the inner axes; `rows` are its rows."""
        axes = [
            _along(start, length, size)
            for start, length, size in zip(starts, lengths, self.chunk[1:], strict=True)
        ]
        if math.prod(lengths) == 0 or not len(rows):
            return
        for block, own, source_rows in self._blocks(rows):
            for cut in itertools.product(*axes):
                place = tuple(number for number, _, _ in cut)
                cell = int(np.ravel_multi_index(place, self.grid)) if place else 0
                source = tuple(part for _, _, part in cut)
                yield Piece(block, cell, own, source_rows, tuple(s for _, s, _ in cut), source)

    def _blocks(
        self, rows: range | np.ndarray
    ) -> Iterator[tuple[int, np.ndarray | slice, np.ndarray | slice]]:
        height = self.chunk[0]
        if isinstance(rows, range):
            start = rows.start
            while start < rows.stop:
                block = start // height
                stop = min((block + 1) * height, rows.stop)
                own = slice(start - block * height, stop - block * height)
                yield block, own, slice(start - rows.start, stop - rows.start)
                start = stop
            return
        order = np.argsort(rows, kind="stable")
        blocks = rows[order] // height
        bounds = np.flatnonzero(np.diff(blocks, prepend=-1))
        for first, last in zip(bounds, [*bounds[1:], len(rows)], strict=True):
            source = order[first:last]
            yield int(blocks[first]), rows[source] - int(blocks[first]) * height, source


def _along(start: int, length: int, size: int) -> list[tuple[int, int, slice]]:
    """Return number of the chunk, start within it, and part of the array, along one axis."""
    found, position = [], start
    while position < start + length:
        number = position // size
        stop = min((number + 1) * size, start + length)
        found.append((number, position - number * size, slice(position - start, stop - start)))
        position = stop
    return found
