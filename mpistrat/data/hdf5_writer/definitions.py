"""Groups, datasets and attributes that a program defines before the first step."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.data.hdf5_writer.dataset_spec import (
    OutputDataset,
    as_shape,
    canonical,
    is_same_type,
    make_dataset,
)
from mpistrat.data.hdf5_writer.session import Session
from mpistrat.errors import DataError
from mpistrat.system.text import brief


class Definitions:
    """Methods of `HDF5Writer` that define objects. `require` checks the context of a call."""

    def __init__(
        self, session: Session, require: Callable[[str], None], defaults: Mapping[str, Any]
    ) -> None:
        self._session = session
        self._require = require
        self._defaults = defaults

    def create_group(self, name: str, attrs: Mapping[str, Any] | None) -> None:
        """Create a group: see `HDF5Writer.create_group`. **Collective**."""
        kind = "HDF5Writer.create_group"
        session = self._session
        with self._session.ranks.call(kind) as call:
            self._require(kind)
            name = canonical(kind, name)
            if session.known_objects.get(name) is not None:
                raise DataError(f"{kind}: {name!r} is a dataset.")
            names = attribute_names(kind, attrs)
            call.agree(name, names)
        if name not in session.known_objects:
            self._session.note_groups(name)
            session.known_objects[name] = None
            session.changes.groups.append(name)
            session.is_changed = True
        if attrs:
            self.set_attrs(name, attrs)

    def create_dataset(
        self,
        name: str,
        shape: Any,
        dtype: Any,
        data: Any,
        split_axis: int,
        attrs: Mapping[str, Any] | None,
        chunks: Any,
        **given: Any,
    ) -> None:
        """Create a dataset: see `HDF5Writer.create_dataset`. **Collective**."""
        kind = "HDF5Writer.create_dataset"
        session = self._session
        # The defaults of the file are for datasets of steps, not for one value or a given array.
        is_plain = shape == () or shape is None or data is not None
        options = dict(given)
        for key, value in self._defaults.items():
            if not is_plain and not options[key]:
                options[key] = value
        with self._session.ranks.call(kind) as call:
            self._require(kind)
            name = canonical(kind, name)
            names = attribute_names(kind, attrs)
            is_static = data is not None or shape is None
            if data is None and shape is None and self._session.ranks.rank == 0:
                raise TypeError(f"{kind}: pass shape or data for {name!r}.")
            dataset = None
            if not is_static:
                dataset = make_dataset(
                    name,
                    as_shape(kind, shape),
                    dtype,
                    split_axis=split_axis,
                    fast_gzip=session.fast_gzip,
                    chunks=chunks,
                    **options,
                )
            is_there = self._check_existing(kind, name, dataset)
            described = "with data" if dataset is None else dataset.describe()
            call.agree(name, described, split_axis, names)
        if dataset is None:
            self._create_static(kind, name, shape, dtype, data, {"chunks": chunks, **options})
        elif is_there:
            if dataset.grows:
                session.datasets[name].split_axis = dataset.split_axis
        else:
            self._session.note_groups(name)
            if self._session.mode == "a" and not dataset.grows:
                self._create_empty(dataset)
            else:
                session.add(dataset)
        if attrs:
            self.set_attrs(name, attrs)

    def _check_existing(self, kind: str, name: str, dataset: OutputDataset | None) -> bool:
        """Return whether the dataset exists, or raise if it differs."""
        session = self._session
        if name not in session.known_objects:
            if session.steps or session.num_waiting:
                raise DataError(
                    f"{kind}: the file has steps, and no dataset {name!r}. Create all datasets "
                    "before the first step."
                )
            return False
        known = session.known_objects[name]
        if known is None:
            raise DataError(f"{kind}: {name!r} is a group.")
        if dataset is None:
            return True
        if name in session.created_names:
            raise DataError(f"{kind}: the dataset {name!r} was created before.")
        shape, dtype = known
        expected = (None, *shape[1:]) if name in session.datasets and shape else shape
        if expected != dataset.shape or not is_same_type(dtype, dataset.dtype):
            raise DataError(
                f"{kind}: the file has {name!r} with shape {expected} and dtype {dtype}, not "
                f"{dataset.shape} and {dataset.dtype}."
            )
        return True

    def _create_static(
        self, kind: str, name: str, shape: Any, dtype: Any, data: Any, options: dict[str, Any]
    ) -> None:
        """Create a dataset with the values of rank 0."""
        session = self._session
        given = {
            key: value for key, value in options.items() if value is not None and value is not False
        }
        values = np.array(data) if isinstance(data, np.ndarray) else data  # it may change later

        def create(group: Any, path: str) -> None:
            group.create_dataset(path, shape, dtype, values, **given)

        def probe() -> Any:
            # In memory first: a value that h5py refuses must raise here. At the next commit, it
            # would cost the first steps.
            with hdf5.h5py().File(io.BytesIO(), "w") as file:
                create(file, "x")
                found = file["x"].shape, file["x"].dtype
            known = session.known_objects.get(name)
            if known is None:
                return False
            if known[0] != found[0] or known[1] != found[1]:
                raise DataError(
                    f"{kind}: the file has {name!r} with shape {known[0]} and dtype {known[1]}, "
                    f"not {found[0]} and {found[1]}."
                )
            return True

        # Only rank 0's data count, so only rank 0 can compare. The other ranks take part to learn
        # whether there is a new object.
        if self._session.ranks.on_root(probe, kind):
            return
        self._session.note_groups(name)
        session.known_objects[name] = ((), np.dtype("V1"))
        if session.target is not None:
            session.changes.static[name] = create
            session.known_objects[name] = (np.shape(values), np.dtype("V1"))
        session.is_changed = True

    def _create_empty(self, dataset: OutputDataset) -> None:
        """Create a dataset of fixed size in a file that grows: it has only the fill value."""
        session = self._session
        session.known_objects[dataset.name] = dataset.shape, dataset.dtype
        session.changes.datasets[dataset.name] = dataset
        session.is_changed = True

    def set_attrs(self, name: str, attrs: Mapping[str, Any]) -> None:
        """Set attributes: see `HDF5Writer.set_attrs`. **Collective**."""
        kind = "HDF5Writer.set_attrs"
        session = self._session
        with self._session.ranks.call(kind) as call:
            self._require(kind)
            path = "" if name == "/" else canonical(kind, name)
            if path and path not in session.known_objects:
                raise KeyError(f"{kind}: the file has no object {name!r}.")
            call.agree(path, attribute_names(kind, attrs))

        def probe() -> bool:
            assert session.target is not None
            # Compared with the values that h5py returns, whose types differ: an int becomes a
            # numpy.int64. A resumed program mostly sets what the file has, and then no headers are
            # written.
            with hdf5.h5py().File(io.BytesIO(), "w") as file:
                for key, value in attrs.items():
                    file.attrs[key] = value
                return not session.target.has_attrs(path, file.attrs)

        if self._session.ranks.on_root(probe, kind):
            copied = {
                key: np.array(value) if isinstance(value, np.ndarray) else value
                for key, value in attrs.items()
            }
            session.changes.attrs.setdefault(path, {}).update(copied)
            session.is_changed = True


def attribute_names(kind: str, attrs: Any) -> tuple[str, ...]:
    """Return the names of attributes in order, or raise TypeError."""
    if attrs is None:
        return ()
    if not isinstance(attrs, Mapping) or not all(isinstance(key, str) for key in attrs):
        raise TypeError(f"{kind}: attrs must be a dict with strings as keys, not {brief(attrs)}.")
    return tuple(sorted(attrs))
