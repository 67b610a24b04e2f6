"""Sharded variables: each rank holds some of the rows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from mpistrat.arrays import Array, host_view, place, taken
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.reduction import dtype_name
from mpistrat.settings import settings
from mpistrat.sharding import cut
from mpistrat.system.text import readable_size
from mpistrat.values import IndexedSlices
from mpistrat.variables.divided import SavedInPieces
from mpistrat.variables.initial import InitialValue
from mpistrat.variables.kinds import WrittenTogether
from mpistrat.variables.routing import (
    Partition,
    collect_rows,
    fetch_rows,
    gather_rows,
    scatter_rows,
    send_rows,
)
from mpistrat.variables.scatter import SliceWrite
from mpistrat.variables.variable import Variable
from mpistrat.variables.writes import ASSIGN, DenseWrite, Write


class ShardedVariable(SavedInPieces, WrittenTogether, kind="sharded"):
    """A variable whose rows are divided among the ranks.

    A strategy with a `variable_partitioner` makes it. Part k lies on rank k; the first parts hold
    one row more than the others, and further ranks hold none. `shape` and what else says how it
    looks are of the whole. Writes are those of a mirrored variable, and land on the owners of the
    rows alone; they return the variable itself.

    Examples
    --------
    >>> partitioner = ms.partitioners.FixedShardsPartitioner(2)
    >>> sharded = ms.MPIStrategy(variable_partitioner=partitioner)
    >>> with sharded.scope():
    ...     table = ms.Variable(np.arange(6.0).reshape(3, 2), name="table")
    >>> table.lookup([2, 0])
    array([[4., 5.],
           [0., 1.]])
    >>> len(table.part) == len(table.row_range)
    True
    >>> table.assign_add(np.ones((3, 2))) is table
    True
    >>> table[1:, 0]
    array([3., 5.])
    >>> table.assign_part(table.part.copy())
    >>> bool((table.value() == table.numpy()).all()), table.read_value().sum()
    (True, np.float64(21.0))
    >>> sharded.close()
    """

    _adjective = "sharded"
    _partition: Partition

    def __new__(cls, initial_value: Any = None, *args: Any, **kwargs: Any) -> ShardedVariable:
        """Refuse to make one by hand."""
        if not isinstance(initial_value, InitialValue):
            raise TypeError(
                "A ShardedVariable is made by ms.Variable(...), in the scope of a strategy whose "
                "variable_partitioner wants several parts. Parts that are there already are made "
                "one by an initial value that takes partition_shape and partition_offset."
            )
        self = super().__new__(cls, initial_value, *args, **kwargs)
        assert isinstance(self, ShardedVariable)
        return self

    def _begin(
        self, call: CollectiveCall, initial: InitialValue
    ) -> tuple[np.ndarray, tuple[int, ...]]:
        initial.check()
        rank, size = call.channel.rank, call.channel.size
        if not initial.is_made_in_parts:
            whole = initial.whole(self._name)
            self._partition = _partition(whole.shape, initial.num_parts, size)
            self._agree_on_parts(call, whole.shape, whole.dtype, initial.num_parts)
            return scatter_rows(call, self._partition, whole), whole.shape
        shape = initial.shape or ()
        self._partition = _partition(shape, initial.num_parts, size)
        rows = self._partition.ranges[rank]
        own = np.zeros((0, *shape[1:]), initial.dtype)
        if rows:
            own = initial.rows(self._name, rows)
        self._agree_on_parts(call, shape, own.dtype, initial.num_parts)
        return own.copy(), shape

    def _agree_on_parts(
        self,
        call: CollectiveCall,
        shape: tuple[int, ...],
        dtype: np.dtype,
        num_wanted: int | None = None,
    ) -> None:
        parts = f"{self._partition.num_parts} parts"
        if num_wanted not in (None, self._partition.num_parts):
            # Partitioners that differ may want more parts than there are rows or ranks.
            parts += f" of {num_wanted} wanted"
        call.agree(parts, (dtype_name(dtype), shape), self._checked_modes(dtype))

    @property
    def row_ranges(self) -> tuple[range, ...]:
        """The rows of each part. Local."""
        return self._partition.ranges[: self._partition.num_parts]

    @property
    def row_range(self) -> range:
        """The rows that this rank holds, maybe none. Local."""
        return self._partition.ranges[self._collectives.rank]

    @property
    def devices(self) -> tuple[str, ...]:
        """The full device string of each part, as of `device`. Local."""
        devices: tuple[str, ...] = self.strategy.extended.worker_devices
        return devices[: self._partition.num_parts]

    def lookup(self, ids: npt.ArrayLike) -> Array:
        """Return rows by their numbers, in new memory on the device.

        **Collective**, in replica context and outside: each rank gives its own ids, also none.

        Parameters
        ----------
        ids : array of integers
            Of any shape. Order and duplicates are kept.

        Returns
        -------
        array
            Of the shape ``(*ids.shape, *shape[1:])``.

        Raises
        ------
        TypeError
            If `ids` are no integers.
        IndexError
            For a number below 0 or past the end, on every rank if all have one: the strategy stays
            usable then.
        CollectiveMismatchError
            If only other ranks have one.
        """
        with self._collectives.call("lookup", self.name) as call:
            rows = self._checked_rows(ids)
            call.agree()
            found = fetch_rows(call, self._partition, self._storage, rows.reshape(-1))
        return place(found.reshape(*rows.shape, *self.shape[1:]), self._target.device)

    def value(self) -> Array:
        """Return all rows in new memory, on every rank. **Collective**.

        Raises
        ------
        ValueError
            If they have more bytes than the setting MPISTRAT_GATHER_LIMIT allows.
        """
        return place(self._gathered(), self._target.device)

    def read_value(self) -> Array:
        """Return `value()`, which is new memory. **Collective**."""
        return self.value()

    def numpy(self) -> npt.NDArray[Any]:
        """Return all rows in host memory. **Collective**."""
        return self._gathered()

    def _why_no_array(self, what: str) -> str:
        return (
            f"{what}: the rows of the sharded variable {self.name!r} lie on several ranks. Give "
            "value(), which brings all of them to every rank, or part, which has those of this one."
        )

    def _gathered(self) -> np.ndarray:
        with self._collectives.call("value of sharded variable", self.name) as call:
            self._check_may_gather()
            call.agree()
            return gather_rows(call, self._partition, self._storage)

    def _check_may_gather(self) -> None:
        num_bytes, limit = self.size * self.dtype.itemsize, settings().gather_limit
        if num_bytes > limit:
            raise ValueError(
                f"The sharded variable {self.name!r} has {readable_size(num_bytes)}, more than "
                f"MPISTRAT_GATHER_LIMIT allows to bring to every rank ({readable_size(limit)}). "
                "Read rows by lookup(ids), or those of this rank by part."
            )

    def __getitem__(self, index: Any) -> Any:
        """Return ``value()[index]``, of which only the rows that are needed travel."""
        given = index if isinstance(index, tuple) else (index,)
        rows = rows_named_by(given[0], len(self)) if given else None
        if rows is None:
            return taken(self.value(), index)
        numbers, first = rows
        with self._collectives.call("read of sharded variable", self.name) as call:
            if isinstance(numbers, IndexError):
                raise numbers
            call.agree()
            found = fetch_rows(call, self._partition, self._storage, numbers)
        part = place(taken(found, (first, *given[1:])), self._target.device)
        return part.copy() if getattr(part, "base", None) is not None else part

    def _written(self) -> ShardedVariable:
        return self

    @property
    def _own_elements(self) -> range:
        """Which elements of the flat value this rank holds."""
        rows, size = self._partition.ranges[self._collectives.rank], math.prod(self.shape[1:])
        return range(rows.start * size, rows.stop * size)

    def _own(self, value: Any) -> Any:
        rows = self.row_range
        if not isinstance(value, IndexedSlices):
            return value[rows.start : rows.stop]
        size = self._places_in_row(value)
        indices = value.indices
        mine = (indices >= rows.start * size) & (indices < rows.stop * size)
        own = taken(value.values, mine)
        return IndexedSlices(own, indices[mine] - rows.start * size)

    def _places_in_row(self, slices: IndexedSlices) -> int:
        """Return how many of the places that checked `slices` number a row has."""
        leading = len(self.shape) - slices.values.ndim + 1
        return math.prod(self.shape[1:leading])

    def _merge(self, call: CollectiveCall, write: Write, value: Any) -> Any:
        if not isinstance(write, SliceWrite):
            return self._own(super()._merge(call, write, value))
        own = write.contribution(call, self._target, value)
        size = self._places_in_row(own)
        call.agree(self.aggregation.name, dtype_name(own.values.dtype), own.values.shape[1:])
        indices, values = send_rows(
            call, self._partition, own.indices // max(size, 1), own.indices, own.values
        )
        slices = IndexedSlices(place(values, self._target.device), indices)
        return self._own(slices)

    def assign_part(self, rows: npt.ArrayLike) -> None:
        """Write this rank's rows, as `part` has them. **Local**.

        Parameters
        ----------
        rows : array of shape ``(len(row_range), *shape[1:])``
            On a rank without rows its length is 0.

        Raises
        ------
        ValueError
            If the shape differs.
        TypeError
            If `rows` cannot be cast to the variable's dtype within its kind.
        """
        ASSIGN.apply(self._storage, ASSIGN.checked(self._target_of_part, rows))

    def _zeros(self, name: str, dtype: np.dtype) -> Variable:
        zeros = InitialValue.zeros(self.shape, dtype, self._num_parts)
        zeros.is_always_cut = True
        return Variable(zeros, trainable=False, name=name)

    def _write_locally(self, write: Write, value: Any) -> None:
        """Write in update context: a value of this rank's rows, or of all of them."""
        is_part = isinstance(write, DenseWrite) and np.shape(value) == self._storage.shape
        target = self._target_of_part if is_part else self._target
        checked = write.checked(target, value)
        write.apply(self._storage, checked if is_part else self._own(checked))

    @property
    def _target_of_part(self) -> Any:
        return dataclasses.replace(self._target, shape=self._storage.shape)

    def _pieces_for_root(self) -> Iterator[np.ndarray | None]:
        """Yield the elements in their order, some at a time, on rank 0. **Collective**."""
        num_rows = self._partition.num_rows
        step = max(1, self._elements_per_piece // max(self.size // max(num_rows, 1), 1))
        for rows in cut(num_rows, step):
            with self._collectives.call("save of sharded variable", self.name) as call:
                call.agree(rows.start)
                piece = collect_rows(call, self._partition, self._storage, rows)
            yield None if piece is None else piece.reshape(-1)

    def _load_value(self, array: np.ndarray) -> None:
        ASSIGN.apply(self._storage, self._own(ASSIGN.checked(self._target, array)))

    def _load_piece(self, start: int, piece: np.ndarray) -> None:
        own = self._own_elements
        begin = own.start
        first, last = max(start, begin), min(start + piece.size, own.stop)
        if first < last:
            flat = self._storage.reshape(-1)
            flat[first - begin : last - begin] = place(
                piece[first - start : last - start], self._target.device
            )

    def __repr__(self) -> str:
        rows = self.row_range
        return (
            f"<{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype} "
            f"aggregation={self.aggregation.name} in {self._partition.num_parts} parts, rows "
            f"{rows.start}:{rows.stop} on {self._target.device}>"
        )


def _partition(shape: tuple[int, ...], num_parts: int, num_ranks: int) -> Partition:
    return Partition(shape[0], max(1, min(num_parts, shape[0], num_ranks)), num_ranks)


def rows_named_by(index: Any, num_rows: int) -> tuple[Any, Any] | None:
    """Return the rows that the first part of an index needs, and the index into these.

    ``None`` where it needs all of them, or says nothing of rows. An `IndexError` in place of rows
    where there are none such.
    """
    if isinstance(index, slice):
        numbers = range(num_rows)[index]
        return np.arange(numbers.start, numbers.stop, numbers.step), slice(None)
    if index is None or index is Ellipsis or isinstance(index, bool | np.bool_ | tuple):
        return None
    array = host_view(index)
    if array.dtype.kind == "b" and array.shape == (num_rows,):
        array = np.flatnonzero(array)
    if array.dtype.kind not in "iu":
        return None
    rows = array.astype(np.int64)
    if rows.size and not -num_rows <= rows.min() <= rows.max() < num_rows:
        return IndexError(
            f"The rows go from {rows.min()} to {rows.max()}, but there are {num_rows}."
        ), 0
    rows = np.where(rows < 0, rows + num_rows, rows)
    places = np.arange(rows.size).reshape(rows.shape)
    return rows.reshape(-1), places if rows.ndim else 0
