"""Stacking of elements to batches: columns of one shape, and the errors where shapes differ."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np

from mpistrat import nests
from mpistrat.arrays import host_view, is_array, is_number
from mpistrat.data.order import Block
from mpistrat.data.spec import ArraySpec, fitted, object_column
from mpistrat.errors import DataError


@dataclass(frozen=True)
class Column:
    """One leaf of all elements of a batch."""

    values: np.ndarray
    """Of shape ``(n, *shape)``, or of dtype object with an array for each element."""
    spec: ArraySpec
    """Of one element. After a map, that of the first example of the data set."""
    path: str
    items: Block
    """What the elements are made of, by which errors name them."""
    is_mapped: bool
    """Whether a map made them, so that shapes may differ from that of the spec."""

    @property
    def is_ragged(self) -> bool:
        """Whether shapes may differ, the same on all ranks."""
        return self.spec._is_ragged or (self.is_mapped and bool(self.spec.shape))

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shape of each element."""
        return [np.shape(row) for row in self.values]

    def name(self, number: int) -> str:
        """Return how errors name an element."""
        item = self.items[number]
        if isinstance(item, np.ndarray):
            return f"the batch in place {number}"
        return f"example {int(getattr(item, 'number', item))}"

    def refuse(self, number: int, other: str, shape: tuple[int | None, ...]) -> NoReturn:
        """Raise the error of an element that does not stack with the `other`, of `shape`."""
        raise DataError(
            f"A batch needs elements of one shape, but those at {self.path!r} have the shapes "
            f"{shape} and {np.shape(self.values[number])}: {other} and {self.name(number)}. Ways "
            "out: padded_batch, which fills up to the longest, ragged_batch, which joins them "
            "along the first axis, or a map to one shape."
        )


def stacked(column: Column, batch_size: int) -> np.ndarray:
    """Return a column as one array, if all its elements have one shape."""
    # After a map, the ranks know the shape of the first example of the data set and compare with
    # that, so that a batch is refused at any number of ranks.
    shapes = column.shapes if column.values.dtype == object else [column.values.shape[1:]]
    for number, shape in enumerate(shapes if len(column.values) else ()):
        if shape != shapes[0]:
            column.refuse(number, column.name(0), shapes[0])
        if column.is_mapped and batch_size > 1 and not _matches(shape, column.spec.shape):
            column.refuse(number, "the first example of the data set", column.spec.shape)
    if column.values.dtype != object:
        return column.values
    if not len(column.values):
        return np.empty((0, *column.spec._known_shape), column.spec.dtype)
    return np.stack(list(column.values))


def _matches(shape: tuple[int, ...], expected: tuple[int | None, ...]) -> bool:
    lengths = zip(shape, expected, strict=False)
    return len(shape) == len(expected) and all(want in (None, got) for got, want in lengths)


class Columns:
    """Columns of `count` elements, each like the nest `spec` except for its shape.

    Elements are copied as they come, while they are in the processor's cache.
    """

    def __init__(self, spec: Any, count: int) -> None:
        paths, specs, self._structure = nests.flatten_with_paths(spec)
        self._columns = [_GrowingColumn(each, count) for each in specs]
        self._paths = [path or "the top" for path in paths]

    def add(self, element: Any) -> None:
        """Copy the next element."""
        leaves, structure = nests.flatten(element)
        if structure != self._structure:
            raise _other_structure(structure, self._structure)
        for path, column, leaf in zip(self._paths, self._columns, leaves, strict=True):
            column.add(_cast(leaf, column.spec, path))

    def nest(self) -> Any:
        """Return the nest of the columns."""
        return nests.unflatten(self._structure, [each.values() for each in self._columns])


class _GrowingColumn:
    """One leaf of elements, in an array as long as their shapes are equal."""

    def __init__(self, spec: ArraySpec, count: int) -> None:
        self.spec, self._count = spec, count
        self._num_rows = 0
        self._array: np.ndarray | None = None
        self._rows: list[np.ndarray] | None = None
        if spec._is_ragged or spec._is_open_text:
            self._rows = []

    def add(self, row: np.ndarray) -> None:
        if self._rows is not None:
            self._rows.append(row)
            return
        if self._array is None:
            self._array = np.empty((self._count, *row.shape), self.spec.dtype)
        if row.shape != self._array.shape[1:]:
            self._rows = [*self._array[: self._num_rows], row]
            return
        self._array[self._num_rows] = row
        self._num_rows += 1

    def values(self) -> np.ndarray:
        if self._array is not None and self._rows is None:
            return self._array
        if not self._rows:
            return np.empty((0, *self.spec._known_shape), self.spec.dtype)
        are_alike = not self.spec._is_ragged and len({row.shape for row in self._rows}) == 1
        return np.stack(self._rows) if are_alike else object_column(self._rows)


def columns_of(elements: Iterable[Any], spec: Any, count: int) -> Any:
    """Return the nest of the columns of `count` elements."""
    columns = Columns(spec, count)
    for element in elements:
        columns.add(element)
    return columns.nest()


def rows_of(element: Any, spec: Any) -> list[np.ndarray]:
    """Return the leaves of one element like `spec`, as arrays of its dtypes."""
    paths, specs, structure = nests.flatten_with_paths(spec)
    leaves, other = nests.flatten(element)
    if other != structure:
        raise _other_structure(other, structure)
    return [
        _cast(leaf, each, path or "the top")
        for leaf, each, path in zip(leaves, specs, paths, strict=True)
    ]


def _other_structure(structure: nests.Structure, expected: nests.Structure) -> DataError:
    return DataError(
        f"map gave {structure} for one element, but {expected} for the first of the data set."
    )


_SCALARS = (np.generic, str, bytes)


def _cast(leaf: Any, spec: ArraySpec, path: str) -> np.ndarray:
    if type(leaf) is np.ndarray and leaf.dtype == spec.dtype:  # most leaves
        return leaf
    array = np.asarray(leaf) if isinstance(leaf, _SCALARS) else _as_array(leaf, path)
    cast = fitted(array, spec.dtype)
    if cast is None:
        raise DataError(
            f"map gave {reprlib.repr(array.tolist())} of dtype {array.dtype} at {path!r}, which "
            f"does not fit the dtype {spec.dtype} of the first element of the data set. Let the "
            "function return one dtype, for example with numpy.float32(...) or astype(...)."
        )
    return cast


def _as_array(leaf: Any, path: str) -> np.ndarray:
    if not (is_array(leaf) or is_number(leaf)) or isinstance(leaf, np.ma.MaskedArray):
        raise DataError(
            f"map gave {leaf!r} at {path!r}, but arrays and numbers were expected, so that "
            "elements can be stacked to a batch."
        )
    return host_view(leaf)
