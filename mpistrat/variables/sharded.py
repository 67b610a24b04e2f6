"""Sharded variables: each rank holds some of the rows."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from mpistrat.arrays import Array, host_view, namespace_of, place, taken
from mpistrat.settings import settings
from mpistrat.system.text import readable_size
from mpistrat.variables.kinds import WrittenTogether
from mpistrat.variables.placement import Flat, Rows
from mpistrat.variables.row_exchange import fetch_rows
from mpistrat.variables.writes import ASSIGN, DenseWrite, Write


class ShardedVariable(WrittenTogether):
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
    _is_sharded = True
    _placement: Flat

    def __new__(cls, *args: Any, **kwargs: Any) -> ShardedVariable:
        """Refuse to make one by hand."""
        raise TypeError(
            "A ShardedVariable is made by ms.Variable(...), in the scope of a strategy whose "
            "variable_partitioner wants several parts. Parts that are there already are made "
            "one by an initial value that takes partition_shape and partition_offset."
        )

    @property
    def row_ranges(self) -> tuple[range, ...]:
        """The rows of each part. Local."""
        return self._placement.partition.ranges[: self._placement.num_holders]

    @property
    def row_range(self) -> range:
        """The rows that this rank holds, maybe none. Local."""
        return self._placement.own_rows

    @property
    def devices(self) -> tuple[str, ...]:
        """The full device string of each part, as of `device`. Local."""
        devices: tuple[str, ...] = self.strategy.extended.worker_devices
        return devices[: self._placement.num_holders]

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
        placement = self._placement
        if not isinstance(placement, Rows):
            # A slot that is divided by elements: a row may lie on two ranks, so there is no owner
            # to ask.
            rows, whole = self._checked_rows(ids), self.value()
            of_whole: Array = whole[namespace_of(whole).asarray(rows)]
            return of_whole
        with self._ranks.call("lookup", self.name) as call:
            rows = self._checked_rows(ids)
            call.agree()
            found = fetch_rows(call, placement.partition, self._storage, rows.reshape(-1))
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
        with self._ranks.call("value of sharded variable", self.name) as call:
            self._check_may_gather()
            call.agree()
            return self._placement.gather(call, self._storage)

    def _check_may_gather(self) -> None:
        num_bytes, limit = self.size * self.dtype.itemsize, settings().gather_limit
        if num_bytes > limit:
            raise ValueError(
                f"The sharded variable {self.name!r} has {readable_size(num_bytes)}, more than "
                f"MPISTRAT_GATHER_LIMIT lets a read bring to every rank ({readable_size(limit)}). "
                "Read rows by lookup(ids), or those of this rank by part."
            )

    def __getitem__(self, index: Any) -> Any:
        """Return ``value()[index]``, of which only the rows that are needed travel."""
        given = index if isinstance(index, tuple) else (index,)
        rows = rows_named_by(given[0], len(self)) if given else None
        placement = self._placement
        if rows is None or not isinstance(placement, Rows):
            return taken(self.value(), index)
        numbers, first = rows
        with self._ranks.call("read of sharded variable", self.name) as call:
            if isinstance(numbers, IndexError):
                # Inside of the call: raised before it, the other ranks would wait for this one's
                # rows.
                raise numbers
            call.agree()
            found = fetch_rows(call, placement.partition, self._storage, numbers)
        part = place(taken(found, (first, *given[1:])), self._target.device)
        return part.copy() if getattr(part, "base", None) is not None else part

    def _written(self) -> ShardedVariable:
        return self

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

    def _write_locally(self, write: Write, value: Any) -> None:
        """Write in update context: a value of this rank's rows, or of all of them."""
        # If one rank holds all rows, both shapes are equal, and both readings mean the same.
        is_part = isinstance(write, DenseWrite) and np.shape(value) == self._storage.shape
        target = self._target_of_part if is_part else self._target
        checked = write.checked(target, value)
        write.apply(self._storage, checked if is_part else self._placement.own(checked))

    @property
    def _target_of_part(self) -> Any:
        return dataclasses.replace(self._target, shape=self._storage.shape)

    def __repr__(self) -> str:
        own, what = self._placement.own_rows, "rows"
        if not isinstance(self._placement, Rows):
            what = "elements"
        return (
            f"<{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype} "
            f"aggregation={self.aggregation.name} in {self._placement.num_holders} parts, {what} "
            f"{own.start}:{own.stop} on {self._target.device}>"
        )


def rows_named_by(index: Any, num_rows: int) -> tuple[Any, Any] | None:
    """Return the rows that the first part of an index needs, and the index into these.

    ``None`` where it needs all of them, or says nothing of rows. An `IndexError` in place of rows
    where there are none such.
    """
    if isinstance(index, slice):
        numbers = range(num_rows)[index]
        return np.arange(numbers.start, numbers.stop, numbers.step), slice(None)
    # A bool is no row number: NumPy takes it as a mask without axes.
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
