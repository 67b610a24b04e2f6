"""The methods of a variable that write to some of its rows."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from mpistrat.arrays import Array
from mpistrat.values import IndexedSlices
from mpistrat.variables.scatter import (
    BATCH_SCATTER_UPDATE,
    SCATTER_ADD,
    SCATTER_DIV,
    SCATTER_MAX,
    SCATTER_MIN,
    SCATTER_MUL,
    SCATTER_SUB,
    SCATTER_UPDATE,
)
from mpistrat.variables.writes import Write

__all__ = ["RowWrites"]


class RowWrites(ABC):
    """`IndexedSlices` written in place, by what `Variable` does with any write."""

    @abstractmethod
    def _write(self, write: Write, value: Any, read_value: bool) -> Array | None:
        """Do the write that the current context calls for."""

    def scatter_add(self, sparse_delta: IndexedSlices, read_value: bool = True) -> Array | None:
        """Add rows in place: ``self[indices[i]] += values[i]`` for each i in order.

        In replica context the slices of all replicas are joined in rank order first, of which
        each may bring another number, also none; ONLY_FIRST_REPLICA takes those of rank 0, and
        under MEAN the values are divided by the number of replicas. In cross-replica context
        all ranks give the same slices. **Collective** or local as `assign`.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            With ``values`` of shape ``(n, *shape[1:])`` and ``indices`` of shape ``(n,)``.
        read_value : bool
            Whether to return the new value.

        Returns
        -------
        array or None
            As by `assign`.

        Raises
        ------
        TypeError
            If `sparse_delta` is no `IndexedSlices`, or its values do not fit the dtype.
        ValueError
            For rows of another shape, or in replica context under NONE.
        IndexError
            For an index below 0 or past the end; nothing has changed then.
        NotImplementedError
            On a SyncOnRead variable.
        """
        return self._write(SCATTER_ADD, sparse_delta, read_value)

    def scatter_sub(self, sparse_delta: IndexedSlices, read_value: bool = True) -> Array | None:
        """Subtract rows in place. **Collective** or local as `scatter_add`, and like it."""
        return self._write(SCATTER_SUB, sparse_delta, read_value)

    def scatter_mul(self, sparse_delta: IndexedSlices, read_value: bool = True) -> Array | None:
        """Multiply rows in place. **Collective** or local as `scatter_add`, and like it."""
        return self._write(SCATTER_MUL, sparse_delta, read_value)

    def scatter_div(self, sparse_delta: IndexedSlices, read_value: bool = True) -> Array | None:
        """Divide rows in place, integers towards zero.

        **Collective** or local as `scatter_add`, and otherwise like it.
        """
        return self._write(SCATTER_DIV, sparse_delta, read_value)

    def scatter_min(self, sparse_delta: IndexedSlices, read_value: bool = True) -> Array | None:
        """Replace rows by the smaller of old and given elements.

        **Collective** or local as `scatter_add`, and otherwise like it.

        Raises
        ------
        NotImplementedError
            On a mirrored variable under SUM or MEAN, and on a SyncOnRead variable.
        """
        return self._write(SCATTER_MIN, sparse_delta, read_value)

    def scatter_max(self, sparse_delta: IndexedSlices, read_value: bool = True) -> Array | None:
        """Replace rows by the larger of old and given elements.

        **Collective** or local as `scatter_add`; raises as `scatter_min`.
        """
        return self._write(SCATTER_MAX, sparse_delta, read_value)

    def scatter_update(self, sparse_delta: IndexedSlices, read_value: bool = True) -> Array | None:
        """Replace rows by those given; of duplicates the last one stays.

        **Collective** or local as `scatter_add`; raises as `scatter_min`.
        """
        return self._write(SCATTER_UPDATE, sparse_delta, read_value)

    def batch_scatter_update(
        self, sparse_delta: IndexedSlices, read_value: bool = True
    ) -> Array | None:
        """Replace rows within batches: ``self[i, ..., indices[i, ..., j]] = values[i, ..., j]``.

        All axes of ``indices`` but the last run over batches, and have the lengths of the
        variable's leading axes. With 1-d ``indices`` this is `scatter_update`. **Collective**
        or local as `scatter_add`; raises as `scatter_min`.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            With ``indices`` of shape ``(*batch, n)`` and ``values`` of shape
            ``(*batch, n, *shape[len(batch) + 1:])``, where ``batch`` begins the variable's shape.
        read_value : bool
            Whether to return the new value.
        """
        return self._write(BATCH_SCATTER_UPDATE, sparse_delta, read_value)
