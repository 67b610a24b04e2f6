"""Placements: which elements of a variable each rank stores, updates and saves.

A variable has a name, a placement and a synchronization. Writes, checkpoints and optimizers ask the
placement for this rank's elements, and need not know which kind of placement it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from mpistrat import context
from mpistrat.arrays import Array, Device, host_view, namespace_of, native, place, taken
from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.collectives.operations.broadcast import broadcast
from mpistrat.collectives.reduction import dtype_name
from mpistrat.comm.shared_memory import share_memory_file
from mpistrat.sharding import Box, cut
from mpistrat.system.text import readable_size
from mpistrat.values import IndexedSlices
from mpistrat.variables.axis_split import AxisSplit
from mpistrat.variables.initial import InitialValue
from mpistrat.variables.row_exchange import (
    Partition,
    collect_rows,
    gather_rows,
    scatter_rows,
    send_rows,
)
from mpistrat.variables.slice_writes import SliceWrite
from mpistrat.variables.writes import Target, Write

BYTES_PER_PIECE = 2**22
"""Number of bytes that rank 0 receives at a time."""

Made: TypeAlias = "tuple[Whole, np.ndarray, tuple[int, ...]]"
"""A placement, this rank's initial elements, and the shape of the variable's values."""


class Making(NamedTuple):
    """The properties of a new variable that its placement needs to know."""

    name: str
    strategy: context.Strategy
    split_axis: int | None
    modes: Callable[[np.dtype], tuple[object, ...]]
    """Function that returns the properties, besides shape and dtype, that must be equal."""


class Whole:
    """Every rank stores and updates all elements. Base of the other placements."""

    is_here = True
    """Whether this process has the memory; otherwise a different process has it."""
    is_in_parts = False
    """Whether no rank stores all elements, so that a save collects them piece by piece."""
    is_divided = False
    """Whether all ranks of the strategy divide the elements among them."""
    ranges: tuple[range, ...] | None = None
    """Elements of the flat value that each rank updates, if these need not be whole rows."""
    stage: list[np.ndarray] | None = None
    """Flat gradient buffers of all ranks, if they are in memory that all ranks share."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape
        """Shape of the whole variable."""

    @classmethod
    def make(cls, call: CollectiveCall, initial: InitialValue, by: Making) -> Made:
        """Place a new variable. **Collective**."""
        value = initial.whole(by.name)
        # Every rank evaluates its initial value, so that shape and dtype can be compared. But all
        # use rank 0's value, because a function that draws random numbers returns a different value
        # on each rank.
        return cls(value.shape), broadcast(call, value, by.modes(value.dtype)), value.shape

    def device(self, of_replica: Device) -> Device:
        """Return the device of the memory, for a replica on the device `of_replica`."""
        return of_replica

    def task(self, rank: int) -> int:
        """Return the rank whose device stores the component of `rank`."""
        return rank

    def memory(self, storage: Array) -> Array:
        """Return `storage`, or raise if it no longer exists."""
        return storage

    def view(self, storage: Array) -> Array:
        """Return the read-only view that the replica reads."""
        view: Array = storage.view()  # `read_only` inlined, because programs read often
        if type(view) is np.ndarray:
            view.setflags(write=False)
        return view

    def own_storage(self, storage: Array) -> Array:
        """Return the memory that this rank updates."""
        return storage

    def own(self, value: Any) -> Any:
        """Return this rank's part of a checked `value` of the whole, or of slices."""
        return value

    def apart(self, value: Any, storage: Array) -> Any:
        """Return a checked `value` in memory that no other rank writes to."""
        return value

    def merge(self, call: CollectiveCall, write: Write, target: Target, value: Any) -> Any:
        """Merge the replicas' values, and return this rank's part. **Collective**."""
        return self.own(write.merged(call, target, value))

    def settle(self, name: str) -> None:
        """Wait if other ranks read the elements that this one has updated. **Collective** then."""

    def note_written(self) -> None:
        """Drop copies of the old contents of the memory."""

    def lose_copies(self) -> None:
        """Drop buffers and copies, when the strategy is closed."""

    @property
    def box(self) -> Box | None:
        """The part that this rank stores, ``None`` if it stores all elements or none."""
        return None

    @property
    def saves_own(self) -> bool:
        """Whether this rank saves its box, and not a different rank with the same elements."""
        return True

    @property
    def num_holders(self) -> int:
        """Number of ranks that save the whole together."""
        return 1

    def pieces(
        self, ranks: Collectives, name: str, dtype: np.dtype, storage: Array | None
    ) -> Iterator[np.ndarray | None]:
        """Yield the elements in order, some at a time, on rank 0. **Collective**."""
        raise NotImplementedError  # called only if the variable is in parts

    def load(self, storage: Array, start: int, piece: np.ndarray, device: Device) -> None:
        """Set this rank's elements of a piece of the flat whole, which begins at `start`."""
        # Storage is in C order, so this is a view. Without C order it would be a copy, and the
        # write would be lost.
        flat = storage.reshape(-1)
        flat[start : start + piece.size] = place(piece, device)

    def load_all(self, storage: Array, value: Any) -> None:
        """Set this rank's elements from a checked `value` of the whole."""
        storage[...] = self.own(value)

    def copied(self, name: str, storage: Array) -> tuple[Whole, Array]:
        """Return placement and memory of a copy. **Collective** in memory that ranks share."""
        return self, storage.copy()


