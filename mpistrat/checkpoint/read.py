"""Parallel reading of a checkpoint by the ranks of one node, and its broadcast to other nodes.

Nothing changes before all is known to be whole, so each of these ranks reads some of the large
variables through, for their digests. Where all ranks are on this node, each then reads all of them
again, straight into its memory: the system has the file in memory by now, and a second copy costs
less than memory that nobody has used before. Otherwise the values are kept, and broadcast.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import socket
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.arrays import pieces
from mpistrat.checkpoint.deferred import Shape, shapes_as_json, shapes_from_json
from mpistrat.checkpoint.digests import check_digest
from mpistrat.checkpoint.json_marks import marked, unmarked
from mpistrat.checkpoint.ranks import WorkDivision, divide_work, this_worker
from mpistrat.checkpoint.raw_io import (
    BYTES_PER_PIECE,
    BYTES_WORTH_A_THREAD,
    ChecksumPool,
    InOrder,
    digest_in_file,
    read_at,
    reading_ahead,
)
from mpistrat.checkpoint.reader import (
    Block,
    CheckpointReader,
    naming_damage,
    open_checkpoint,
)
from mpistrat.checkpoint.shards import (
    Extent,
    has_bytes_of_file,
    has_part_of_file,
    read_box,
    read_own,
)
from mpistrat.checkpoint.torch_hook import Box, LoadedShard
from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.collectives.operations.broadcast import broadcast_each
from mpistrat.errors import CheckpointCorruptError, CheckpointError
from mpistrat.sharding import cut
from mpistrat.variables import Variable

_SMALL_BYTES, _MOST_JOINED = 1 << 15, 64
"""Variables of at most this many bytes travel together, and how many do at most."""
_ALIGNMENT = 64
"""Bytes, at a multiple of which each of them begins."""


@dataclass(frozen=True)
class Values:
    """The values of a file, checked, each on one rank."""

    arrays: dict[str, np.ndarray]
    """Those on this rank, by path."""
    owners: Mapping[str, int]
    """The ranks that have those that are not on rank 0."""

    def owner(self, name: str) -> int:
        """Return the rank that has a variable."""
        return self.owners.get(name, 0)


class SharedFile:
    """A checkpoint file that rank 0 has open, and the ranks of its node that read it too.

    Attributes
    ----------
    path : str
    state : dict of str to JSON values and marks
        All state, by path, on every rank.
    shapes : dict of str to Shape
        Of all arrays, by path, on every rank.
    damage : dict of str to str
        What is wrong with the variables that this rank has read, by path.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.state: dict[str, Any] = {}
        self.shapes: dict[str, Shape] = {}
        self.damage: dict[str, str] = {}
        self._reader: CheckpointReader | None = None
        self._handle: int | None = None
        self._blocks: dict[str, Block] = {}
        self._work = WorkDivision({}, (), 0)
        self._is_seen_by_all = False
        self._is_on_one_node = False
        self.shards: dict[str, Box] = {}
        """The parts that this rank needs of arrays that no rank keeps as a whole."""
        self.in_place: dict[str, Variable] = {}
        """The variables that each rank reads by itself, into their memory."""

    def open(self, is_root: bool, stack: contextlib.ExitStack) -> dict[str, Any]:
        """Open the file until `stack` is closed, and return what other ranks must know of it."""
        if is_root:
            # h5py walks the tree of the file in many small reads. Meanwhile a thread reads the rest
            # from the disk into the page cache.
            with reading_ahead(self.path):
                self._reader = stack.enter_context(open_checkpoint(self.path))
            self._handle = self._reader.handle
            return {**_identity(self._handle), **_describe(self._reader)}
        try:
            self._handle = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # may be a pipe here
        except OSError:
            # Not an error: other ranks then read for this one, and broadcast.
            return {}
        stack.callback(os.close, self._handle)
        return _identity(self._handle)

    def divide(self, of_ranks: Sequence[Mapping[str, Any]], rank: int) -> None:
        """Divide the work among those that have opened the same file, by what `open` returned."""
        root = of_ranks[0]
        self.state = {name: unmarked(each) for name, each in root["state"].items()}
        self.shapes = shapes_from_json(root["shapes"])
        self._blocks = {name: Block(*block) for name, block in root["blocks"].items()}
        # On other nodes the number of the device may differ.
        self._is_seen_by_all = all(
            each.get("file", [])[2:] == root["file"][2:] for each in of_ranks
        )
        self._is_on_one_node = all(each.get("file") == root["file"] for each in of_ranks)
        # Only ranks that have opened the inode of rank 0 on its node read: on a different node the
        # same path may name a different file.
        workers = [
            each["worker"] if each.get("file") == root["file"] else None for each in of_ranks
        ]
        sizes = {name: block.num_bytes for name, block in self._blocks.items()}
        self._work = divide_work(sizes, workers, rank)

    def leave(self, shards: Mapping[str, Box], variables: Mapping[str, Variable]) -> None:
        """Keep large arrays in the file until all is known to be whole, where each rank sees it.

        Of some each rank needs one of the `shards`, and of the `variables` all.
        """
        # Each rank reads only its shard, so this pays on several nodes too.
        if self._is_seen_by_all:
            self.shards = {name: box for name, box in shards.items() if name in self._blocks}
        # Here every rank reads the whole variable. On one node the second read comes from the page
        # cache; on several nodes one read and a broadcast replace it.
        if self._is_on_one_node:
            self.in_place = {
                name: variable
                for name, variable in variables.items()
                if name in self._blocks and name not in self.shards and has_bytes_of_file(variable)
            }
        if self._is_seen_by_all:
            self.in_place |= {
                name: variable
                for name, variable in variables.items()
                if name in self._blocks and has_part_of_file(variable)
            }

    def read_shards(self, path: str) -> dict[str, LoadedShard]:
        """Return the parts of what has been left in the file below `path`, by the rest of it."""
        found: dict[str, LoadedShard] = {}
        for name, box in self.shards.items():
            if self._handle is not None and name.startswith(f"{path}/"):
                (shape, dtype), block = self.shapes[name], self._blocks[name]
                values = np.empty(box.sizes, dtype)
                extent = Extent(block.offset, block.num_bytes, dtype.itemsize)
                with naming_damage(self.path, name):
                    read_box(self._handle, extent, shape, box, values)
                found[name.removeprefix(f"{path}/")] = LoadedShard(shape, box, values)
        return found

    def read(self) -> Values:
        """Read this rank's part; what is wrong with it is in `damage` then."""
        part = _Part(self.path, self._handle, self._work.num_threads)
        blocks = {name: (self._blocks[name], self.shapes[name]) for name in self._work.own}
        left = self.shards.keys() | self.in_place.keys()
        # What stays in the file is only verified now, each variable by one rank. Its values are
        # read after all ranks have found everything intact.
        part.read_blocks({name: each for name, each in blocks.items() if name not in left})
        part.verify_blocks({name: block for name, (block, _) in blocks.items() if name in left})
        if self._reader is not None:
            part.read_rest(self._reader, self._blocks)
        self.damage = part.damage
        return Values(part.arrays, self._work.owners)

    def load_in_place(self) -> None:
        """Fill the variables that are `in_place`, on this rank. Local."""
        handle = self._handle
        if handle is None:
            return

        def load(name: str) -> None:
            variable = self.in_place[name]
            try:
                block = self._blocks[name]
                extent = Extent(block.offset, block.num_bytes, variable.dtype.itemsize)
                read_own(handle, extent, variable)
            except OSError as reason:
                raise CheckpointError(
                    f"The checkpoint {self.path} was whole a moment ago, but {name} cannot be read "
                    f"any more: {reason}. Some variables have their new values and others do not: "
                    "restore another checkpoint before you go on."
                ) from reason

        if self.in_place:
            # os.preadv releases the GIL, so the threads read at the same time.
            with ThreadPoolExecutor(max(self._work.num_threads, 1), "mpistrat-read") as threads:
                # The results are consumed because only that raises the error of a thread.
                for _ in threads.map(load, self.in_place):
                    pass


