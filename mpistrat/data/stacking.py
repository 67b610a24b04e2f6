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

__all__ = ["Column", "columns_of", "rows_of", "stacked"]


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


def columns_of(elements: Iterable[Any], spec: Any) -> Any:
    """Return the nest of the columns of `elements`, each like `spec` except for its shape."""
    paths, specs, structure = nests.flatten_with_paths(spec)
    paths = [path or "the top" for path in paths]
    columns: list[list[np.ndarray]] = [[] for _ in specs]
    for element in elements:
        leaves, other = nests.flatten(element)
        if other != structure:
            raise DataError(
                f"map gave {other} for one element, but {structure} for the first of the data set."
            )
        for path, column, leaf, each in zip(paths, columns, leaves, specs, strict=True):
            column.append(_cast(leaf, each, path))
    return nests.unflatten(structure, map(_column, columns, specs))


def rows_of(element: Any, spec: Any) -> list[np.ndarray]:
    """Return the leaves of one element like `spec`, as arrays of its dtypes."""
    paths, specs, structure = nests.flatten_with_paths(spec)
    leaves, other = nests.flatten(element)
    if other != structure:
        raise DataError(
            f"map gave {other} for one element, but {structure} for the first of the data set."
        )
    return [
        _cast(leaf, each, path or "the top")
        for leaf, each, path in zip(leaves, specs, paths, strict=True)
    ]


def _column(rows: list[np.ndarray], spec: ArraySpec) -> np.ndarray:
    if not rows:
        return np.empty((0, *spec._known_shape), spec.dtype)
    if spec._is_ragged or any(row.shape != rows[0].shape for row in rows):
        return object_column(rows)
    return np.stack(rows)


def _cast(leaf: Any, spec: ArraySpec, path: str) -> np.ndarray:
    is_plain = is_array(leaf) or is_number(leaf) or isinstance(leaf, np.generic | str | bytes)
    if not is_plain or isinstance(leaf, np.ma.MaskedArray):
        raise DataError(
            f"map gave {leaf!r} at {path!r}, but arrays and numbers were expected, so that "
            "elements can be stacked to a batch."
        )
    array = host_view(leaf)
    cast = fitted(array, spec.dtype)
    if cast is None:
        raise DataError(
            f"map gave {reprlib.repr(array.tolist())} of dtype {array.dtype} at {path!r}, which "
            f"does not fit the dtype {spec.dtype} of the first element of the data set. Let the "
            "function return one dtype, for example with numpy.float32(...) or astype(...)."
        )
    return cast