class Remote(Whole):
    """Other ranks store all elements. The variable asks them by messages."""

    is_here = False

    def device(self, of_replica: Device) -> Device:
        """Return the device on which values are received: the host."""
        return Device("cpu")

    def __init__(self, shape: tuple[int, ...], is_in_parts: bool) -> None:
        super().__init__(shape)
        self.is_in_parts = is_in_parts


class Flat(Whole):
    """Each rank stores and updates some elements of the flat value, for sharded slots.

    This also divides a scalar or a single long row.
    """

    is_in_parts = is_divided = True

    def __init__(self, shape: tuple[int, ...], partition: Partition, rank: int) -> None:
        super().__init__(shape)
        self.partition, self._rank = partition, rank
        self.ranges = partition.ranges

    @classmethod
    def make(cls, call: CollectiveCall, initial: InitialValue, by: Making) -> Made:
        """Place a new variable of zeros. **Collective**."""
        initial.check()
        shape = initial.shape or ()
        partition = _partition(math.prod(shape), None, call.channel.size)
        _agree_on_parts(call, partition, shape, by.modes(initial.dtype), initial.dtype)
        made = cls(shape, partition, call.channel.rank)
        # Nothing is sent: this is only for slots, which start at zero on all ranks.
        return made, np.zeros(len(made.own_elements), initial.dtype), shape

    @property
    def own_rows(self) -> range:
        """Range that this rank stores, in units of the partition: elements, or rows."""
        return self.partition.ranges[self._rank]

    @property
    def own_elements(self) -> range:
        """Elements of the flat value that this rank updates."""
        return self.own_rows

    def own(self, value: Any) -> Any:
        """Return this rank's part of a checked `value` of the whole, or of slices."""
        own = self.own_elements
        if not isinstance(value, IndexedSlices):
            return value.reshape(-1)[own.start : own.stop]
        # Slices have row numbers, but a part may begin inside a row, so they are expanded to
        # elements. The result counts from the start of this part, because this rank writes only to
        # its part.
        indices, values = elements_of(value), value.values.reshape(-1)
        mine = (indices >= own.start) & (indices < own.stop)
        return IndexedSlices(taken(values, mine), indices[mine] - own.start)

    @property
    def box(self) -> Box:
        """The part that this rank stores, of the flat whole."""
        own = self.own_elements
        return Box((math.prod(self.shape),), (own.start,), (len(own),))

    @property
    def num_holders(self) -> int:
        """Number of ranks that save the whole together."""
        return self.partition.num_parts

    def gather(self, call: CollectiveCall, storage: Array) -> np.ndarray:
        """Return all elements, on the host of every rank. **Collective**."""
        return gather_rows(call, self.partition, storage).reshape(self.shape)

    def pieces(
        self, ranks: Collectives, name: str, dtype: np.dtype, storage: Array | None
    ) -> Iterator[np.ndarray | None]:
        """Yield the elements in order, some at a time, on rank 0. **Collective**."""
        assert storage is not None
        num_rows = self.partition.num_rows
        size_of_row = max(math.prod(self.shape) // max(num_rows, 1), 1)
        for rows in cut(num_rows, max(1, _elements_per_piece(dtype) // size_of_row)):
            with ranks.call("save of sharded variable", name) as call:
                call.agree(rows.start)
                piece = collect_rows(call, self.partition, storage, rows)
            # Yields after the call has ended: the caller may call collectives between two pieces,
            # and inside the call these would raise an error for the overlap.
            yield None if piece is None else piece.reshape(-1)

    def load(self, storage: Array, start: int, piece: np.ndarray, device: Device) -> None:
        """Set this rank's elements of a piece of the flat whole, which begins at `start`."""
        own = self.own_elements
        first, last = max(start, own.start), min(start + piece.size, own.stop)
        if first < last:
            # In shared memory, too, a rank writes only its own elements, so that no two ranks write
            # to the same place.
            flat = self.own_storage(storage).reshape(-1)
            part = place(piece[first - start : last - start], device)
            flat[first - own.start : last - own.start] = part


class Rows(Flat):
    """Each rank stores and updates some rows: a sharded variable."""

    def __init__(self, shape: tuple[int, ...], partition: Partition, rank: int) -> None:
        super().__init__(shape, partition, rank)
        # No other rank stores these rows, so after a step there is nothing to send. A step gathers
        # the weights of variables that have `ranges`.
        self.ranges = None

    @classmethod
    def make(cls, call: CollectiveCall, initial: InitialValue, by: Making) -> Made:
        """Place a new variable. **Collective**."""
        initial.check()
        rank, size, wanted = call.channel.rank, call.channel.size, initial.num_parts
        if not initial.is_made_in_parts:
            whole = initial.whole(by.name)
            partition = _partition(whole.shape[0], wanted, size)
            modes = by.modes(whole.dtype)
            # Before rows are sent: different shapes would mean different counts, and MPI would fail
            # with a truncated message or wait forever.
            _agree_on_parts(call, partition, whole.shape, modes, whole.dtype, wanted)
            own = scatter_rows(call, partition, whole)
            return cls(whole.shape, partition, rank), own, whole.shape
        shape = initial.shape or ()
        partition = _partition(shape[0], wanted, size)
        rows = partition.ranges[rank]
        own = np.zeros((0, *shape[1:]), initial.dtype)
        if rows:
            # Called before the ranks agree, so that all ranks learn of an error in the program's
            # function.
            own = initial.rows(by.name, rows)
        _agree_on_parts(call, partition, shape, by.modes(own.dtype), own.dtype, wanted)
        # `copy` makes the rows C-ordered, whatever the function returned. Writes in place rely on
        # that.
        return cls(shape, partition, rank), own.copy(), shape

    @property
    def own_elements(self) -> range:
        """Elements of the flat value that this rank updates."""
        size = math.prod(self.shape[1:])
        return range(self.own_rows.start * size, self.own_rows.stop * size)

    def own(self, value: Any) -> Any:
        """Return this rank's part of a checked `value` of the whole, or of slices."""
        rows = self.own_rows
        if not isinstance(value, IndexedSlices):
            return value[rows.start : rows.stop]
        size = self._places_in_row(value)
        mine = (value.indices >= rows.start * size) & (value.indices < rows.stop * size)
        return IndexedSlices(taken(value.values, mine), value.indices[mine] - rows.start * size)

    def _places_in_row(self, slices: IndexedSlices) -> int:
        """Return how many indices of checked `slices` belong to one row."""
        leading = len(self.shape) - slices.values.ndim + 1
        return math.prod(self.shape[1:leading])

    def merge(self, call: CollectiveCall, write: Write, target: Target, value: Any) -> Any:
        """Merge the replicas' values, and return this rank's part. **Collective**."""
        if not isinstance(write, SliceWrite):
            return super().merge(call, write, target, value)
        # Slices are sent only to the ranks that store their rows.
        given = write.contribution(call, target, value)
        size = self._places_in_row(given)
        row = given.values.shape[1:]
        call.agree(target.aggregation.name, dtype_name(given.values.dtype), row)
        # Checked slices have indices over all leading axes. A row of the first axis has `size` of
        # them, possibly 0.
        rows = given.indices // max(size, 1)
        indices, values = send_rows(call, self.partition, rows, given.indices, given.values)
        # They arrive in rank order, so an owner combines duplicates in the same order as all ranks
        # do for a mirrored variable.
        return self.own(IndexedSlices(place(values, target.device), indices))


class NodeMemory(Flat):
    """All ranks of the node store one copy in shared memory; each rank updates some elements."""

    is_in_parts = False

    def __init__(
        self, shape: tuple[int, ...], partition: Partition, rank: int, strategy: context.Strategy
    ) -> None:
        super().__init__(shape, partition, rank)
        self._strategy = strategy
        self._on_device: Array | None = None
        """A copy for the replica, until the next write."""

    @classmethod
    def make(cls, call: CollectiveCall, initial: InitialValue, by: Making) -> Made:
        """Place a new variable. **Collective**."""
        whole = None if initial.is_zero else initial.whole(by.name)
        shape = initial.shape or () if whole is None else whole.shape
        dtype = initial.dtype if whole is None else whole.dtype
        call.agree((dtype_name(dtype), shape), by.modes(dtype))
        size, rank = math.prod(shape), call.channel.rank
        made = cls(shape, _partition(size, None, call.channel.size), rank, by.strategy)
        memory = take_node_memory(call, size * dtype.itemsize, f"The variable {by.name!r}")
        storage = memory.view(dtype).reshape(shape)
        if whole is not None:
            made.own_storage(storage)[...] = scatter_rows(call, made.partition, whole.reshape(-1))
            # No rank may read before all have written their elements. For zeros no wait is needed,
            # because the pages of the system are already cleared.
            call.agree("with its initial value")
        return made, storage, shape

    def device(self, of_replica: Device) -> Device:
        """Return the device of the memory, which is the host."""
        return Device("cpu")

    def task(self, rank: int) -> int:
        """Return the rank whose device stores the component of `rank`: the first one."""
        return 0

    def memory(self, storage: Array) -> Array:
        """Return `storage`, or raise if the strategy was closed, which frees it."""
        collectives = context.collectives_of(self._strategy)
        if collectives.is_closed and collectives.channel.closed is not None:
            raise collectives.channel.closed
        return storage

    def view(self, storage: Array) -> Array:
        """Return a read-only view; on a GPU a copy, which is renewed after each write."""
        memory, device = self.memory(storage), context.collectives_of(self._strategy).device
        if device.kind == "cpu":
            return read_only(memory)
        if self._on_device is None:
            self._on_device = place(memory, device)
        return self._on_device[...]  # a view: read_value copies only views

    def own_storage(self, storage: Array) -> Array:
        """Return the memory that this rank updates, flat."""
        own = self.own_elements
        flat: Array = storage.reshape(-1)
        return flat[own.start : own.stop]

    def apart(self, value: Any, storage: Array) -> Any:
        """Return a checked `value`, copied if it is in the memory that the ranks will write to."""
        if isinstance(value, IndexedSlices):
            return IndexedSlices(
                self.apart(value.values, storage), self.apart(value.indices, storage)
            )
        # As soon as the ranks agree, a different rank may overwrite elements that this one has yet
        # to read. `may_share_memory` compares only bounds, so at worst it causes a needless copy.
        is_ours = isinstance(value, np.ndarray) and np.may_share_memory(value, storage)
        return value.copy() if is_ours else value

    def settle(self, name: str) -> None:
        """Wait until every rank has written its part. **Collective**."""
        self.note_written()
        collectives = context.collectives_of(self._strategy)
        if collectives.size > 1:
            # Otherwise a fast rank would read elements that a slow one has yet to write.
            with collectives.call("write of central variable", name) as call:
                call.agree()

    def note_written(self) -> None:
        """Forget the copy on the device."""
        self._on_device = None

    def lose_copies(self) -> None:
        """Drop buffers and copies, when the strategy is closed."""
        self._on_device = self.stage = None

    def set_stage(self, memory: Sequence[np.ndarray], dtype: np.dtype) -> None:
        """Use `memory`, one array per rank, as gradient buffers."""
        self.stage = [of_rank.view(dtype) for of_rank in memory]

    def load(self, storage: Array, start: int, piece: np.ndarray, device: Device) -> None:
        """Set this rank's elements of a piece of the flat whole from element `start`."""
        super().load(storage, start, piece, device)
        self.note_written()

    def load_all(self, storage: Array, value: Any) -> None:
        """Set all elements. All ranks write the same values, so they need not wait."""
        self.memory(storage)[...] = value
        self.note_written()

    def copied(self, name: str, storage: Array) -> tuple[Whole, Array]:
        """Return placement and memory of a copy. **Collective**."""
        twin = type(self)(self.shape, self.partition, self._rank, self._strategy)
        with context.collectives_of(self._strategy).call("copy of central variable", name) as call:
            call.agree()
            memory = take_node_memory(call, storage.nbytes, f"A copy of {name!r}")
            copy = memory.view(storage.dtype).reshape(storage.shape)
            twin.own_storage(copy)[...] = self.own_storage(storage)
            # Each rank has copied only its own elements, and a read needs all of them.
            call.agree("written")
        return twin, copy


class Axis(Whole):
    """Each rank of a replica stores a part along one axis. All replicas store the same parts."""

    is_in_parts = True

    def __init__(self, split: AxisSplit, strategy: context.Strategy) -> None:
        super().__init__(split.shape)
        self._split, self._strategy = split, strategy

    @classmethod
    def make(cls, call: CollectiveCall, initial: InitialValue, by: Making) -> Made:
        """Place a new variable. **Collective**."""
        initial.check()
        axis, layout = by.split_axis, context.layout_of(by.strategy)
        assert axis is not None
        whole = None if initial.is_made_in_parts else initial.whole(by.name)
        shape = (initial.shape or ()) if whole is None else whole.shape
        split = AxisSplit(shape, axis, layout.ranks_per_replica, layout.shard)
        if whole is not None:
            own = split.cut_own(broadcast(call, whole, by.modes(whole.dtype)))
        else:
            own = np.zeros(split.own_shape, initial.dtype)
            # The function runs before the ranks agree, so that all of them learn of its error.
            if own.size and not initial.is_zero:
                own = initial.part(by.name, own.shape, split.own_offset)
            call.agree((dtype_name(own.dtype), shape), by.modes(own.dtype))
            if not initial.is_zero:
                # The replicas must begin with the same bits, but each has called the function
                # itself, which may draw random numbers.
                own = _of_first_replica(call, by, own)
        return cls(split, by.strategy), np.array(own, order="C"), own.shape

    @property
    def box(self) -> Box:
        """The part that this rank stores."""
        return Box(self.shape, self._split.own_offset, self._split.own_shape)

    @property
    def saves_own(self) -> bool:
        """Whether this rank belongs to the first replica."""
        return bool(context.layout_of(self._strategy).replica_id == 0)

    @property
    def num_holders(self) -> int:
        """Number of ranks that save the whole together."""
        return self._split.num_parts

    def pieces(
        self, ranks: Collectives, name: str, dtype: np.dtype, storage: Array | None
    ) -> Iterator[np.ndarray | None]:
        """Yield the whole in its flat order, some at a time, on rank 0. **Collective**."""
        layout, mine = context.layout_of(self._strategy), np.empty(0, dtype)
        for number, slab in enumerate(self._split.slabs(_elements_per_piece(dtype))):
            counts = [0] * layout.num_ranks
            # Only the ranks of the first replica send, which are the first ranks of all. The others
            # send nothing but take part, because a gather needs every rank.
            counts[: layout.ranks_per_replica] = self._split.counts(slab)
            with ranks.call("save of split variable", name) as call:
                call.agree(number)
                with call.moving():
                    if self.saves_own and storage is not None:
                        mine = native(host_view(self._split.own_of(slab, storage)))
                    call.note_moved(mine.nbytes, "gather")
                    joined = call.channel.transport.gather(mine, counts, 0)
            if joined is None:
                yield None
            else:
                bounds = np.cumsum(counts)[: layout.ranks_per_replica - 1]
                yield self._split.join(slab, np.split(joined[: sum(counts)], bounds))

    def load(self, storage: Array, start: int, piece: np.ndarray, device: Device) -> None:
        """Set this rank's elements of a piece of the flat whole, which begins at `start`."""
        self._split.fill(storage, start, place(piece, device))

    def load_all(self, storage: Array, value: Any) -> None:
        """Set the part of this rank."""
        storage[...] = self._split.cut_own(value)


def read_only(storage: Array) -> Array:
    """Return a view of `storage`, which cannot be written to on the host."""
    view: Array = storage.view()
    if type(view) is np.ndarray:
        view.setflags(write=False)
    return view


def elements_of(slices: IndexedSlices) -> Array:
    """Return the indices, in the flat value, of the elements of checked `slices`."""
    size = math.prod(slices.values.shape[1:])
    numbers = namespace_of(slices.indices).arange(size)
    elements: Array = (slices.indices[:, None] * size + numbers).reshape(-1)
    return elements


def take_node_memory(call: CollectiveCall, num_bytes: int, what: str) -> np.ndarray:
    """Return zeros that all ranks share, for `what`. **Collective**, once agreed."""
    if call.channel.size == 1:
        return np.zeros(num_bytes, np.uint8)
    with call.communicator() as comm:
        memory = share_memory_file(comm, num_bytes)
    # All ranks raise or none does, so none is left waiting.
    if memory is None:
        raise ValueError(
            f"{what} needs {readable_size(num_bytes)} ({num_bytes} bytes) of shared memory, but "
            "the system does not provide it: its memory or the limits of a process (ulimit -v, "
            "-n, -f) are too small, or there is no memfd_create. Use MPIStrategy, which keeps a "
            "copy on each rank."
        )
    return memory


def _elements_per_piece(dtype: np.dtype) -> int:
    return max(1, BYTES_PER_PIECE // dtype.itemsize)


def _partition(num_rows: int, num_parts: int | None, num_ranks: int) -> Partition:
    """Return the partition into `num_parts`, limited to the number of rows and of ranks."""
    wanted = num_ranks if num_parts is None else num_parts
    return Partition(num_rows, max(1, min(wanted, num_rows, num_ranks)), num_ranks)


def _agree_on_parts(
    call: CollectiveCall,
    partition: Partition,
    shape: tuple[int, ...],
    modes: tuple[object, ...],
    dtype: np.dtype,
    num_wanted: int | None = None,
) -> None:
    parts = f"{partition.num_parts} parts"
    if num_wanted not in (None, partition.num_parts):
        # Different partitioners may want more parts than there are rows or ranks.
        parts += f" of {num_wanted} wanted"
    call.agree(parts, (dtype_name(dtype), shape), modes)


def _of_first_replica(call: CollectiveCall, by: Making, own: np.ndarray) -> np.ndarray:
    """Return the part that the first replica has created. **Collective**."""
    if context.replicas_of(by.strategy) is context.collectives_of(by.strategy):
        # Here the replicas communicate on the channel of `call`. A second call inside the first
        # would raise an error for the overlap.
        return broadcast(call, own)
    with context.replicas_of(by.strategy).call(call.kind, by.name) as among_replicas:
        part: np.ndarray = broadcast(among_replicas, own)
        return part
