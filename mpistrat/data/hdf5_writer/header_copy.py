"""Copies of the groups and datasets that change, next to links to everything that stays."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.data.hdf5_writer.dataset_spec import OutputDataset
from mpistrat.data.hdf5_writer.header_image import END, STEPS, Fill

Static = Callable[[Any, str], None]
"""Takes a group and a name, and creates a dataset with values there."""


def growing_datasets(file: Any) -> dict[str, Any]:
    """Return the datasets of an open file that can grow along their first axis, by path."""
    found: dict[str, Any] = {}

    def visit(name: str, node: Any) -> None:
        is_dataset = isinstance(node, hdf5.h5py().Dataset)
        if is_dataset and node.chunks and node.maxshape[0] is None and not node.is_virtual:
            found[name] = node

    file.visititems(visit)
    return found


def fill_with_copies(names: Collection[str]) -> Fill:
    """Return the function that fills a new root group for `make_template`.

    The datasets `names`, and the groups around them, are created again. The new root group has
    links to all other objects of the old one.
    """

    def fill(file: Any, source: Any, group: Any) -> dict[str, Any]:
        copier = _Copier(file, source, names, names)
        copier.copy_group(file["/"], group, "")
        # A commit can only change values in place, so both must exist before the template is made.
        for name in (STEPS, END):
            if name not in group.attrs:
                group.attrs.create(name, 0, dtype=np.dtype("<i8"))
        return copier.copies

    return fill


class Changes:
    """What the program has created or set, which a new root group is to have."""

    def __init__(self) -> None:
        self.groups: list[str] = []
        self.datasets: dict[str, OutputDataset] = {}
        """New datasets that are written in chunks."""
        self.static: dict[str, Static] = {}
        """New datasets with values."""
        self.attrs: dict[str, dict[str, Any]] = {}
        """Attributes by the path of their object; the root group has the empty path."""

    def __bool__(self) -> bool:
        return bool(self.groups or self.datasets or self.static or self.attrs)

    def fill(self, file: Any, source: Any, group: Any, written: Collection[str]) -> dict[str, Any]:
        """Fill a new root group with the objects of the file so far, and the changes.

        `written` are the datasets whose chunks HDF5Writer knows.
        """
        copier = _Copier(file, source, self._changed(file), written, self.attrs)
        copier.copy_group(file["/"], group, "")
        for name in self.groups:
            group.require_group(name)
        for name, dataset in self.datasets.items():
            initial = tuple(length or 0 for length in dataset.shape)
            group.create_dataset(name, initial, dataset.dtype, **dataset.options)
        for name, create in self.static.items():
            create(group, name)
        for name, attrs in self.attrs.items():
            node = group[name] if name else group
            for key, value in attrs.items():
                node.attrs[key] = value
        return {}

    def _changed(self, file: Any) -> set[str]:
        """Return the paths of old objects that must be created again."""
        paths = [*self.groups, *self.datasets, *self.static]
        # The groups around a new object get a new link.
        around = {part for path in paths for part in _parents(path) if part in file}
        return around | {name for name in self.attrs if name and name in file}


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:number]) for number in range(1, len(parts))]


class _Copier:
    """Creates the objects `names` of a file again in a new root group, and links all others."""

    def __init__(
        self,
        file: Any,
        source: Any,
        names: Collection[str],
        written: Collection[str],
        replaced: Mapping[str, Any] | None = None,
    ) -> None:
        self._names = set(names)
        self._written = written
        self._source = source
        self._around = {part for path in names for part in _parents(path)}
        self._targets = {h5_address(file[name]) for name in self._names if name in file}
        self._holds: dict[int, bool] = {}
        self._replaced = replaced or {}
        self._made: dict[int, Any] = {h5_address(file["/"]): None}
        """New objects by the address of the old one, which may have several links."""
        self.copies: dict[str, Any] = {}
        """The new datasets that are written in chunks."""

    def copy_group(self, old: Any, new: Any, path: str) -> None:
        """Fill `new` with the content of the group `old`, whose path is `path`."""
        h5py = hdf5.h5py()
        self._made[h5_address(old)] = new
        self._copy_attrs(new, path)
        for name in old:
            link = old.get(name, getlink=True)
            if not isinstance(link, h5py.HardLink):
                new[name] = link
                continue
            node, below = old[name], f"{path}/{name}".lstrip("/")
            # Several links may lead to one object, and groups may contain themselves.
            address = h5_address(node)
            if address in self._made:
                new[name] = self._made[address]
            elif isinstance(node, h5py.Group) and self._is_copied(node, below):
                self.copy_group(node, new.create_group(name), below)
            elif below in self._names:
                self._made[address] = self._copy_dataset(node, new, name, below)
            else:
                h5py.h5o.link(node.id, new.id, os_name(name))

    def _is_copied(self, group: Any, path: str) -> bool:
        """Return whether the copy of a group differs from it."""
        return path in self._around | self._names or self._holds_target(group)

    def _holds_target(self, group: Any) -> bool:
        """Return whether a group has a link, at any depth, to an object that is created again."""
        h5py, address = hdf5.h5py(), h5_address(group)
        if address not in self._holds:
            self._holds[address] = False  # for links back up
            self._holds[address] = any(
                h5_address(node) in self._targets
                or (isinstance(node, h5py.Group) and self._holds_target(node))
                for node in (
                    group[name]
                    for name in group
                    if isinstance(group.get(name, getlink=True), h5py.HardLink)
                )
            )
        return self._holds[address]

    def _copy_dataset(self, old: Any, new: Any, name: str, path: str) -> Any:
        h5py = hdf5.h5py()
        if path not in self._written:
            # It is copied with its elements, which HDF5Writer does not write.
            new.copy(self._source[path], name)
            return new[name]
        properties, space = _properties_of(old), old.id.get_space()
        if old.chunks and old.maxshape[0] is None:
            unlimited = h5py.h5s.UNLIMITED
            limits = [unlimited if length is None else length for length in old.maxshape]
            space = h5py.h5s.create_simple((0, *old.shape[1:]), tuple(limits))
        made = h5py.h5d.create(new.id, os_name(name), old.id.get_type(), space, properties)
        copy = h5py.Dataset(made)
        self._copy_attrs(copy, path)
        self.copies[path] = copy
        return copy

    def _copy_attrs(self, new: Any, path: str) -> None:
        h5py = hdf5.h5py()
        old = self._source[f"/{path}"]
        replaced = self._replaced.get(path, {})
        for number in range(h5py.h5a.get_num_attrs(old.id)):
            source = h5py.h5a.open(old.id, index=number)
            if os_text(source.name) in replaced:
                continue
            kind, space = source.get_type(), source.get_space()
            made = h5py.h5a.create(new.id, source.name, kind, space)
            if space.get_simple_extent_type() == h5py.h5s.NULL:
                continue
            # Memory of the same type: nothing is converted, and pointers stay valid meanwhile.
            values = np.empty(space.get_simple_extent_dims(), source.dtype)
            source.read(values)
            made.write(values)


def _properties_of(dataset: Any) -> Any:
    """Return properties to create the same dataset with a layout of version 3."""
    h5p, old = hdf5.h5py().h5p, dataset.id.get_create_plist()
    new = h5p.create(h5p.DATASET_CREATE)
    new.set_obj_track_times(False)  # headers must not depend on when they are made
    if dataset.chunks:
        new.set_chunk(dataset.chunks)
    for number in range(old.get_nfilters()):
        code, flags, values, _ = old.get_filter(number)
        new.set_filter(code, flags, values)
    new.set_fill_time(old.get_fill_time())
    if old.fill_value_defined() == hdf5.h5py().h5d.FILL_VALUE_USER_DEFINED:
        value = np.empty((), dataset.dtype)
        old.get_fill_value(value)
        new.set_fill_value(value)
    return new


def os_name(name: str) -> bytes:
    """Return a name as h5py's low-level functions take it."""
    return name.encode("utf-8", "surrogateescape")


def os_text(name: bytes) -> str:
    """Return a name that h5py's low-level functions return."""
    return name.decode("utf-8", "surrogateescape")


def h5_address(node: Any) -> int:
    """Return the address of the header of an open object."""
    return int(hdf5.h5py().h5o.get_info(node.id).addr)
