"""Chunks that suit shuffled reading: whole rows, and fields that belong together alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

__all__ = ["DEFAULT_CHUNK_BYTES", "chunk_shape", "rows_per_chunk"]

DEFAULT_CHUNK_BYTES = 256 * 2**10
"""Small enough that a window of chunks mixes well, large enough that a disk is kept busy."""

_MIN_CHUNK_BYTES = 4096
"""Narrow fields get chunks of at least this size: the index of a file has an entry for each."""


def rows_per_chunk(row_bytes: Mapping[str, int], num_rows: int, chunk_bytes: int) -> dict[str, int]:
    """Return how many rows a chunk of each field has, of fields that are read together. Local.

    The widest field decides. A shuffled pass takes the rows of one of its chunks together, so the
    others get as many rows, or a multiple where that would make tiny chunks.

    Parameters
    ----------
    row_bytes : mapping of str to int
        Size of one row of each field.
    num_rows : int
        Length of the fields, at least 1.
    chunk_bytes : int
        Size of a chunk of the widest field, about.
    """
    widest = max(row_bytes.values())
    rows = max(chunk_bytes // max(widest, 1), 1)
    return {
        name: min(rows * _multiple(rows * size), num_rows) for name, size in row_bytes.items()
    }


def _multiple(num_bytes: int) -> int:
    """Return a power of two, so that the chunks of all fields end together now and then."""
    return int(1 << max((_MIN_CHUNK_BYTES // max(num_bytes, 1)).bit_length() - 1, 0))


def chunk_shape(
    shape: Sequence[int], item_bytes: int, rows: int, chunk_bytes: int
) -> tuple[int, ...]:
    """Return the shape of a chunk of `rows` rows; a huge row is cut, its first axes first. Local.

    Parameters
    ----------
    shape : sequence of int
        Of the whole data set, no length 0.
    item_bytes : int
    rows : int
    chunk_bytes : int
        Limit from which on a single row is cut.
    """
    chunk = [min(rows, shape[0]), *shape[1:]]
    for axis in range(1, len(chunk)):
        if chunk[0] > 1:
            break
        inner = item_bytes * math.prod(chunk[axis + 1 :])
        chunk[axis] = min(max(chunk_bytes // inner, 1), shape[axis])
    return tuple(chunk)
