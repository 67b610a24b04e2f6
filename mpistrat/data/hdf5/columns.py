"""Columns of examples: what is read by rows, and what is read one example at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.data.hdf5.fields import Field
from mpistrat.data.hdf5.layouts import ColumnLayout, layout_of_matches
from mpistrat.data.hdf5.located import Kind, Located
from mpistrat.data.hdf5.stored_types import Form, Leaf, subset
from mpistrat.data.spec import ArraySpec


@dataclass(frozen=True)
class Column:
    """What is read by rows, many at a time: a data set, or members of a compound one."""

    name: str
    """How errors name it."""
    path: str
    """Of the data set; the pattern where each row is a match."""
    axis: int
    dtype: np.dtype
    """In memory: of compound rows the members that are needed, packed."""
    is_matches: bool = False
    """Whether each row is a data set, whose place in the file is known."""


@dataclass(frozen=True)
class Single:
    """What is read one example at a time: text, rows of any length, matches, attributes."""

    field: Field
    kind: Kind
    path: str
    axis: int
    dtype: np.dtype
    """In memory, as h5py has it."""
    bytes_per_example: int
    """On average, as far as it is known."""


@nests.leaf_type
@dataclass(frozen=True)
class Output:
    """One array of an example."""

    spec: ArraySpec
    leaf: Leaf
    """Where it is in what is read."""
    column: int | None
    """The number of the column that it is taken from."""
    single: int | None
    """Or of the single."""


def row_columns(located: Sequence[Located]) -> list[Column]:
    """Return the columns of fields that are rows: one for each data set with members."""
    columns: list[Column] = []
    compound: dict[tuple[str, int], int] = {}
    for each in located:
        fixed = _leaves(each, Form.FIXED) if each.kind is Kind.ROWS else []
        if not fixed:
            continue
        if not each.dtype.names:
            dtype = each.dtype.newbyteorder("=")
            columns.append(Column(each.field._text, each.path, each.axis, dtype))
            continue
        key = each.path, each.axis
        if key not in compound:
            compound[key] = len(columns)
            together = [e for e in located if e.kind is Kind.ROWS and (e.path, e.axis) == key]
            members = dict.fromkeys(m.members for e in together for m in _leaves(e, Form.FIXED))
            dtype = subset(each.dtype, members)
            columns.append(Column(repr(each.path), each.path, each.axis, dtype))
    return columns


def _leaves(located: Located, *forms: Form) -> list[Leaf]:
    leaves: list[Leaf] = nests.flatten(located.leaves)[0]
    return [leaf for leaf in leaves if leaf.form in forms]


def compose(
    located: Sequence[Sequence[Located]],
    columns: Sequence[Column],
    structure: nests.Structure,
    may_be_placed: bool,
) -> _Composition:
    """Return how fields are read that were `located` in all files, and that begin with `columns`.

    `structure` is the nest that they form, each of them a nest of leaves.
    """
    composer = _Composer(located, columns)
    nest = [composer.outputs(of_files, may_be_placed) for of_files in zip(*located, strict=True)]
    outputs, whole = nests.flatten(nests.unflatten(structure, nest))
    return _Composition(
        tuple(composer.columns), tuple(composer.singles), tuple(outputs), whole, composer.layouts
    )


@dataclass(frozen=True)
class _Composition:
    """How the arrays of an example are read."""

    columns: tuple[Column, ...]
    singles: tuple[Single, ...]
    outputs: tuple[Output, ...]
    structure: nests.Structure
    layouts: list[list[ColumnLayout]]
    """Of each column of matches its layout in each file."""


class _Composer:
    """Finds the column or the single of each field."""

    def __init__(self, located: Sequence[Sequence[Located]], columns: Sequence[Column]) -> None:
        self._located = located[0]
        self.columns = list(columns)
        self.singles: list[Single] = []
        self.layouts: list[list[ColumnLayout]] = []
        self._numbers = {(column.path, column.axis): n for n, column in enumerate(columns)}
        self._plain = iter([n for n, column in enumerate(columns) if not column.dtype.names])
        self._single_numbers: dict[tuple[str, int], int] = {}

    def outputs(self, of_files: Sequence[Located], may_be_placed: bool) -> Any:
        """Return the nest of outputs of a field, as it was located in each file."""
        first, leaves, shape = of_files[0], _united_leaves(of_files), _united_shape(of_files)
        column: int | None = None
        if first.kind is Kind.ROWS and _leaves(first, Form.FIXED):
            is_compound = first.dtype.names
            column = self._numbers[first.path, first.axis] if is_compound else next(self._plain)
        elif first.kind is Kind.MATCHES and may_be_placed:
            layouts = layout_of_matches([each.listing for each in of_files], leaves, shape)
            if layouts is not None:
                column = len(self.columns)
                dtype = layouts[0].spec.dtype
                self.columns.append(Column(first.field._text, first.field.path, 0, dtype, True))
                self.layouts.append(layouts)
        single: int | None = None
        if column is None or _leaves(first, Form.TEXT, Form.RAGGED):
            single = self._single(of_files, leaves)
        return nests.map_nest(lambda leaf: _output(leaf, shape, column, single), leaves)

    def _single(self, of_files: Sequence[Located], leaves: Any) -> int:
        """Return the number of the single of a field: members of one data set share it."""
        first = of_files[0]
        are_rows = first.kind is Kind.ROWS
        key = (first.path, first.axis) if are_rows else (first.field._text, -1)
        if key not in self._single_numbers:
            self._single_numbers[key] = len(self.singles)
            rows = [each for each in self._located if each.kind is Kind.ROWS]
            together = [each for each in rows if key == (each.path, each.axis)]
            self.singles.append(_single(together or [first], of_files, leaves))
        return self._single_numbers[key]


def _output(
    leaf: Leaf, shape: tuple[int | None, ...], column: int | None, single: int | None
) -> Output:
    is_in_column = column is not None and leaf.form is Form.FIXED
    return Output(
        leaf.spec(shape), leaf, column if is_in_column else None, None if is_in_column else single
    )


def _united_leaves(of_files: Sequence[Located]) -> Any:
    """Return the leaves of a field, with strings of the width that all files need."""
    columns = zip(*(nests.flatten(each.leaves)[0] for each in of_files), strict=True)
    widest = [max(leaves, key=lambda leaf: leaf.dtype.itemsize) for leaves in columns]
    return nests.unflatten(nests.flatten(of_files[0].leaves)[1], widest)


def _united_shape(of_files: Sequence[Located]) -> tuple[int | None, ...]:
    lengths = zip(*(each.shape for each in of_files), strict=True)
    return tuple(each[0] if len(set(each)) == 1 else None for each in lengths)


def _single(together: Sequence[Located], of_files: Sequence[Located], leaves: Any) -> Single:
    first = together[0]
    of_rows = first.kind is Kind.ROWS
    widths = [leaf.dtype.itemsize for leaf in nests.flatten(leaves)[0]]
    dtype = first.dtype
    if dtype.names:
        forms = (Form.TEXT, Form.RAGGED) if of_rows else tuple(Form)
        members = dict.fromkeys(leaf.members for e in together for leaf in _leaves(e, *forms))
        dtype = subset(dtype, members)
    elif dtype.kind == "S":
        dtype = np.dtype(f"S{widths[0]}")
    elif not dtype.hasobject:
        dtype = dtype.newbyteorder("=")
    num_bytes = dtype.itemsize
    listings = [each.listing for each in of_files if each.listing is not None]
    if listings:
        elements = sum(int(each.shapes.prod(axis=1).sum()) for each in listings)
        num_bytes = -(-elements * dtype.itemsize // sum(len(each.names) for each in listings))
    return Single(first.field, first.kind, first.path, first.axis, dtype, num_bytes)