@contextlib.contextmanager
def open_together(collectives: Collectives, what: str, path: str) -> Iterator[SharedFile]:
    """Open a checkpoint on rank 0, and on ranks that see the same file. **Collective**.

    `what` is the public function, for messages. Raises `CheckpointError` on every rank if rank 0
    finds no checkpoint.
    """
    file, rank = SharedFile(path), collectives.rank
    with contextlib.ExitStack() as stack:
        file.divide(collectives.on_all(lambda: file.open(rank == 0, stack), what, path), rank)
        yield file


def _identity(handle: int) -> dict[str, Any]:
    """Return who has opened which file, as JSON values."""
    status = os.fstat(handle)
    return {
        "worker": this_worker(),
        "file": [socket.gethostname(), status.st_dev, status.st_ino, status.st_size],
    }


def _describe(reader: CheckpointReader) -> dict[str, Any]:
    """Return as JSON values all state of a file, and the shapes and places of its arrays."""
    try:
        state = {name: marked(reader.read_state(name)) for name in reader.state_paths}
    except CheckpointCorruptError:
        reader.verify()  # names what else is damaged
        raise
    shapes = {name: (each.shape, each.dtype) for name, each in reader.variables.items()}
    blocks = reader.blocks(BYTES_WORTH_A_THREAD)
    return {"state": state, "shapes": shapes_as_json(shapes), "blocks": blocks}


