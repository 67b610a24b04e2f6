"""Reads of some rows of a variable."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np
import numpy.typing as npt

from mpistrat.arguments import span_outside
from mpistrat.arrays import Array, host_view, namespace_of
from mpistrat.variables.array_like import ArrayLike


def read_only(storage: Array) -> Array:
    """Return a view of `storage`, which cannot be written to on the host."""
    view: Array = storage.view()
    if type(view) is np.ndarray:
        view.setflags(write=False)
    return view


class RowReads(ArrayLike):
    """The rows that this rank holds, and rows by their numbers."""

    @property
    @abstractmethod
    def _component(self) -> Array:
        """What this rank holds."""

    @property
    def row_range(self) -> range:
        """The rows that this rank holds: all, but of an `ms.ShardedVariable`. Local.

        Raises `TypeError` where the variable is 0-d.
        """
        return range(len(self))

    @property
    def part(self) -> Array:
        """The rows of `row_range` as a read-only view, of the local component. Local."""
        return read_only(self._component)

    def lookup(self, ids: npt.ArrayLike) -> Array:
        """Return rows by their numbers, in new memory on the device.

        **Local**, as all ranks hold all rows; **Collective** for an `ms.ShardedVariable`. Of a
        SyncOnRead variable they are those of the local component.

        Parameters
        ----------
        ids : array of integers
            Of any shape, also empty. Order and duplicates are kept.

        Returns
        -------
        array
            Of the shape ``(*ids.shape, *shape[1:])``.

        Raises
        ------
        TypeError
            If `ids` are no integers, or the variable is 0-d.
        IndexError
            For a number below 0 or past the end.
        """
        rows = self._checked_rows(ids)
        component = self._component
        found: Array = component[namespace_of(component).asarray(rows)]
        return found

    def _checked_rows(self, ids: npt.ArrayLike) -> np.ndarray:
        """Return the numbers that `lookup` takes as an array of int64."""
        rows = host_view(ids) if hasattr(ids, "dtype") else np.asarray(ids)
        what = f"lookup of variable {self.name!r}"
        if rows.dtype.kind not in "iu" and (rows.size or hasattr(ids, "dtype")):
            raise TypeError(f"{what} takes integers, not an array of dtype {rows.dtype}.")
        span = span_outside(rows, len(self))
        if span is not None:
            raise IndexError(
                f"{what}: the ids go from {span[0]} to {span[1]}, but the variable of shape "
                f"{self.shape} has {len(self)} rows, numbered from 0."
            )
        return rows.astype(np.int64)
