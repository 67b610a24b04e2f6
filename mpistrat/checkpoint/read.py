"""Parallel reading of a checkpoint by the ranks of one node, and its broadcast to other nodes.

Nothing changes before all values are known to be intact. So each of these ranks reads some of the
large variables once to check their digests. If all ranks are on this node, each then reads all
variables again, straight into its memory: the file is in the page cache by now, and a second copy
costs less than touching new memory. Otherwise the values are kept, and broadcast.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import logging
import math
import os
import socket
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mpistrat.arrays import is_on_host, pieces
from mpistrat.checkpoint.digests import check_digest
from mpistrat.checkpoint.marks import marked, unmarked
from mpistrat.checkpoint.raw_io import (
    BYTES_PER_PIECE,
    BYTES_WORTH_A_THREAD,
    ChecksumPool,
    Extent,
    InOrder,
    WorkDivision,
    divide_work,
    read_at,
    read_box,
    read_through,
    reading_ahead,
    this_worker,
)
from mpistrat.checkpoint.reader import CheckpointReader, naming_damage, open_checkpoint
from mpistrat.checkpoint.torch_hook import LoadedShard
from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.collectives.operations.broadcast import broadcast, broadcast_each
from mpistrat.errors import CheckpointCorruptError, CheckpointError
from mpistrat.options import VariableSynchronization
from mpistrat.sharding import Box, cut
from mpistrat.variables import SyncOnReadVariable, Variable
from mpistrat.variables.kinds import load_components
from mpistrat.variables.variable import placement_of, storage_of

_SMALL_BYTES, _MOST_JOINED = 1 << 15, 64
"""Largest variables that are broadcast together, in bytes, and the most of them at a time."""
_ALIGNMENT = 64
"""Each of them begins at a multiple of this many bytes."""


Shape = tuple[tuple[int, ...], np.dtype]
"""Shape and dtype of an array."""


@dataclass(frozen=True)
class Values:
    """The verified values of a file, each on one rank."""

    arrays: dict[str, np.ndarray]
    """The values on this rank, by path."""
    owners: Mapping[str, int]
    """The ranks of the values that are not on rank 0."""

    def owner(self, name: str) -> int:
        """Return the rank that has the values of a variable."""
        return self.owners.get(name, 0)


class SharedFile:
    """A checkpoint file that rank 0 has open, and that the ranks of its node read too.

    Attributes
    ----------
    path : str
        The file.
    state : dict of str to JSON values and marks
        All state, by path, on every rank.
    shapes : dict of str to Shape
        Shapes and dtypes of all arrays, by path, on every rank.
    damage : dict of str to str
        The damage of the variables that this rank has read, by path.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.state: dict[str, Any] = {}
        self.shapes: dict[str, Shape] = {}
        self.damage: dict[str, str] = {}
        self.reader: CheckpointReader | None = None
        """The reader, on rank 0 only."""
        self._handle: int | None = None
        self._extents: dict[str, Extent] = {}
        """Extents of the large variables that the file stores as memory does."""
        self._work = WorkDivision({}, (), 0)
        self._is_seen_by_all = False
        self._is_on_one_node = False
        self.shards: dict[str, Box] = {}
        """The parts that this rank needs of arrays that no rank keeps as a whole."""
        self.in_place: dict[str, Variable] = {}
        """The variables that each rank reads by itself, into their memory."""

    def open(self, is_root: bool, stack: contextlib.ExitStack) -> dict[str, Any]:
        """Open the file until `stack` is closed, and return its description for other ranks."""
        if is_root:
            # h5py walks the tree of the file in many small reads. Meanwhile a thread reads the rest
            # from the disk into the page cache.
            with reading_ahead(self.path):
                self.reader = stack.enter_context(open_checkpoint(self.path))
            self._handle = self.reader.handle
            return {**_identity(self._handle), **_describe(self.reader)}
        try:
            self._handle = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)  # may be a pipe here
        except OSError:
            # Not an error: other ranks then read for this one, and broadcast.
            return {}
        stack.callback(os.close, self._handle)
        return _identity(self._handle)

    def divide(self, of_ranks: Sequence[Mapping[str, Any]], rank: int) -> None:
        """Divide the work among ranks that have opened the same file; `open` returns `of_ranks`."""
        root = of_ranks[0]
        self.state = {name: unmarked(each) for name, each in root["state"].items()}
        self.shapes = {
            name: (tuple(shape), np.dtype(dtype)) for name, (shape, dtype) in root["shapes"].items()
        }
        self._extents = {name: Extent(*each) for name, each in root["extents"].items()}
        # On a different node the same file may have a different device number.
        self._is_seen_by_all = all(
            each.get("file", [])[2:] == root["file"][2:] for each in of_ranks
        )
        self._is_on_one_node = all(each.get("file") == root["file"] for each in of_ranks)
        # Only ranks that have opened rank 0's inode, on its node, read: on a different node the
        # same path may name a different file.
        workers = [
            each["worker"] if each.get("file") == root["file"] else None for each in of_ranks
        ]
        sizes = {name: each.num_bytes for name, each in self._extents.items()}
        self._work = divide_work(sizes, workers, rank)

    def leave(self, shards: Mapping[str, Box], variables: Mapping[str, Variable]) -> None:
        """Leave large arrays in the file until all is known to be intact, if all ranks see it.

        A rank later reads its part of an array in `shards`, and all of an array in `variables`.
        """
        # Each rank reads only its shard, so this is faster on several nodes too.
        if self._is_seen_by_all:
            self.shards = {name: box for name, box in shards.items() if name in self._extents}
        # Here every rank reads the whole variable. On one node the second read is served from the
        # page cache; on several nodes one read and a broadcast are faster.
        if self._is_on_one_node:
            self.in_place = {
                name: variable
                for name, variable in variables.items()
                if name in self._extents and name not in self.shards and _has_bytes(variable)
            }
        if self._is_seen_by_all:
            self.in_place |= {
                name: variable
                for name, variable in variables.items()
                if name in self._extents and _has_part(variable)
            }

    def read_shards(self, path: str) -> dict[str, LoadedShard]:
        """Return the shards that were left in the file below `path`, by the rest of their path."""
        found: dict[str, LoadedShard] = {}
        for name, box in self.shards.items():
            if self._handle is not None and name.startswith(f"{path}/"):
                values = np.empty(box.sizes, self.shapes[name][1])
                with naming_damage(self.path, name):
                    read_box(self._handle, self._extents[name], box, values)
                found[name.removeprefix(f"{path}/")] = LoadedShard(box, values)
        return found

    def read(self) -> Values:
        """Read this rank's part; `damage` then describes the damage in it."""
        part = _Part(self.path, self._handle, self._work.num_threads)
        left = self.shards.keys() | self.in_place.keys()
        own = {name: self._extents[name] for name in self._work.own}
        # Arrays that stay in the file are only verified now, each variable by one rank. Their
        # values are read after all ranks have found everything intact.
        part.read_large({n: each for n, each in own.items() if n not in left}, self.shapes)
        part.verify_large({name: each for name, each in own.items() if name in left})
        if self.reader is not None:
            part.read_rest(self.reader, self._extents)
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
                _read_own(handle, self._extents[name], variable)
            except OSError as reason:
                raise CheckpointError(
                    f"The checkpoint {self.path} was intact a moment ago, but {name} can no longer "
                    f"be read: {reason}. Some variables have their new values and others do not. "
                    "Restore a different checkpoint before you continue."
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
    does not find a checkpoint.
    """
    file, rank = SharedFile(path), collectives.rank
    with contextlib.ExitStack() as stack:
        file.divide(collectives.on_all(lambda: file.open(rank == 0, stack), what, path), rank)
        yield file


def _identity(handle: int) -> dict[str, Any]:
    """Return as JSON values which rank has opened which file."""
    status = os.fstat(handle)
    return {
        "worker": this_worker(),
        "file": [socket.gethostname(), status.st_dev, status.st_ino, status.st_size],
    }


def _describe(reader: CheckpointReader) -> dict[str, Any]:
    """Return as JSON values all state of a file, and the shapes and extents of its arrays."""
    try:
        state = {name: marked(reader.read_state(name)) for name in reader.state_paths}
    except CheckpointCorruptError:
        reader.verify()  # its error names everything that is damaged
        raise
    shapes = {name: (each.shape, each.dtype.str) for name, each in reader.variables.items()}
    extents = reader.extents(BYTES_WORTH_A_THREAD)
    return {"state": state, "shapes": shapes, "extents": extents}


class _Part:
    """The part of a file that one rank reads."""

    def __init__(self, path: str, handle: int | None, threads: int) -> None:
        self._path = path
        self._handle = handle
        self._threads = threads
        self.arrays: dict[str, np.ndarray] = {}
        self.damage: dict[str, str] = {}
        """The damage of a variable, by path."""

    def read_large(self, extents: Mapping[str, Extent], shapes: Mapping[str, Shape]) -> None:
        """Read large variables in several threads."""
        if self._handle is None or not extents:
            return
        with ChecksumPool(self._threads) as digests:
            digesters = {}
            for name, extent in extents.items():
                array = self.arrays[name] = np.empty(*shapes[name])
                # Each part is read right before it is hashed, in the same thread, while it is still
                # in the cache of that core. The array is a view of its memory, so no piece waits
                # here.
                digesters[name] = digests.begin(
                    before=InOrder(read_at, self._handle, extent.offset)
                )
                digesters[name].update(array.reshape(-1), is_view=True)
            # Only after all have begun, or the variables would be read one after the other.
            for name, digester in digesters.items():
                with self._noting_damage(name), naming_damage(self._path, name):
                    check_digest(digester.result().text, extents[name].digest)

    def verify_large(self, extents: Mapping[str, Extent]) -> None:
        """Check the digests of large variables without keeping them."""
        handle = self._handle
        if handle is None or not extents:
            return

        def verify(name: str) -> None:
            with self._noting_damage(name), naming_damage(self._path, name):
                check_digest(read_through(handle, extents[name]).digest, extents[name].digest)

        with ThreadPoolExecutor(max(self._threads, 1), "mpistrat-digest") as threads:
            for _ in threads.map(verify, extents):
                pass

    def read_rest(self, reader: CheckpointReader, large: Container[str]) -> None:
        """Read variables that are small, or that the file does not store as memory does."""
        for name in reader.variables:
            if name not in large:
                with self._noting_damage(name):
                    self.arrays[name] = reader.read_variable(name)

    @contextlib.contextmanager
    def _noting_damage(self, name: str) -> Iterator[None]:
        try:
            yield
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

    **Collective** like `broadcast_array`. All ranks that have values send their next pieces at the
    same time. A rank assigns its own values at the end, when no other rank waits for it.
    """
    # The last path of a variable counts, on all ranks.
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
        # Before the next row, because `_pieces_to_assign` reuses the memory of a piece for the next
        # piece.
        for _, each in moving:
            each.assign()
    for name, variable in variables.items():
        own = values.arrays.pop(name, None)
        if own is not None:
            begin = 0
            for piece in pieces(own, BYTES_PER_PIECE):
                _load(variable, begin, piece)
                begin += piece.size


@dataclass(frozen=True)
class _Piece:
    """A part of a variable on its way between ranks."""

    buffer: np.ndarray
    """The data to send, or the memory to receive into."""
    assign: Callable[[], object] = bool
    """Called once the data has arrived."""


def _pieces_from(owner: int, values: Values, variables: Mapping[str, Variable]) -> Iterator[_Piece]:
    """Yield the pieces that `owner` sends, as this rank needs them."""
    own = {name: each for name, each in variables.items() if values.owner(name) == owner}
    small = {name: each for name, each in own.items() if _num_bytes(each) <= _SMALL_BYTES}
    yield from _joined(small, values)
    for name, variable in own.items():
        if name in small:
            continue
        array = values.arrays.get(name)
        if array is not None or _has_bytes(variable):
            # The broadcast writes straight into the storage of the variable. The pieces have the
            # same limits as in `_pieces_to_assign`, so the buffers of sender and receivers are
            # equally long.
            memory = storage_of(variable) if array is None else array
            yield from map(_Piece, pieces(memory, BYTES_PER_PIECE))
        else:
            yield from _pieces_to_assign(variable)


def _joined(variables: Mapping[str, Variable], values: Values) -> Iterator[_Piece]:
    """Yield many small variables as a few pieces."""
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
                _load(variables[name], 0, flat[name])

        yield _Piece(memory, assign)


def _pieces_to_assign(variable: Variable) -> Iterator[_Piece]:
    """Yield pieces in temporary memory, which the next piece reuses."""
    size = math.prod(variable.full_shape)
    memory = np.empty(min(size, _length(variable.dtype)), variable.dtype)
    for each in cut(size, _length(variable.dtype)):
        piece = memory[: each.stop - each.start]
        yield _Piece(piece, functools.partial(_load, variable, each.start, piece))


def _load(variable: Variable, start: int, piece: np.ndarray) -> None:
    variable._load_piece(start, piece)


def _num_bytes(variable: Variable) -> int:
    """Return how many bytes a variable has in a file."""
    return math.prod(variable.full_shape) * variable.dtype.itemsize


def _length(dtype: np.dtype) -> int:
    """Return how many elements a piece has."""
    return max(1, BYTES_PER_PIECE // dtype.itemsize)


def _host_part(variable: Variable) -> tuple[Box | None, np.ndarray] | None:
    """Return the host memory that holds the stored bytes of `variable`, and which part they are.

    The part is ``None`` for all elements. Without such memory return ``None``: the components of a
    SyncOnRead variable, for example, are computed from the values in a file.
    """
    placement = placement_of(variable)
    if variable.synchronization is VariableSynchronization.ON_READ or not placement.is_here:
        return None
    storage = storage_of(variable)
    return (placement.box, placement.own_storage(storage)) if is_on_host(storage) else None


def _has_bytes(variable: Variable) -> bool:
    """Return whether the memory of `variable` holds all bytes of the file."""
    part = _host_part(variable)
    return part is not None and part[0] is None


def _has_part(variable: Variable) -> bool:
    """Return whether the memory of `variable` holds a part of the bytes of the file."""
    part = _host_part(variable)
    return part is not None and part[0] is not None


def _read_own(handle: int, extent: Extent, variable: Variable) -> None:
    """Read the part of a variable that this rank stores; the file has it at `extent`."""
    part = _host_part(variable)
    assert part is not None
    box, own = part
    # `read_at` reads the bytes of the file directly into the storage of the variable, without
    # another copy.
    if box is None:
        read_at(handle, extent.offset, own)
    else:
        read_box(handle, extent, box, own)


Kept: TypeAlias = tuple[int, dict[int, np.ndarray]]
"""The number of replicas, and the components of some of them."""

_WHAT = "Checkpoint.restore"
_logger = logging.getLogger("mpistrat")


def read_components(
    collectives: Collectives,
    file: SharedFile,
    variables: Mapping[str, Variable],
    others: Collection[str],
) -> dict[str, np.ndarray | None]:
    """Return components of the same number of replicas, on rank 0, by path. **Collective**.

    `others` are the paths of variables that the program has not created yet. Their strategy may be
    unknown.
    """
    if not collectives.arithmetic and not (others and collectives.layout.num_replicas == 1):
        return {}  # the strategy has no num_replicas=
    wanted = [name for name, each in variables.items() if isinstance(each, SyncOnReadVariable)]
    num_replicas = collectives.layout.num_replicas
    found: dict[str, np.ndarray] = {}

    def read() -> list[str]:
        reader = file.reader
        assert reader is not None  # only rank 0 has one
        arithmetic = reader.header.arithmetic
        if collectives.arithmetic and arithmetic not in ("", collectives.arithmetic):
            _logger.warning(
                "Checkpoint %s was written by ranks with different arithmetic (%s, here %s), so "
                "the bits may differ from now on. Use the same type of CPU and the same "
                "OPENBLAS_NUM_THREADS (mpistrat run: --threads) as that job.",
                *(file.path, arithmetic, collectives.arithmetic),
            )
        # With a different number of replicas, the components belong to none of today's replicas.
        # The variables then keep the values that the restore has computed from the total.
        is_fitting = reader.header.num_replicas == num_replicas
        names = wanted if is_fitting and collectives.arithmetic else []
        if is_fitting or num_replicas == 1:
            names = [*names, *others]
        present = reader.replicas.keys() & set(names)
        found.update((name, reader.read_replicas(name)) for name in names if name in present)
        return list(found)

    names = collectives.on_root(read, _WHAT, file.path)
    return {name: found.get(name) for name in names}


def load_all_components(
    collectives: Collectives,
    components: Mapping[str, np.ndarray | None],
    variables: Mapping[str, Variable],
) -> None:
    """Set each variable to the components that rank 0 has. **Collective**."""
    for name, of_root in components.items():
        if name in variables:
            variable = variables[name]
            assert isinstance(variable, SyncOnReadVariable)
            values = _on_all(collectives, of_root, variable.shape, variable.dtype)
            load_components(variable, dict(enumerate(values)))


def keep_components(
    collectives: Collectives,
    components: Mapping[str, np.ndarray | None],
    shapes: Mapping[str, Shape],
) -> dict[str, Kept]:
    """Return the `components` in `shapes` that this rank may need. **Collective**."""
    kept = {}
    for name, of_root in components.items():
        if name in shapes:
            values = _on_all(collectives, of_root, *shapes[name])
            # An elastic job may assign any replica to any rank before the variable is created.
            is_known = collectives.layout.num_replicas == len(values) and not collectives.is_elastic
            rows = collectives.layout.local_replicas if is_known else range(len(values))
            kept[name] = len(values), {row: values[row].copy() for row in rows}
    return kept


def _on_all(
    collectives: Collectives, of_root: np.ndarray | None, shape: tuple[int, ...], dtype: np.dtype
) -> np.ndarray:
    values = of_root
    if values is None:
        values = np.empty((collectives.layout.num_replicas, *shape), dtype)
    with collectives.call(_WHAT) as call:
        received: np.ndarray = broadcast(call, values)
    return received
