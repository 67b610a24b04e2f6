"""What surrounds the data sets of a file, copied: groups, links, attributes and references."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.errors import DataError

__all__ = ["TreeCopy", "holds_references", "plain_type"]


class TreeCopy:
    """Copies groups and links of `source`; data sets it leaves to others.

    Parameters
    ----------
    source, target : h5py.File
        The second one is empty.

    Attributes
    ----------
    datasets : list of str
        Paths of the data sets, each once.
    """

    def __init__(self, source: Any, target: Any) -> None:
        self._source, self._target = source, target
        self._paths = {_address(source): "/"}
        self._later_links: list[tuple[str, str]] = []
        self.datasets: list[str] = []

    def copy_groups(self) -> None:
        """Make the groups, the soft and external links and the named types. Local."""
        waiting = ["/"]
        while waiting:
            path = waiting.pop()
            for name in self._source[path]:
                child = f"{path.rstrip('/')}/{name}"
                if self._copy_child(path, name, child):
                    waiting.append(child)

    def _copy_child(self, path: str, name: str, child: str) -> bool:
        """Copy a link, and what it leads to unless that is a data set. Return if it is a group."""
        h5py = hdf5.h5py()
        link = self._source[path].get(name, getlink=True)
        if not isinstance(link, h5py.HardLink):
            self._target[path][name] = link
            return False
        found = self._source[child]
        if _address(found) in self._paths:
            self._later_links.append((child, self._paths[_address(found)]))
            return False
        self._paths[_address(found)] = child
        if isinstance(found, h5py.Group):
            self._target.create_group(child)
            return True
        if isinstance(found, h5py.Dataset):
            self.datasets.append(child)
        else:
            self._source.copy(found, self._target, name=child, without_attrs=True)
        return False

    def finish(self) -> None:
        """Copy the attributes, references and further hard links, once all objects exist. Local."""
        for path, first in self._later_links:
            self._target[path] = self._target[first]
        for path in self._paths.values():
            for name in self._source[path].attrs:
                self._copy_attribute(path, name)
        for path in self.datasets:
            dataset = self._source[path]
            if dataset.size and holds_references(dataset.dtype):
                values = np.empty(dataset.shape, dataset.dtype)
                dataset.read_direct(values)
                self._target[path][...] = self._moved(values, path)

    def _copy_attribute(self, path: str, name: str) -> None:
        h5py = hdf5.h5py()
        source, target = self._source[path], self._target[path]
        old = source.attrs.get_id(name)
        space = old.get_space()
        new = h5py.h5a.create(target.id, name.encode(), plain_type(old.get_type()), space)
        if space.get_simple_extent_type() == h5py.h5s.NULL:
            return
        values = np.zeros(old.shape, old.dtype)
        if values.size:
            old.read(values)
            where = f"the attribute {name!r} of {path}"
            new.write(self._moved(values, where) if holds_references(old.dtype) else values)

    def _moved(self, values: np.ndarray, where: str) -> np.ndarray:
        """Return `values` with references to the same objects of the target."""
        result: np.ndarray = values.copy()
        if values.dtype.names:
            for field in values.dtype.names:
                if holds_references(values.dtype[field]):
                    result[field] = self._moved(values[field], where)
            return result
        for index in np.ndindex(values.shape):
            item = values[index]
            if isinstance(item, np.ndarray):
                result[index] = self._moved(item, where)
            else:
                result[index] = self._moved_reference(item, where)
        return result

    def _moved_reference(self, reference: Any, where: str) -> Any:
        h5py = hdf5.h5py()
        if not reference:
            return reference
        path = None
        if not isinstance(reference, h5py.RegionReference):
            path = self._paths.get(_address(self._source[reference]))
        if path is None:
            raise DataError(
                f"{where} refers to a region of a data set or to an object without a name, which "
                "cannot be kept in another file. Remove it, or keep this file as it is."
            )
        return self._target[path].ref


def plain_type(type_id: Any) -> Any:
    """Return an HDF5 type that can be used in any file: not one that is named in its own. Local."""
    return type_id.copy() if type_id.committed() else type_id


def holds_references(dtype: np.dtype) -> bool:
    """Return whether values of `dtype` refer to objects of their file. Local."""
    h5py = hdf5.h5py()
    if dtype.names:
        return any(holds_references(dtype[name]) for name in dtype.names)
    if dtype.subdtype:
        return holds_references(dtype.subdtype[0])
    inner = h5py.check_vlen_dtype(dtype)
    if isinstance(inner, np.dtype):
        return holds_references(inner)
    return h5py.check_ref_dtype(dtype) is not None


def _address(found: Any) -> tuple[int, int]:
    info = hdf5.h5py().h5o.get_info(found.id)
    return info.fileno, info.addr
