"""Parts of a step: what the program passes to `append` and `write`, by the name of the dataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat.arguments import as_array, as_integer
from mpistrat.arrays import host_view, is_number
from mpistrat.data.hdf5_writer.dataset_spec import OutputDataset, canonical, is_same_type
from mpistrat.errors import DataError
from mpistrat.ragged import Ragged
from mpistrat.system.text import brief
from mpistrat.values import Mirrored, PerReplica


@dataclass
class Leaf:
    """The values of this rank for one dataset."""

    name: str
    arrays: list[Any]
    """One array per replica of this rank, or one row that is the same on all ranks."""
    is_shared: bool
    at: list[Any] = field(default_factory=list)
    """For `write`: the rows of each array, a box, or ``None`` for all rows in replica order."""

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the arrays."""
        dtype: np.dtype = self.arrays[0].dtype
        return dtype

    @property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of a row."""
        return tuple(self.arrays[0].shape[1:])


def parse_step(what: str, step: Any, num_local: int, is_shared_out: bool) -> dict[str, Leaf]:
    """Return the leaves of a step in the order of their names.

    `num_local` is the number of replicas of this rank; `is_shared_out` says whether other ranks may
    have a different number.
    """
    if not isinstance(step, Mapping):
        raise TypeError(
            f"{what} takes a dict from names of datasets to values, not {brief(step)} of type "
            f"{type(step).__name__}."
        )
    found: dict[str, Leaf] = {}
    _add_leaves(what, step, "", (num_local, is_shared_out), found)
    if not found:
        raise DataError(f"{what} got a step without values.")
    return dict(sorted(found.items()))


def _add_leaves(
    what: str,
    step: Mapping[Any, Any],
    path: str,
    replicas: tuple[int, bool],
    found: dict[str, Leaf],
) -> None:
    for key, value in step.items():
        if not isinstance(key, str):
            raise TypeError(f"{what}: the name of a dataset must be a string, not {key!r}.")
        name = canonical(what, f"{path}/{key}")
        if isinstance(value, Mapping):
            _add_leaves(what, value, name, replicas, found)
        elif name in found:
            raise DataError(f"{what} got two values for the dataset {name!r}.")
        else:
            found[name] = _leaf(f"{what}: {name!r}", name, value, *replicas)


def _leaf(what: str, name: str, value: Any, num_local: int, is_shared_out: bool) -> Leaf:
    if isinstance(value, Mirrored):
        return Leaf(name, [_array(what, value.values[0])[None]], True)
    if hasattr(type(value), "assign") and hasattr(type(value), "read_value"):  # a variable
        return Leaf(name, [np.asarray(value)[None]], True)
    if not isinstance(value, PerReplica):
        array = _array(what, value)
        if not array.ndim:
            return Leaf(name, [array[None]], True)
        if is_shared_out:
            raise ValueError(
                f"{what} is a plain array, but with num_replicas= a rank may run several replicas, "
                "so it is unclear which one it belongs to. Pass the PerReplica that strategy.run "
                "returns."
            )
        return Leaf(name, [array], False)
    if len(value.values) != num_local:
        raise ValueError(
            f"{what} has {len(value.values)} components, but this rank has {num_local} replicas."
        )
    arrays = [_array(what, each) for each in value.values]
    for array in arrays:
        if not array.ndim:
            raise DataError(
                f"{what} is a number that may differ between replicas. Reduce it first, with "
                "strategy.reduce, or return an array with one row per replica."
            )
        first = arrays[0]
        if array.dtype != first.dtype or array.ndim != first.ndim:
            raise DataError(
                f"{what}: the replicas of this rank have different dtypes or numbers of axes."
            )
    return Leaf(name, arrays, False)


def _array(what: str, value: Any) -> Any:
    if isinstance(value, Ragged):
        raise DataError(
            f"{what} has rows of different lengths. Append its values, and its row_lengths() as a "
            'second dataset, such as "count".'
        )
    if isinstance(value, str):
        array: Any = np.asarray(value.encode())
    elif isinstance(value, bytes | np.bytes_ | list | tuple):
        array = np.asarray(value)
    else:
        array = as_array(what, value)
    if array.dtype.hasobject:
        raise DataError(
            f"{what} has the dtype {array.dtype}, whose elements may differ in length. Append the "
            "elements of all rows to one dataset, and the number of elements of each row to a "
            'second one, such as "count".'
        )
    if array.dtype.kind in "UMm":
        raise DataError(
            f"{what} has the dtype {array.dtype}, which HDF5 cannot store. Convert it: text to "
            'bytes with numpy.char.encode(array, "utf-8"), times to integers.'
        )
    return array


def check_type(what: str, leaf: Leaf, dataset: OutputDataset) -> None:
    """Raise DataError unless the values have the dtype of the dataset; nothing is cast."""
    if not is_same_type(leaf.dtype, dataset.dtype):
        raise DataError(
            f"{what}: {leaf.name!r} has the dtype {leaf.dtype}, but the dataset has "
            f"{dataset.dtype}. Nothing is converted: use astype first."
        )


def check_rows(what: str, leaf: Leaf, dataset: OutputDataset) -> None:
    """Raise DataError unless the values are whole rows of the dataset."""
    for array in leaf.arrays:
        if tuple(array.shape[1:]) != dataset.inner:
            raise DataError(
                f"{what}: {leaf.name!r} has rows of the shape {tuple(array.shape[1:])}, but the "
                f"dataset has rows of the shape {dataset.inner}."
            )


def check_split(what: str, leaf: Leaf, dataset: OutputDataset) -> None:
    """Raise DataError unless the values are parts of one row along the dataset's split axis."""
    axis = dataset.split_axis - 1
    for array in leaf.arrays:
        shape = tuple(array.shape)
        others = [*shape[:axis], *shape[axis + 1 :]]
        if len(shape) != len(dataset.inner) or others != [
            *dataset.inner[:axis],
            *dataset.inner[axis + 1 :],
        ]:
            raise DataError(
                f"{what}: a part of {leaf.name!r} has the shape {shape}, but the dataset has rows "
                f"of the shape {dataset.inner}, and parts may be shorter only along axis {axis} "
                f"(split_axis={dataset.split_axis} without the first axis)."
            )


