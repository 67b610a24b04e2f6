"""The values of a file on their way from the ranks that have read them to all ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from mpistrat.arrays import is_on_host
from mpistrat.checkpoint.pieces import BYTES_PER_PIECE
from mpistrat.checkpoint.reading import Values
from mpistrat.checkpoint.shapes import Shape
from mpistrat.collectives import CollectiveCall
from mpistrat.options import VariableSynchronization
from mpistrat.variables import Variable
from mpistrat.variables.broadcasting import pieces

__all__ = ["broadcast_array", "load_variables"]


def broadcast_array(call: CollectiveCall, values: Values, name: str, of: Shape) -> np.ndarray:
    """Return one of the `values` on every rank.

    **Collective** inside of a `call` that has been agreed on.

    Parameters
    ----------
    call : CollectiveCall
    values : Values
    name : str
        Equal on all ranks.
    of : Shape
        Shape and dtype, equal on all ranks.
    """
    array = values.arrays.pop(name, None)
    found = np.empty(*of) if array is None else array
    for _, piece in _numbered_pieces(found):
        call.channel.transport.broadcast(piece, values.owner(name))
    return found


def load_variables(
    call: CollectiveCall, values: Values, variables: Mapping[str, Variable]
) -> None:
    """Assign to `variables` the values of these paths on every rank, piece by piece.

    **Collective** like `broadcast_array`. A rank assigns what it has itself at the end, when no
    other one waits for it.
    """
    # The last path of a variable counts, on all ranks alike.
    names = list({id(variable): name for name, variable in variables.items()}.values())
    for name in names:
        _send_or_load(call, values, name, variables[name])
    for name in names:
        own = values.arrays.pop(name, None)
        if own is not None:
            for start, piece in _numbered_pieces(own):
                variables[name].load_piece(start, piece)


def _send_or_load(call: CollectiveCall, values: Values, name: str, variable: Variable) -> None:
    """Broadcast one of the values, and assign it on the ranks that did not have it."""
    array, owner = values.arrays.get(name), values.owner(name)
    broadcast = call.channel.transport.broadcast
    if array is not None:
        for _, piece in _numbered_pieces(array):
            broadcast(piece, owner)
    elif _is_stored_as_read(variable):
        for _, piece in _numbered_pieces(variable.storage):
            broadcast(piece, owner)
    else:
        size = int(np.prod(variable.shape))
        memory = np.empty(min(size, _length(variable.dtype)), variable.dtype)
        for start in range(0, size, max(1, memory.size)):
            piece = memory[: size - start]
            broadcast(piece, owner)
            variable.load_piece(start, piece)


def _is_stored_as_read(variable: Variable) -> bool:
    """Return whether the memory of `variable` is to hold the bytes of the file."""
    is_whole = variable.synchronization is not VariableSynchronization.ON_READ
    return is_whole and is_on_host(variable.storage)


def _numbered_pieces(array: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield flat pieces, each with the number of its first element."""
    for i, piece in enumerate(pieces(array, BYTES_PER_PIECE)):
        yield i * _length(array.dtype), piece


def _length(dtype: np.dtype) -> int:
    """Return how many elements a piece has."""
    return max(1, BYTES_PER_PIECE // dtype.itemsize)
