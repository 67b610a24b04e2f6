"""Single examples: text, rows of any length, matches and attributes, one at a time."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.data.hdf5.catalog import Catalog
from mpistrat.data.hdf5.fields import encoded, shown
from mpistrat.data.hdf5.layouts import Output
from mpistrat.data.hdf5.locate import Kind
from mpistrat.data.hdf5.open_files import OpenFiles
from mpistrat.data.hdf5.types import Form, member, value_of
from mpistrat.data.spec import known_shape
from mpistrat.errors import DataError

Allocate = Callable[[tuple[int, ...], np.dtype], np.ndarray]
"""Allocates an uninitialised array of a shape and a dtype."""

_READ_ERRORS = (OSError, KeyError, TypeError, ValueError, RuntimeError)
"""The errors that h5py raises."""

_CACHE_BYTES = 2**23
"""The attributes of a field stay in memory for all passes if they need at most this much."""

_VALUE_OVERHEAD_BYTES = 120
"""Memory that Python needs per value in addition to its bytes."""


class SingleReader:
    """Reads one field with HDF5, one example at a time."""

    # HDF5 reads into zeroed memory, because it does not touch elements that were never written.

    def __init__(
        self, catalog: Catalog, number: int, files: OpenFiles, cache: dict[int, Any]
    ) -> None:
        h5py = hdf5.h5py()
        self._h5s, self._h5d, self._h5a = h5py.h5s, h5py.h5d, h5py.h5a
        self._catalog = catalog
        self._single = single = catalog.singles[number]
        self._number = number
        self._files = files
        self._memory_type = hdf5.memory_type(single.dtype)
        size = (single.bytes_per_example + _VALUE_OVERHEAD_BYTES) * int(catalog.offsets[-1])
        is_cached = single.field.attribute is not None and size <= _CACHE_BYTES
        self._cache = cache if is_cached else None
        """Values by the number of their example."""
        is_fixed = not single.dtype.hasobject and not single.dtype.names
        self._may_be_placed = is_fixed and single.kind is Kind.MATCHES

    def columns(
        self, numbers: np.ndarray, files: np.ndarray, rows: np.ndarray, empty: Allocate
    ) -> dict[int, np.ndarray]:
        """Return the arrays of some examples, by the number of their output."""
        values = self._read(numbers, files, rows)

        def describe(place: int) -> str:
            return self._describe(int(files[place]) if files.ndim else 0, int(rows[place]))

        return {
            number: _column_of(output, values, empty, describe)
            for number, output in enumerate(self._catalog.outputs)
            if output.single == self._number
        }

    def _read(self, numbers: np.ndarray, files: np.ndarray, rows: np.ndarray) -> list[Any]:
        """Return the value of each example, as h5py returns it."""
        values: list[Any] = [None] * len(numbers)
        missing = np.arange(len(numbers))
        if self._cache is not None:
            cached = list(map(self._cache.get, numbers.tolist()))
            values, missing = cached, np.flatnonzero([value is None for value in cached])
        for file in np.unique(files).tolist() if files.ndim else (0,):
            self._files.check(file)
            own = missing if not files.ndim else missing[files[missing] == file]
            if not len(own):
                continue
            with self._files.lock:
                found = self._read_file(file, rows[own])
            for place, value in zip(own.tolist(), found, strict=True):
                values[place] = value
                if self._cache is not None:
                    self._cache[int(numbers[place])] = value
        return values

    def _describe(self, file: int, row: int) -> str:
        """Return the name of an example for error messages."""
        entry = self._catalog.files[file]
        field = f"the field {shown(self._single.field)} of {entry.path}"
        if self._single.kind is Kind.MATCHES:
            return (
                f"{entry.listings[shown(self._single.field)].path(row)!r}, example {row} of {field}"
            )
        if self._single.kind is Kind.CONSTANT:
            return f"The value of {field}"
        return f"Row {row} of {field}"

    def _read_file(self, file: int, rows: np.ndarray) -> Sequence[Any]:
        """Return the values of some rows of a file."""
        if self._single.kind is Kind.MATCHES:
            return self._matches(file, rows)
        try:
            if self._single.kind is Kind.CONSTANT:
                node = self._files.file(file)[self._single.path].id
                return [self._attribute(node, None)] * len(rows)
            return self._rows(file, rows)
        except DataError:
            raise
        except _READ_ERRORS as reason:
            raise self._error(reason, file, int(rows[0])) from reason

    def _error(self, reason: Exception, file: int, row: int) -> DataError:
        return DataError(
            f"{self._describe(file, row)} cannot be read: {reason}. The file is damaged, or it "
            "changed after the dataset was created."
        )

    def _matches(self, file: int, rows: np.ndarray) -> list[Any]:
        single = self._single
        listing = self._catalog.files[file].listings[shown(single.field)]
        paths = listing.paths
        # Strings may be narrower in this file than in others.
        has_width = listing.width == single.dtype.itemsize
        may_be_placed = self._may_be_placed and has_width
        root: Any = None
        values = []
        for row in rows.tolist():
            try:
                value = None
                if may_be_placed and listing.offsets[row] >= 0:
                    value = self._placed(file, int(listing.offsets[row]), listing.shapes[row])
                if value is None:
                    root = root or self._files.file(file).id
                    value = self._whole(root, paths[row], listing.shapes[row])
            except DataError:
                raise
            except _READ_ERRORS as reason:
                raise self._error(reason, file, row) from reason
            values.append(value)
        return values

    def _placed(self, file: int, offset: int, shape: np.ndarray) -> np.ndarray | None:
        """Return a dataset whose place in the file is known, ``None`` if it has no bytes."""
        value = np.empty(tuple(shape.tolist()), self._single.dtype)
        if not value.nbytes:
            return None
        target = value.reshape(-1).view(np.uint8).data
        descriptor = self._files.descriptor(file)
        if os.preadv(descriptor, [target], offset) != value.nbytes:
            raise OSError("the file has become shorter")
        return value

    def _whole(self, root: Any, path: bytes, shape: np.ndarray) -> Any:
        """Return a dataset or an attribute of it; raise an error if its shape has changed."""
        if self._single.field.attribute is not None:
            return self._attribute(root, path, tuple(shape.tolist()))
        found = self._h5d.open(root, path)
        value = np.zeros(self._unchanged(found.shape, shape.tolist()), self._single.dtype)
        if value.size:
            found.read(self._h5s.ALL, self._h5s.ALL, value, self._memory_type)
        return value

    def _attribute(
        self, node: Any, path: bytes | None, shape: tuple[int, ...] | None = None
    ) -> Any:
        name = encoded(self._single.field.attribute or "")
        found = self._h5a.open(node, name, obj_name=path or b".")
        value = np.zeros(self._unchanged(found.shape, shape), self._single.dtype)
        if value.size:
            found.read(value, self._memory_type)
        return value

    def _unchanged(self, found: tuple[int, ...], expected: Any) -> tuple[int, ...]:
        if expected is not None and tuple(expected) != found:
            raise ValueError(f"its shape is {found} and was {tuple(expected)}")
        return found

    def _rows(self, file: int, rows: np.ndarray) -> Sequence[Any]:
        """Return rows of a dataset with elements of any length."""
        dataset = self._files.file(file)[self._single.path].id
        if dataset.rank > 1:
            return [self._row(dataset, row) for row in rows.tolist()]
        length = dataset.shape[0]
        if len(rows) and int(rows.max()) >= length:
            raise ValueError(f"the dataset has {length} rows")
        # HDF5 is faster if rows are read in the order of the file.
        order = np.argsort(rows, kind="stable")
        ascending = rows[order]
        space = dataset.get_space()
        first, count = int(ascending[0]), len(rows)
        if (np.diff(ascending) == 1).all():
            space.select_hyperslab((first,), (count,))
        else:
            space.select_elements(ascending.astype(np.uint64)[:, None])
        values = np.zeros(count, self._single.dtype)
        dataset.read(self._h5s.create_simple((count,)), space, values, self._memory_type)
        back = np.empty(count, np.intp)
        back[order] = np.arange(count)
        return [values[place] for place in back.tolist()]

    def _row(self, dataset: Any, row: int) -> Any:
        """Return one row of a dataset of several dimensions."""
        axis, shape = self._single.axis, dataset.shape
        count = (*shape[:axis], 1, *shape[axis + 1 :])
        start = (*[0] * axis, row, *[0] * (len(shape) - axis - 1))
        space = dataset.get_space()
        space.select_hyperslab(start, count)
        values = np.zeros(count, self._single.dtype)
        if values.size:
            dataset.read(self._h5s.create_simple(count), space, values, self._memory_type)
        return values.reshape(shape[:axis] + shape[axis + 1 :])


def _column_of(
    output: Output,
    values: Sequence[Any],
    empty: Allocate,
    describe: Callable[[int], str],
) -> np.ndarray:
    """Return one array of the examples whose `values` were read."""
    leaf, spec = output.leaf, output.spec
    parts = []
    for number, value in enumerate(values):
        try:
            parts.append(value_of(value, leaf))
        except UnicodeDecodeError as reason:
            raise DataError(
                f"{describe(number)} is not UTF-8: {reason}. Store it as bytes of a fixed "
                "length, or as rows of uint8."
            ) from None
    if None in spec.shape:
        column = np.empty(len(parts), object)
        for number, part in enumerate(parts):
            # A copy, because the value may hold other members too.
            column[number] = np.array(part, copy=bool(leaf.members) or None)
        return column
    if leaf.form is Form.TEXT:
        width = max((part.dtype.itemsize for part in parts), default=0) // 4
        texts = np.empty((len(parts), *known_shape(spec)), f"U{max(width, 1)}")
        for number, part in enumerate(parts):
            texts[number] = part
        return texts
    output_array = empty((len(parts), *known_shape(spec)), spec.dtype)
    for number, part in enumerate(parts):
        output_array[number] = part
    return output_array


def leaf_of(
    output: Output,
    columns: Mapping[int, np.ndarray],
    count: int,
    empty: Allocate,
) -> np.ndarray:
    """Return one array of `count` examples from compound rows, or an empty one."""
    if output.column is None:
        return _column_of(output, [], empty, str)
    whole = columns.get(output.column)
    array = empty((count, *known_shape(output.spec)), output.spec.dtype)
    if whole is not None:
        array[...] = member(whole, output.leaf.members)
    return array
