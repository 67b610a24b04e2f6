"""Padded and ragged batches: elements of different shapes, padded to one shape or concatenated."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.data.spec import ArraySpec, batched, fitted, has_open_shape, is_open_text, known_shape
from mpistrat.data.transformations.batch import Batch, Column, stacked
from mpistrat.errors import DataError
from mpistrat.ragged import Ragged
from mpistrat.system.text import counted

Shape = tuple["int | None", ...]


@dataclass(frozen=True)
class PaddedBatch(Batch):
    """Batches whose elements are padded to given lengths or to the longest of a rank's slice."""

    padded_shapes: Any = None
    """A nest of shapes; ``None`` as a length, or for all shapes, means the longest element."""
    padding_values: Any = 0
    """One value for all leaves, or a nest of them."""

    def spec_of(self, element_spec: Any, is_mapped: bool) -> Any:
        """Return the nest of specs of a batch of elements."""
        batched(element_spec, None)  # raises ValueError for a Ragged
        paths, specs, structure = nests.flatten_with_paths(element_spec)
        leaves = []
        for number, (path, spec) in enumerate(zip(paths, specs, strict=True)):
            given = self._given_shape(structure, number, path, spec)
            self._padding(structure, number, path, spec)
            lengths = [
                None if want is None and (is_mapped or length is None) else (want or length)
                for want, length in zip(given, spec.shape, strict=True)
            ]
            leaves.append(ArraySpec((self.known_length, *lengths), spec.dtype))
        return nests.unflatten(structure, leaves)

    def stack(self, column: Column, structure: nests.Structure, number: int) -> Any:
        """Return a column as one array."""
        spec, path = column.spec, column.path
        given = self._given_shape(structure, number, path, spec)
        shapes = column.shapes
        target = [
            (max((shape[axis] for shape in shapes), default=length or 0) if want is None else want)
            for axis, (want, length) in enumerate(zip(given, spec.shape, strict=True))
        ]
        for place, shape in enumerate(shapes):
            if any(got > want for got, want in zip(shape, target, strict=True)):
                raise DataError(
                    f"padded_batch: {column.name(place)} has the shape {shape} at {path!r}, which "
                    f"is longer than the padded shape {tuple(given)}. Pass larger padded_shapes, "
                    "None for the longest, or shorten it in a map."
                )
        if column.values.dtype != object and list(column.values.shape[1:]) == target:
            return stacked(column, 1)
        dtype = np.result_type(*column.values) if is_open_text(spec) and shapes else spec.dtype
        output = np.full(
            (len(shapes), *target), self._padding(structure, number, path, spec), dtype
        )
        for row, values, shape in zip(output, column.values, shapes, strict=True):
            row[tuple(map(slice, shape))] = values
        return output

    def _given_shape(
        self, structure: nests.Structure, number: int, path: str, spec: ArraySpec
    ) -> Shape:
        """Return the padded shape of a leaf, ``None`` for lengths that are not given."""
        shape = None
        if self.padded_shapes is not None:
            shape = _leaves("padded_shapes", structure, self.padded_shapes)[number]
        if shape is None:
            return (None,) * len(spec.shape)
        try:
            lengths = [None if each in (None, -1) else operator.index(each) for each in shape]
        except TypeError:
            raise TypeError(
                f"padded_batch: padded_shapes must have a tuple of integers or None at {path!r}, "
                f"not {shape!r}."
            ) from None
        if len(lengths) != len(spec.shape) or any(
            each is not None and each < 0 for each in lengths
        ):
            raise ValueError(
                f"padded_batch: padded_shapes has {tuple(shape)} at {path!r}, but the elements "
                f"are {spec}. Pass {counted(len(spec.shape), 'length')}, one per dimension."
            )
        return tuple(lengths)

    def _padding(self, structure: nests.Structure, number: int, path: str, spec: ArraySpec) -> Any:
        """Return the padding value of a leaf."""
        value = self.padding_values
        if not np.isscalar(value) and not (isinstance(value, np.ndarray) and not value.ndim):
            value = _leaves("padding_values", structure, value)[number]
        # 0, the default, also means an empty string and False.
        is_zero = value is None or (not isinstance(value, str) and not value)
        if is_zero and spec.dtype.kind in "SU":
            return spec.dtype.type()
        if is_zero and spec.dtype.kind not in "iufc":
            return np.zeros((), spec.dtype)
        fill = fitted(np.asarray(0 if value is None else value), spec.dtype)
        if fill is None or fill.ndim:
            raise ValueError(
                f"padded_batch: the padding value {value!r} does not fit {spec.dtype} at {path!r}."
            )
        return fill


@dataclass(frozen=True)
class RaggedBatch(Batch):
    """Batches in which each leaf whose lengths may differ is a `Ragged`."""

    def spec_of(self, element_spec: Any, is_mapped: bool) -> Any:
        """Return the nest of specs of a batch of elements."""

        def ragged(leaf: ArraySpec, batched: ArraySpec) -> ArraySpec:
            if not (has_open_shape(leaf) or (is_mapped and leaf.shape)):
                return batched
            return ArraySpec((self.known_length, None, *leaf.shape[1:]), leaf.dtype, True)

        leaves, structure = nests.flatten(element_spec)
        plain, _ = nests.flatten(super().spec_of(element_spec, is_mapped))
        return nests.unflatten(structure, map(ragged, leaves, plain))

    def stack(self, column: Column, structure: nests.Structure, number: int) -> Any:
        """Return a column as one value."""
        if not column.is_ragged:
            return stacked(column, self.batch_size)
        lengths = [shape[0] for shape in column.shapes]
        splits = np.cumsum([0, *lengths], dtype=np.int64)
        rows = list(column.values)
        for number, row in enumerate(rows):
            if row.shape[1:] != rows[0].shape[1:]:
                column.refuse(number, column.name(0), rows[0].shape)
        if not rows:
            trailing = known_shape(column.spec)[1:]
            return Ragged(np.empty((0, *trailing), column.spec.dtype), splits)
        return Ragged(np.concatenate(rows), splits)


def _leaves(what: str, structure: nests.Structure, nest: Any) -> list[Any]:
    """Return the parts of `nest` at the leaves of `structure`."""
    try:
        return list(structure.flatten_up_to(nest))
    except (ValueError, TypeError) as error:
        raise ValueError(
            f"padded_batch: {what} must have the structure of an element, "
            f"{nests.signature(structure)}, not {nest!r}."
        ) from error
