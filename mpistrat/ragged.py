"""Ragged arrays: rows of different lengths, as concatenated values and offsets."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, overload

import numpy as np
import numpy.typing as npt

from mpistrat import nests
from mpistrat.system.text import brief


@nests.leaf_type
@dataclass(frozen=True, eq=False)
class Ragged:
    """Rows that may differ in length: row k is ``values[row_splits[k]:row_splits[k + 1]]``.

    It counts as one value, like `IndexedSlices`: a `PerReplica` holds a `Ragged`, and a function
    passed to `Strategy.run` gets one. ``len()`` is the number of rows. An integer index returns a
    row without a copy, and a slice returns the `Ragged` of some rows.

    Raises
    ------
    TypeError
        If `row_splits` are not integers.
    ValueError
        If they are not offsets that begin with 0, never decrease, and end with the length of
        `values`.

    Examples
    --------
    >>> words = ms.data.Ragged([7, 8, 9], [0, 1, 1, 3])
    >>> words
    Ragged(array([7, 8, 9]), row_splits=array([0, 1, 1, 3]))
    >>> len(words), words[2], words.row_lengths()
    (3, array([8, 9]), array([1, 0, 2]))
    >>> words[1:].to_list()
    [[], [8, 9]]
    >>> ms.data.Ragged.from_list([[7], [], [8, 9]]).values
    array([7, 8, 9])
    """

    values: Any
    """The concatenated rows: an array of shape ``(row_splits[-1], *row.shape[1:])``."""
    row_splits: Any
    """Start of each row, and the end of the last one: int64, of shape ``(rows + 1,)``."""

    if TYPE_CHECKING:  # the arguments may have more general types than the fields

        def __init__(self, values: npt.ArrayLike, row_splits: npt.ArrayLike) -> None: ...

    def __post_init__(self) -> None:
        values, splits = _as_array(self.values), _as_array(self.row_splits)
        if splits.dtype.kind not in "iu":
            raise TypeError(
                f"Ragged needs integers as row_splits, not {self.row_splits!r} of dtype "
                f"{splits.dtype}."
            )
        if splits.dtype != np.int64:
            splits = splits.astype(np.int64)
        length = len(values) if values.ndim else None
        if (
            splits.ndim != 1
            or not len(splits)
            or length is None
            or not _are_offsets(splits, length)
        ):
            raise ValueError(
                f"Ragged needs row_splits that begin with 0, never fall, and end with the length "
                f"of values, which have the shape {tuple(values.shape)}, not {brief(splits)}."
            )
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "row_splits", splits)

    @classmethod
    def from_list(cls, rows: Iterable[npt.ArrayLike], dtype: npt.DTypeLike | None = None) -> Ragged:
        """Return the ragged array of `rows`. Local.

        Parameters
        ----------
        rows : iterable of array-like
            Lists or arrays that differ only in length.
        dtype : numpy.dtype, optional
            Dtype of the values. Default: the common dtype of all rows.

        Returns
        -------
        Ragged
            A new ragged array.

        Raises
        ------
        ValueError
            If a row is 0-d, or rows differ in their other dimensions.
        """
        arrays = [np.asarray(row, dtype) for row in rows]
        known = [array for array in arrays if array.size] or arrays
        if any(not array.ndim for array in arrays) or len({a.shape[1:] for a in known}) > 1:
            shapes = sorted({array.shape for array in arrays})
            raise ValueError(f"Ragged: rows may differ in length only, but have shapes {shapes}.")
        # An empty list does not determine its dtype and its other dimensions.
        splits = np.cumsum([0, *map(len, arrays)], dtype=np.int64)
        return cls(np.concatenate(known) if known else np.empty(0, dtype), splits)

    def to_list(self) -> list[Any]:
        """Return the rows as nested lists of numbers. Local.

        Returns
        -------
        list
            One list per row.
        """
        return [row.tolist() for row in self]

    def row_lengths(self) -> Any:
        """Return the length of each row. Local.

        Returns
        -------
        array of int64
            An array of shape ``(rows,)``.
        """
        return self.row_splits[1:] - self.row_splits[:-1]

    @property
    def nbytes(self) -> int:
        """Size of values and offsets in bytes. Local."""
        return int(self.values.nbytes + self.row_splits.nbytes)

    def __len__(self) -> int:
        return len(self.row_splits) - 1

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> Ragged: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return self._slice(*index.indices(len(self)))
        number = operator.index(index)
        if not -len(self) <= number < len(self):
            raise IndexError(f"row {number} is out of range for a Ragged of {len(self)} rows.")
        number %= len(self)
        return self.values[int(self.row_splits[number]) : int(self.row_splits[number + 1])]

    def _slice(self, start: int, stop: int, step: int) -> Ragged:
        if step == 1:
            splits = self.row_splits[start : max(stop, start) + 1]
            first, last = int(splits[0]), int(splits[-1])
            return Ragged(self.values[first:last], splits - first)
        raise ValueError(f"A slice of a Ragged takes consecutive rows, not every {step}-th one.")

    def __iter__(self) -> Iterator[Any]:
        return (self[number] for number in range(len(self)))

    def __repr__(self) -> str:
        return f"Ragged({brief(self.values)}, row_splits={brief(self.row_splits)})"


def map_ragged(fn: Callable[[Any], Any], ragged: Ragged) -> Ragged:
    """Return `ragged` with `fn` applied to values and offsets: another device or library."""
    twin = object.__new__(Ragged)
    object.__setattr__(twin, "values", fn(ragged.values))
    object.__setattr__(twin, "row_splits", fn(ragged.row_splits))
    return twin


def _as_array(value: Any) -> Any:
    return value if hasattr(value, "dtype") and hasattr(value, "shape") else _of_sequence(value)


def _of_sequence(value: Sequence[Any]) -> np.ndarray:
    array = np.asarray(value)
    return array if array.size else array.astype(np.int64)


def _are_offsets(splits: Any, length: int) -> bool:
    rises = bool((splits[1:] >= splits[:-1]).all())
    return rises and int(splits[0]) == 0 and int(splits[-1]) == length