Box = tuple[tuple[int, int], ...]
"""Start and stop along each axis."""


def place_leaf(what: str, leaf: Leaf, at: Any, dataset: OutputDataset) -> None:
    """Set where the arrays of a leaf belong: rows, a box, or ``None`` for replica order."""
    what = f"{what}: {leaf.name!r}"
    per_array = list(at.values) if isinstance(at, PerReplica) else [at] * len(leaf.arrays)
    if len(per_array) != len(leaf.arrays):
        raise ValueError(f"{what}: at has {len(per_array)} components for {len(leaf.arrays)}.")
    if len(leaf.arrays) > 1 and at is not None and not isinstance(at, PerReplica):
        raise ValueError(
            f"{what}: this rank has {len(leaf.arrays)} replicas, so at must be a PerReplica too."
        )
    leaf.at = [
        _place(what, array, each, dataset)
        for array, each in zip(leaf.arrays, per_array, strict=True)
    ]


def _place(what: str, array: Any, at: Any, dataset: OutputDataset) -> Any:
    length = dataset.num_rows
    if isinstance(at, tuple):
        return _box(what, array, at, dataset)
    if tuple(array.shape[1:]) != dataset.inner:
        raise DataError(
            f"{what} has rows of the shape {tuple(array.shape[1:])}, but the dataset has rows of "
            f"the shape {dataset.inner}."
        )
    if at is None:
        return None
    if isinstance(at, slice):
        rows: Any = _range(what, at, length)
    elif is_number(at):
        row = as_integer(f"{what}: at", at)
        rows = range(row, row + 1)
    else:
        rows = host_view(as_array(what, np.asarray(at) if isinstance(at, list) else at))
        if rows.ndim != 1 or (rows.size and rows.dtype.kind not in "iu"):
            raise TypeError(
                f"{what}: at must be None, a slice, integers, or a tuple of slices, not "
                f"{brief(at)}."
            )
        rows = rows.astype(np.int64)
    if len(rows) != array.shape[0]:
        raise DataError(f"{what} has {array.shape[0]} rows, but at names {len(rows)}.")
    numbers = np.asarray(rows)
    outside = numbers[(numbers < 0) | (numbers >= length)]
    if outside.size:
        raise IndexError(
            f"{what}: row {outside[0]} is out of range: the dataset has {length} rows."
        )
    if isinstance(rows, np.ndarray) and len(np.unique(rows)) != len(rows):
        found, counts = np.unique(rows, return_counts=True)
        raise DataError(
            f"{what}: row {int(found[counts > 1][0])} of dataset {dataset.name!r} is written "
            "twice. Write each row once."
        )
    return rows


def _range(what: str, at: slice, length: int) -> Any:
    for bound in (at.start, at.stop):
        if bound is not None and not -length <= bound <= length:
            raise IndexError(f"{what}: {at} is out of range: the axis has the length {length}.")
    found = range(*at.indices(length))
    return found if found.step == 1 else np.asarray(found, np.int64)


def _box(what: str, array: Any, at: tuple[Any, ...], dataset: OutputDataset) -> Box:
    shape = (dataset.num_rows, *dataset.inner)
    if len(at) > len(shape) or not all(isinstance(each, slice) for each in at):
        raise TypeError(f"{what}: a box is a tuple of at most {len(shape)} slices, not {at!r}.")
    ranges = [
        _range(what, each, length)
        for each, length in zip((*at, *[slice(None)] * (len(shape) - len(at))), shape, strict=True)
    ]
    if not all(isinstance(each, range) for each in ranges):
        raise ValueError(f"{what}: the slices of a box must have the step 1, not {at!r}.")
    if tuple(len(each) for each in ranges) != tuple(array.shape):
        raise DataError(
            f"{what} has the shape {tuple(array.shape)}, but the box has "
            f"{tuple(len(each) for each in ranges)}."
        )
    return tuple((each.start, max(each.stop, each.start)) for each in ranges)
