"""Read the values of a file and check them, on all ranks of one node that see it.

Most of the time goes into digests, so each of these ranks reads some of the large variables, and
keeps them until all are known to be whole. Every byte is read once, by the node of rank 0.
"""

from __future__ import annotations

import functools
import itertools
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from mpistrat.arrays import is_on_host, pieces
from mpistrat.checkpoint.deferred import Shape
from mpistrat.checkpoint.ranks import agree_on_shares
from mpistrat.checkpoint.raw_io import (
    BYTES_PER_PIECE,
    BYTES_WORTH_A_THREAD,
    ChecksumPool,
    InOrder,
    read_at,
)
from mpistrat.checkpoint.reader import CheckpointReader, check_digest, naming_damage
from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.errors import CheckpointCorruptError
from mpistrat.options import VariableSynchronization
from mpistrat.sharding import cut
from mpistrat.variables import Variable

__all__ = ["Places", "Values", "broadcast_array", "find_places", "load_variables", "read_values"]


@dataclass(frozen=True)
class Places:
    """Which file rank 0 has open, and where in it the large variables lie."""

    host: str = ""
    file: Sequence[int] = ()
    """Its device and its number there."""
    blocks: Mapping[str, tuple[int, int, str]] = field(default_factory=dict)
    """By path the first byte, the number of bytes, and the digest."""


@dataclass(frozen=True)
class Values:
    """The values of a file, checked, each on one rank."""

    arrays: dict[str, np.ndarray]
    """Those on this rank, by path."""
    owners: Mapping[str, int]
    """The ranks that have those that are not on rank 0."""

    def owner(self, name: str) -> int:
        """Return the rank that has a variable. Local."""
        return self.owners.get(name, 0)


def find_places(reader: CheckpointReader) -> Places:
    """Return what other ranks need to read from the file of `reader`. Local."""
    status = os.fstat(reader.handle)
    blocks = {}
    for name, info in reader.variables.items():
        if info.size_bytes >= BYTES_WORTH_A_THREAD:
            offset = reader.offset_of(name)
            if offset is not None:
                blocks[name] = offset, info.size_bytes, info.digest
    return Places(socket.gethostname(), (status.st_dev, status.st_ino), blocks)


def read_values(
    ranks: Collectives,
    what: str,
    path: str,
    reader: CheckpointReader | None,
    places: Places,
    shapes: Mapping[str, Shape],
) -> Values:
    """Read and check everything in a file. **Collective**.

    Parameters
    ----------
    ranks : Collectives
    what : str
        The public function, for messages.
    path : str
        The file.
    reader : CheckpointReader or None
        On rank 0.
    places : Places
        From `find_places`, equal on all ranks.
    shapes : mapping of str to Shape
        Of everything in the file, equal on all ranks.

    Raises
    ------
    CheckpointCorruptError
        On every rank, if something is damaged; the message names all of it.
    """
    own_handle = _open_same(path, places) if reader is None else None
    handle = own_handle if reader is None else reader.handle
    try:
        sizes = {name: size for name, (_, size, _) in places.blocks.items()}
        shares = agree_on_shares(ranks, sizes, handle is not None)
        with ranks.all_or_none(what, path):
            part = _Part(path, handle, shares.num_threads)
            part.read_blocks({name: (places.blocks[name], shapes[name]) for name in shares.own})
            if reader is not None:
                part.read_rest(reader, places)
    finally:
        if own_handle is not None:
            os.close(own_handle)
    damage: dict[str, str] = {}
    for each in ranks.gather_json(part.damage):
        damage |= each
    if damage:
        with ranks.all_or_none(what, path):
            if ranks.rank == 0:
                raise CheckpointCorruptError("\n".join(damage[name] for name in sorted(damage)))
    return Values(part.arrays, shares.owners)


