"""Cover a data set by selections in C order, so that memory does not grow with it."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

__all__ = ["selections"]

_BYTES = 2**22
"""Of one piece: small enough to stay in the cache of a processor until it is hashed."""
_BYTES_OF_CHUNKS = 2**26
"""Of one piece where chunks are larger."""


def selections(
    shape: tuple[int, ...], item_bytes: int, chunks: Sequence[int] | None = None
) -> Iterator[tuple[int | slice, ...]]:
    """Yield selections that cover an array of `shape`, each contiguous in C order. Local.

    Parameters
    ----------
    shape : tuple of int
    item_bytes : int
    chunks : sequence of int, optional
        Selections end where chunks end, as far as the memory allows, because part of a chunk
        costs as much as all of it.
    """
    if not shape:
        yield ()
        return
    if 0 in shape:
        return
    row_bytes = [math.prod(shape[axis + 1 :]) * item_bytes for axis in range(len(shape))]
    axis = next(axis for axis, size_bytes in enumerate(row_bytes) if size_bytes <= _BYTES)
    step = _BYTES // row_bytes[axis]
    if chunks is not None and chunks[axis] * row_bytes[axis] <= _BYTES_OF_CHUNKS:
        step = max(step - step % chunks[axis], chunks[axis])
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            yield (*outer, slice(start, min(start + step, shape[axis])))
