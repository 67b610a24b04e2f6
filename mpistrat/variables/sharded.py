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

    A strategy with a `variable_partitioner` creates it when the program calls `Variable`. Rank k
    stores part k. If the rows do not divide evenly, the first parts hold one row more. Ranks beyond
    the number of parts hold none. `shape` and other metadata describe the whole. Writes follow the
    rules of mirrored variables but change only the ranks that own the rows, and return the variable
    itself.

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
        """Raise `TypeError`: only `Variable` creates sharded variables."""
        raise TypeError(
            "A ShardedVariable cannot be created directly. Call ms.Variable(...) in the scope of a "
            "strategy with a variable_partitioner. To build it from existing parts, pass an "
            "initial_value function with the arguments partition_shape and partition_offset."
        )

    @property
    def row_ranges(self) -> tuple[range, ...]:
        """Rows of each part. Local."""
        return self._placement.partition.ranges[: self._placement.num_holders]

    @property
    def row_range(self) -> range:
        """Rows that this rank holds, possibly none. Local."""
        return self._placement.own_rows

    @property
    def devices(self) -> tuple[str, ...]:
        """Full device name of each part, in the format of `device`. Local."""
        devices: tuple[str, ...] = self.strategy.extended.worker_devices
        return devices[: self._placement.num_holders]

    def lookup(self, ids: npt.ArrayLike) -> Array:
        """Return rows by their numbers, in new memory on the device.

        **Collective**, in replica context and outside. Each rank passes its own ids, possibly none.

        Parameters
        ----------
        ids : array of integers
            Row numbers, in any shape. Order and duplicates are kept.

        Returns
        -------
        array
            Rows of shape ``(*ids.shape, *shape[1:])``.

        Raises
        ------
        TypeError
            If `ids` are not integers.
        IndexError
            For a number below 0 or past the end. If it is raised on every rank, the strategy stays
            usable.
        CollectiveMismatchError
            If only other ranks have such a number.
        """
        placement = self._placement
        if not isinstance(placement, Rows):
            # A slot that is divided by elements: two ranks may hold parts of one row, so no single
            # rank can send it.
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

        Returns
        -------
        array
            An array of `shape` on the device.

        Raises
        ------
        ValueError
            If the rows need more bytes than the setting MPISTRAT_GATHER_LIMIT allows.
        """
        return place(self._gathered(), self._target.device)

    def read_value(self) -> Array:
        """Return `value()`, which is new memory. **Collective**.

        Returns
        -------
        array
            All rows, on the device.
        """
        return self.value()

    def numpy(self) -> npt.NDArray[Any]:
        """Return all rows in host memory. **Collective**.

        Returns
        -------
        numpy.ndarray
            New memory.
        """
        return self._gathered()

    def _why_no_array(self, what: str) -> str:
        return (
            f"{what}: the rows of the sharded variable {self.name!r} are on several ranks. Pass "
            "value(), which gathers all rows on every rank, or part, the rows of this rank."
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
                f"a read may gather on every rank (MPISTRAT_GATHER_LIMIT, {readable_size(limit)}). "
                "Read rows with lookup(ids), or the rows of this rank with part."
            )

    def __getitem__(self, index: Any) -> Any:
        """Return ``value()[index]``. Only the rows that it needs are sent."""
        given = index if isinstance(index, tuple) else (index,)
        rows = rows_named_by(given[0], len(self)) if given else None
        placement = self._placement
        if rows is None or not isinstance(placement, Rows):
            return taken(self.value(), index)
        numbers, first = rows
        with self._ranks.call("read of sharded variable", self.name) as call:
            if isinstance(numbers, IndexError):
                # Raised inside the call: otherwise the other ranks would wait for rows from this
                # one.
                raise numbers
            call.agree()
            found = fetch_rows(call, placement.partition, self._storage, numbers)
        part = place(taken(found, (first, *given[1:])), self._target.device)
        return part.copy() if getattr(part, "base", None) is not None else part

    def _written(self) -> ShardedVariable:
        return self

    def assign_part(self, rows: npt.ArrayLike) -> None:
        """Write this rank's rows, in the layout of `part`. **Local**.

        Parameters
        ----------
        rows : array of shape ``(len(row_range), *shape[1:])``
            The new rows. Its length is 0 on a rank without rows.

        Raises
        ------
        ValueError
            If the shape differs.
        TypeError
            If `rows` cannot be cast to the variable's dtype within its kind.
        """
        ASSIGN.apply(self._storage, ASSIGN.checked(self._target_of_part, rows))

    def _write_locally(self, write: Write, value: Any) -> None:
        """Write in update context: `value` has the shape of this rank's rows, or of all rows."""
        # If one rank holds all rows, both shapes are equal and both readings mean the same.
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
    """Return the rows that the first part of an index needs, and the index into these rows.

    Return ``None`` if it needs all rows or selects no rows by number. If a row does not exist, an
    `IndexError` object takes the place of the rows.
    """
    if isinstance(index, slice):
        numbers = range(num_rows)[index]
        return np.arange(numbers.start, numbers.stop, numbers.step), slice(None)
    # A bool is not a row number: NumPy treats it as a mask without axes.
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
