"""The values of a file on their way from the ranks that have read them to all ranks."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from mpistrat.arrays import is_on_host
from mpistrat.checkpoint.pieces import BYTES_PER_PIECE
from mpistrat.checkpoint.reading import Values
from mpistrat.checkpoint.shapes import Shape
from mpistrat.collectives import CollectiveCall
from mpistrat.comm.parts import pieces
from mpistrat.options import VariableSynchronization
from mpistrat.sharding import cut
from mpistrat.variables import Variable

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
    for piece in pieces(found, BYTES_PER_PIECE):
        call.broadcast_each([piece], [values.owner(name)])
    return found


def load_variables(
    call: CollectiveCall, values: Values, variables: Mapping[str, Variable]
) -> None:
    """Assign to `variables` the values of these paths on every rank, piece by piece.

    **Collective** like `broadcast_array`. Every rank that has values sends its next piece at the
    same time, and assigns what it has itself at the end, when no other one waits for it.
    """
    # The last path of a variable counts, on all ranks alike.
    names = {id(variable): name for name, variable in variables.items()}.values()
    variables = {name: variables[name] for name in names}
    owners = sorted({values.owner(name) for name in variables})
    lanes = [_pieces_from(owner, values, variables) for owner in owners]
    for row in itertools.zip_longest(*lanes):
        moving = [(owner, each) for owner, each in zip(owners, row, strict=True) if each]
        call.broadcast_each(
            [each.buffer for _, each in moving], [owner for owner, _ in moving]
        )
        for _, each in moving:
            each.assign()
    for name, variable in variables.items():
        own = values.arrays.pop(name, None)
        if own is not None:
            flat = own.reshape(-1)
            for each in cut(flat.size, _length(own.dtype)):
                variable.load_piece(each.start, flat[each])


@dataclass(frozen=True)
class _Piece:
    """A part of a variable on its way between ranks."""

    buffer: np.ndarray
    """What is sent, or where it comes to."""
    assign: Callable[[], object] = bool
    """Called once it is there."""


def _pieces_from(
    owner: int, values: Values, variables: Mapping[str, Variable]
) -> Iterator[_Piece]:
    """Yield what `owner` sends, as this rank needs it. Local."""
    for name, variable in variables.items():
        if values.owner(name) != owner:
            continue
        array = values.arrays.get(name)
        if array is not None or _is_stored_as_read(variable):
            memory = variable.storage if array is None else array
            yield from map(_Piece, pieces(memory, BYTES_PER_PIECE))
        else:
            yield from _pieces_to_assign(variable)


def _pieces_to_assign(variable: Variable) -> Iterator[_Piece]:
    """Yield pieces in memory of their own, which the next piece uses again. Local."""
    size = int(np.prod(variable.shape))
    memory = np.empty(min(size, _length(variable.dtype)), variable.dtype)
    for each in cut(size, _length(variable.dtype)):
        piece = memory[: each.stop - each.start]
        yield _Piece(piece, functools.partial(variable.load_piece, each.start, piece))


def _is_stored_as_read(variable: Variable) -> bool:
    """Return whether the memory of `variable` is to hold the bytes of the file."""
    is_whole = variable.synchronization is not VariableSynchronization.ON_READ
    return is_whole and is_on_host(variable.storage)


def _length(dtype: np.dtype) -> int:
    """Return how many elements a piece has."""
    return max(1, BYTES_PER_PIECE // dtype.itemsize)
