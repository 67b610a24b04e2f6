"""Rank 0's array on every rank, in pieces that any MPI library can count."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpistrat.arrays import Array, host_copy, host_view
from mpistrat.collectives import CollectiveCall
from mpistrat.comm.packing import placed_like

__all__ = ["broadcast_in_pieces", "pieces"]

_BYTES_PER_PIECE = 2**28
"""Far below the 2**31 - 1 elements that an MPI count of 32 bits can name."""


def pieces(array: np.ndarray, bytes_per_piece: int) -> Iterator[np.ndarray]:
    """Yield 1-d views that cover a C-ordered `array`, each with at least one element. Local."""
    flat = array.reshape(-1)
    length = max(1, bytes_per_piece // max(1, flat.itemsize))
    for start in range(0, flat.size, length):
        yield flat[start : start + length]


def broadcast_in_pieces(
    call: CollectiveCall,
    array: Array,
    *details: object,
    root: int = 0,
    bytes_per_piece: int = _BYTES_PER_PIECE,
) -> Array:
    """Return the `array` of `root` on every rank, in memory of its own. **Collective**.

    Shape and dtype must agree over ranks, and `details` too.
    """
    dtype = np.dtype(array.dtype).newbyteorder("=")
    shape = tuple(array.shape)
    call.agree(f"from rank {root}", (str(dtype), shape), *details)
    is_root = call.channel.rank == root
    buffer = host_copy(host_view(array)) if is_root else np.empty(shape, dtype)
    for piece in pieces(buffer, bytes_per_piece):
        call.channel.transport.broadcast(piece, root)
    return placed_like(buffer, array)
