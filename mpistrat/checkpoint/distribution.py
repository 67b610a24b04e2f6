"""The values of a file on their way to all ranks: rank 0 reads and checks, then they travel."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from mpistrat.checkpoint.digesting import Digests
from mpistrat.checkpoint.pieces import BYTES_PER_PIECE
from mpistrat.checkpoint.reader import CheckpointReader
from mpistrat.checkpoint.shapes import Shape
from mpistrat.collectives import CollectiveCall
from mpistrat.errors import CheckpointCorruptError
from mpistrat.variables.broadcasting import pieces

__all__ = ["broadcast_array", "broadcast_pieces", "read_arrays"]


def read_arrays(reader: CheckpointReader) -> dict[str, np.ndarray]:
    """Return all arrays of an open file by path, read and checked by several threads. Local.

    Raises
    ------
    CheckpointCorruptError
        If one is damaged; the message names all of these.
    """
    arrays: dict[str, np.ndarray] = {}
    damage: list[str] = []
    with Digests() as digests:
        digesters = {}
        for name, info in reader.variables.items():
            if reader.is_plain(name):
                arrays[name] = np.empty(info.shape, info.dtype)
                digesters[name] = digests.begin(before=_Input(reader, name))
                digesters[name].update(arrays[name].reshape(-1), is_view=True)
        for name, info in reader.variables.items():
            try:
                if name not in digesters:
                    arrays[name] = reader.read_variable(name)
                elif digesters[name].result() != info.digest:
                    damage.append(
                        f"The checkpoint {reader.path} is damaged at {name}: the values do not "
                        "have the digest that was stored with them."
                    )
            except CheckpointCorruptError as error:
                damage.append(str(error))
    if damage:
        raise CheckpointCorruptError("\n".join(damage))
    return arrays


class _Input:
    """Fills one part of a variable after the other from the file."""

    def __init__(self, reader: CheckpointReader, name: str) -> None:
        self._reader = reader
        self._name = name
        self._at = 0

    def __call__(self, part: np.ndarray) -> None:
        self._reader.read_plain(self._name, part, self._at)
        self._at += part.nbytes


def broadcast_pieces(
    call: CollectiveCall, array: np.ndarray | None, of: Shape
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield the array of rank 0 in flat pieces, each with the number of its first element.

    **Collective** inside of a `call` that has been agreed on. Ranks but 0 take memory for one
    piece, which the next one overwrites.

    Parameters
    ----------
    call : CollectiveCall
    array : numpy.ndarray or None
        On rank 0.
    of : Shape
        Shape and dtype, equal on all ranks.
    """
    shape, dtype = of
    size = int(np.prod(shape))
    length = max(1, BYTES_PER_PIECE // dtype.itemsize)
    flat = None if array is None else array.reshape(-1)
    memory = np.empty(min(size, length) if flat is None else 0, dtype)
    for start in range(0, size, length):
        end = min(start + length, size)
        piece = memory[: end - start] if flat is None else flat[start:end]
        call.channel.transport.broadcast(piece, 0)
        yield start, piece


def broadcast_array(call: CollectiveCall, array: np.ndarray | None, of: Shape) -> np.ndarray:
    """Return the array of rank 0 on every rank. **Collective** like `broadcast_pieces`."""
    found = np.empty(*of) if array is None else array
    for piece in pieces(found, BYTES_PER_PIECE):
        call.channel.transport.broadcast(piece, 0)
    return found