def _open_same(path: str, places: Places) -> int | None:
    """Return a descriptor of rank 0's file, ``None`` where this rank does not see it."""
    if not places.blocks or places.host != socket.gethostname():
        return None
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # which may be a pipe here
    except OSError:
        return None
    status = os.fstat(handle)
    if [status.st_dev, status.st_ino] == list(places.file):
        return handle
    os.close(handle)
    return None


class _Part:
    """What one rank reads."""

    def __init__(self, path: str, handle: int | None, threads: int) -> None:
        self._path = path
        self._handle = handle
        self._threads = threads
        self.arrays: dict[str, np.ndarray] = {}
        self.damage: dict[str, str] = {}
        """What is wrong with a variable, by path."""

    def read_blocks(self, blocks: Mapping[str, tuple[tuple[int, int, str], Shape]]) -> None:
        """Read large variables in several threads. Local."""
        if self._handle is None:
            return
        with ChecksumPool(self._threads) as digests:
            digesters = {}
            for name, ((offset, _, _), (shape, dtype)) in blocks.items():
                array = self.arrays[name] = np.empty(shape, dtype)
                digesters[name] = digests.begin(before=InOrder(read_at, self._handle, offset))
                digesters[name].update(array.reshape(-1), is_view=True)
            for name, ((_, _, digest), _) in blocks.items():
                try:
                    with naming_damage(self._path, name):
                        check_digest(digesters[name].result(), digest)
                except CheckpointCorruptError as error:
                    self.damage[name] = str(error)

    def read_rest(self, reader: CheckpointReader, places: Places) -> None:
        """Read what is small, or does not lie in the file as it does in memory. Local."""
        for name in reader.variables:
            if name not in places.blocks:
                try:
                    self.arrays[name] = reader.read_variable(name)
                except CheckpointCorruptError as error:
                    self.damage[name] = str(error)


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


def load_variables(call: CollectiveCall, values: Values, variables: Mapping[str, Variable]) -> None:
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
        call.broadcast_each([each.buffer for _, each in moving], [owner for owner, _ in moving])
        for _, each in moving:
            each.assign()
    for name, variable in variables.items():
        own = values.arrays.pop(name, None)
        if own is not None:
            flat = own.reshape(-1)
            for each in cut(flat.size, _length(own.dtype)):
                variable._load_piece(each.start, flat[each])


@dataclass(frozen=True)
class _Piece:
    """A part of a variable on its way between ranks."""

    buffer: np.ndarray
    """What is sent, or where it comes to."""
    assign: Callable[[], object] = bool
    """Called once it is there."""


def _pieces_from(owner: int, values: Values, variables: Mapping[str, Variable]) -> Iterator[_Piece]:
    """Yield what `owner` sends, as this rank needs it. Local."""
    for name, variable in variables.items():
        if values.owner(name) != owner:
            continue
        array = values.arrays.get(name)
        if array is not None or _is_stored_as_read(variable):
            memory = variable._storage if array is None else array
            yield from map(_Piece, pieces(memory, BYTES_PER_PIECE))
        else:
            yield from _pieces_to_assign(variable)


def _pieces_to_assign(variable: Variable) -> Iterator[_Piece]:
    """Yield pieces in memory of their own, which the next piece uses again. Local."""
    size = int(np.prod(variable.shape))
    memory = np.empty(min(size, _length(variable.dtype)), variable.dtype)
    for each in cut(size, _length(variable.dtype)):
        piece = memory[: each.stop - each.start]
        yield _Piece(piece, functools.partial(variable._load_piece, each.start, piece))


def _is_stored_as_read(variable: Variable) -> bool:
    """Return whether the memory of `variable` is to hold the bytes of the file."""
    is_whole = variable.synchronization is not VariableSynchronization.ON_READ
    return is_whole and is_on_host(variable._storage)


def _length(dtype: np.dtype) -> int:
    """Return how many elements a piece has."""
    return max(1, BYTES_PER_PIECE // dtype.itemsize)
