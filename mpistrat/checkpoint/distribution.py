"""The values of a file on their way from the ranks that have read them to all ranks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpistrat.checkpoint.pieces import BYTES_PER_PIECE
from mpistrat.checkpoint.reading import Values
from mpistrat.checkpoint.shapes import Shape
from mpistrat.collectives import CollectiveCall
from mpistrat.variables.broadcasting import pieces

__all__ = ["broadcast_array", "broadcast_pieces"]


def broadcast_pieces(
    call: CollectiveCall, values: Values, name: str, of: Shape
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield one of the `values` in flat pieces, each with the number of its first element.

    **Collective** inside of a `call` that has been agreed on. The rank that has the value gives
    it away; the others take memory for one piece, which the next one overwrites.

    Parameters
    ----------
    call : CollectiveCall
    values : Values
    name : str
        Equal on all ranks.
    of : Shape
        Shape and dtype, equal on all ranks.
    """
    shape, dtype = of
    size = int(np.prod(shape))
    length = max(1, BYTES_PER_PIECE // dtype.itemsize)
    array = values.arrays.pop(name, None)
    flat = None if array is None else array.reshape(-1)
    memory = np.empty(min(size, length) if flat is None else 0, dtype)
    for start in range(0, size, length):
        end = min(start + length, size)
        piece = memory[: end - start] if flat is None else flat[start:end]
        call.channel.transport.broadcast(piece, values.owner(name))
        yield start, piece


def broadcast_array(call: CollectiveCall, values: Values, name: str, of: Shape) -> np.ndarray:
    """Return one of the `values` on every rank. **Collective** like `broadcast_pieces`."""
    array = values.arrays.pop(name, None)
    found = np.empty(*of) if array is None else array
    for piece in pieces(found, BYTES_PER_PIECE):
        call.channel.transport.broadcast(piece, values.owner(name))
    return found