class _Part:
    """What one rank reads."""

    def __init__(self, path: str, handle: int | None, threads: int) -> None:
        self._path = path
        self._handle = handle
        self._threads = threads
        self.arrays: dict[str, np.ndarray] = {}
        self.damage: dict[str, str] = {}
        """What is wrong with a variable, by path."""

    def read_blocks(self, blocks: Mapping[str, tuple[Block, Shape]]) -> None:
        """Read large variables in several threads."""
        if self._handle is None or not blocks:
            return
        with ChecksumPool(self._threads) as digests:
            digesters = {}
            for name, (block, (shape, dtype)) in blocks.items():
                array = self.arrays[name] = np.empty(shape, dtype)
                # Each part is read right before it is hashed, in the same thread: it is then still
                # in the cache of its core. The array is a view of its memory, so nothing waits
                # here.
                digesters[name] = digests.begin(
                    before=InOrder(read_at, self._handle, block.offset), like=block.digest
                )
                digesters[name].update(array.reshape(-1), is_view=True)
            # Only after all are begun, or the variables would be read one after the other.
            for name, (block, _) in blocks.items():
                try:
                    with naming_damage(self._path, name):
                        check_digest(digesters[name].result().text, block.digest)
                except CheckpointCorruptError as error:
                    self.damage[name] = str(error)

    def verify_blocks(self, blocks: Mapping[str, Block]) -> None:
        """Check the digests of large variables without keeping them."""
        handle = self._handle
        if handle is None or not blocks:
            return

        def verify(name: str) -> None:
            block = blocks[name]
            try:
                with naming_damage(self._path, name):
                    check_digest(digest_in_file(handle, *block).text, block.digest)
            except CheckpointCorruptError as error:
                self.damage[name] = str(error)

        with ThreadPoolExecutor(max(self._threads, 1), "mpistrat-digest") as threads:
            for _ in threads.map(verify, blocks):
                pass

    def read_rest(self, reader: CheckpointReader, blocks: Container[str]) -> None:
        """Read what is small, or does not lie in the file as it does in memory."""
        for name in reader.variables:
            if name not in blocks:
                try:
                    self.arrays[name] = reader.read_variable(name)
                except CheckpointCorruptError as error:
                    self.damage[name] = str(error)


def broadcast_array(call: CollectiveCall, values: Values, name: str, of: Shape) -> np.ndarray:
    """Return one of the `values` on every rank.

    **Collective** inside of a `call` that has been agreed on.
    """
    array = values.arrays.pop(name, None)
    found = np.empty(*of) if array is None else array
    for piece in pieces(found, BYTES_PER_PIECE):
        broadcast_each(call, [piece], [values.owner(name)])
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
    senders = [_pieces_from(owner, values, variables) for owner in owners]
    # Owners, names and shapes are the same on every rank, so all ranks broadcast the same buffers
    # in the same order. A rank that ordered them differently would mix up variables, or wait
    # forever.
    for row in itertools.zip_longest(*senders):
        moving = [(owner, each) for owner, each in zip(owners, row, strict=True) if each]
        broadcast_each(call, [each.buffer for _, each in moving], [owner for owner, _ in moving])
        # Before the next row: `_pieces_to_assign` reuses the memory of a piece for the one after
        # it.
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
    """Yield what `owner` sends, as this rank needs it."""
    own = {name: each for name, each in variables.items() if values.owner(name) == owner}
    small = {name: each for name, each in own.items() if _num_bytes(each) <= _SMALL_BYTES}
    yield from _joined(small, values)
    for name, variable in own.items():
        if name in small:
            continue
        array = values.arrays.get(name)
        if array is not None or has_bytes_of_file(variable):
            # The broadcast writes straight into the storage of the variable. The pieces end where
            # those of `_pieces_to_assign` end, so sender and receivers have buffers of equal
            # length.
            memory = variable._storage if array is None else array
            yield from map(_Piece, pieces(memory, BYTES_PER_PIECE))
        else:
            yield from _pieces_to_assign(variable)


def _joined(variables: Mapping[str, Variable], values: Values) -> Iterator[_Piece]:
    """Yield many small variables as few pieces."""
    names = list(variables)
    for begin in range(0, len(names), _MOST_JOINED):
        parts, end = {}, 0
        for name in names[begin : begin + _MOST_JOINED]:
            parts[name] = slice(end, end + _num_bytes(variables[name]))
            end += -(-_num_bytes(variables[name]) // _ALIGNMENT) * _ALIGNMENT
        memory = np.zeros(end, np.uint8)
        flat = {name: memory[each].view(variables[name].dtype) for name, each in parts.items()}
        for name in flat.keys() & values.arrays.keys():
            flat[name][...] = values.arrays[name].reshape(-1)

        def assign(flat: Mapping[str, np.ndarray] = flat) -> None:
            for name in flat.keys() - values.arrays.keys():
                variables[name]._load_piece(0, flat[name])

        yield _Piece(memory, assign)


def _pieces_to_assign(variable: Variable) -> Iterator[_Piece]:
    """Yield pieces in temporary memory, which each next piece uses again."""
    size = math.prod(variable.full_shape)
    memory = np.empty(min(size, _length(variable.dtype)), variable.dtype)
    for each in cut(size, _length(variable.dtype)):
        piece = memory[: each.stop - each.start]
        yield _Piece(piece, functools.partial(variable._load_piece, each.start, piece))


def _num_bytes(variable: Variable) -> int:
    """Return how many bytes a variable has in a file."""
    return math.prod(variable.full_shape) * variable.dtype.itemsize


def _length(dtype: np.dtype) -> int:
    """Return how many elements a piece has."""
    return max(1, BYTES_PER_PIECE // dtype.itemsize)
