"""Linked files: the other files that hold data of an object, directly or through further files.

External links and virtual datasets lead to other files, which may lead to more files. If a source
file of a virtual dataset is missing, HDF5 silently returns the fill value.
"""

from __future__ import annotations

import itertools
import os
import warnings
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

from mpistrat import hdf5
from mpistrat.data.hdf5.fields import parts_of
from mpistrat.errors import DataError
from mpistrat.settings import environment
from mpistrat.system.callsite import users_stacklevel

_MAX_SHOWN = 8
"""Number of names that a warning shows."""

_MAX_LINKS = 16
"""HDF5 follows at most this number of soft and external links to one object."""

_MAX_OPEN = 64
"""At most this number of the other files stays open while chains are followed."""

_HDF5_ERRORS = (KeyError, OSError, RuntimeError, ValueError)


class LinkedFiles:
    """The files other than `own` that hold data of objects, or links in the path to them.

    Parameters
    ----------
    own : str
        The path of the file in which the objects are looked up.
    """

    def __init__(self, own: str) -> None:
        self._own = os.path.realpath(own)
        self._paths: set[str] = set()
        self._open: OrderedDict[tuple[str, bool], Any] = OrderedDict()
        self._done: set[tuple[str, int]] = set()
        """Virtual datasets that were followed: the paths of their files, and their addresses."""
        self._active: list[tuple[tuple[str, int], str]] = []
        """Virtual datasets that are being followed, each with its name for error messages."""

    def __enter__(self) -> LinkedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        while self._open:
            self._open.popitem()[1].close()

    @property
    def paths(self) -> list[str]:
        """The real paths of the files, sorted."""
        return sorted(self._paths - {self._own})

    def add_links(self, file: Any, path: str) -> None:
        """Add the files that the external links in `path`, a path in an open file, lead to.

        A link that cannot be followed ends this without an error.
        """
        for other in self._linked(file, path):
            self._paths.add(os.path.realpath(other.filename))

    def add(self, dataset: Any) -> None:
        """Add the files with data of a dataset; raise DataError if one of them is missing."""
        properties = dataset.id.get_create_plist()
        path = os.path.realpath(_file_name(dataset))
        self._paths.add(path)
        if properties.get_external_count():
            self._paths.update(map(os.path.realpath, _external_paths(dataset)))
        if properties.get_layout() != hdf5.h5py().h5d.VIRTUAL:
            return
        # The key has the address, because a dataset may have several names.
        key = path, int(hdf5.h5py().h5o.get_info(dataset.id).addr)
        where = f"{dataset.name!r} of {dataset.file.filename}"
        if key in [active for active, _ in self._active]:
            raise self._error(
                f"takes its elements from {where}, so it refers to itself. Rewrite it"
            )
        if key in self._done:
            return
        self._active.append((key, where))
        for file_name, name, is_series in _sources(dataset):
            if is_series:
                self._add_series(dataset, file_name, name)
            else:
                self._add_source(dataset, _unescaped(file_name), _unescaped(name))
        self._active.pop()
        self._done.add(key)

    def _add_series(self, dataset: Any, file_name: str, name: str) -> None:
        """Add the sources of a series (``%b``), which ends before the first missing source."""
        for number in range(dataset.size):
            names = [_unescaped(each.replace("%b", str(number))) for each in (file_name, name)]
            if not self._is_there(dataset, *names):
                return
            self._add_source(dataset, *names)

    def _is_there(self, dataset: Any, file_name: str, name: str) -> bool:
        if file_name == ".":
            return name in dataset.file
        found, _ = self._find(dataset, file_name)
        return found is not None and name in found

    def _add_source(self, dataset: Any, file_name: str, name: str) -> None:
        if file_name == ".":
            file, where = dataset.file, "the same file"
        else:
            file, reason = self._find(dataset, file_name)
            if file is None and reason is None:
                raise self._error(
                    f"needs the file {file_name}, which is missing: HDF5 would return its fill "
                    f"value instead. Put the file next to {dataset.file.filename}"
                )
            if file is None:
                raise self._error(f"needs the file {file_name}, which cannot be read: {reason}")
            where = file.filename
            self._paths.add(os.path.realpath(where))
        self.add_links(file, name)
        try:
            source = file[name]
        except _HDF5_ERRORS:
            source = None
        if not isinstance(source, hdf5.h5py().Dataset):
            raise self._error(
                f"needs {name!r} of {where}, but that dataset is missing or a broken link, and "
                "HDF5 would return its fill value instead"
            )
        self.add(source)

    def _error(self, what: str) -> DataError:
        """Return the error for the virtual dataset that is being followed, with the chain to it."""
        names = [name for _, name in self._active]
        (first, _), _ = self._active[0]
        if first != self._own:
            names.insert(0, f"a link of {self._own}")
        chain = [f"{a} takes elements from {b}" for a, b in itertools.pairwise(names)]
        needed = f" It is needed: {', '.join(chain)}." if chain else ""
        return DataError(f"The virtual dataset {names[-1]} {what}.{needed}")

    def _find(self, dataset: Any, file_name: str) -> tuple[Any, str | None]:
        """Return the open file of a source, or ``None`` and the reason if it cannot be read."""
        prefix = os.fsdecode(dataset.id.get_access_plist().get_virtual_prefix())
        return self._open_first(dataset.file, file_name, prefix, "HDF5_VDS_PREFIX")

    def _open_first(
        self, file: Any, name: str, prefix: str, variable: str
    ) -> tuple[Any, str | None]:
        reason: str | None = None
        for path in _places(file.filename, name, prefix, variable):
            if not os.path.exists(path):
                continue
            try:
                return self._opened(path, file.swmr_mode), None
            except OSError as error:
                reason = reason or hdf5.error_text(error)
        return None, reason

    def _opened(self, path: str, swmr: bool) -> Any:
        key = path, swmr
        if key not in self._open:
            if len(self._open) >= min(_MAX_OPEN, hdf5.max_open_files() // 2):
                self._close_oldest()
            h5py = hdf5.h5py()
            self._open[key] = h5py.File(path, "r", swmr=True) if swmr else h5py.File(path, "r")
        self._open.move_to_end(key)
        return self._open[key]

    def _close_oldest(self) -> None:
        """Close the least recently used file that is not in the chain being followed."""
        # The callers still use datasets of the files in the chain.
        in_use = {path for (path, _), _ in self._active}
        for key in self._open:
            if os.path.realpath(key[0]) not in in_use:
                self._open.pop(key).close()
                return

    def _linked(self, file: Any, path: str) -> Iterator[Any]:
        """Yield the files that the external links in `path` lead to."""
        h5l, names = hdf5.h5py().h5l, [os.fsencode(part) for part in parts_of(path)]
        group, num_links = file.id, 0
        try:
            while names and num_links <= _MAX_LINKS:
                name = names.pop(0)
                kind = group.links.get_info(name).type
                if kind == h5l.TYPE_HARD:
                    group = hdf5.h5py().h5o.open(group, name) if names else group
                    continue
                num_links += 1
                target = group.links.get_val(name)
                if kind == h5l.TYPE_EXTERNAL:
                    other, target = target
                    found, _ = self._open_first(file, os.fsdecode(other), "", "HDF5_EXT_PREFIX")
                    if found is None:
                        return
                    file, group = found, found.id
                    yield file
                elif target.startswith(b"/"):
                    group = file.id
                names[:0] = [part for part in target.split(b"/") if part not in (b"", b".")]
        except (AttributeError, *_HDF5_ERRORS):  # opening the object raises the error
            return


def _file_name(node: Any) -> str:
    """Return the path of the file of an object, without a new ``h5py.File``."""
    return os.fsdecode(hdf5.h5py().h5f.get_name(node.id))


def _sources(dataset: Any) -> dict[tuple[str, str, bool], None]:
    """Return file and name of each source of a virtual dataset, and whether it is a series."""
    properties = dataset.id.get_create_plist()
    found: dict[tuple[str, str, bool], None] = {}
    for number in range(properties.get_virtual_count()):
        file_name = properties.get_virtual_filename(number)
        name = properties.get_virtual_dsetname(number)
        # "%%" is a percent sign, even before a "b".
        is_series = "%b" in (file_name + "\0" + name).replace("%%", "")
        try:
            is_empty = properties.get_virtual_vspace(number).get_select_npoints() == 0
        except (RuntimeError, ValueError):  # an unlimited selection
            is_empty = False
        if not is_empty:  # a source without elements may be missing
            found[file_name, name, is_series] = None
    return found


def _unescaped(name: str) -> str:
    return name.replace("%%", "%")


def _places(own: str, name: str, prefix: str, variable: str) -> Iterator[str]:
    """Yield the paths where HDF5 looks for the file `name` that `own` needs, in its order."""
    # HDF5 reference, H5Pset_virtual_prefix and H5Lcreate_external.
    if os.path.isabs(name):
        yield name
        name = os.path.basename(name)
    for each in environment().get(variable, "").split(":"):
        if each:
            yield os.path.join(each, name)
    folder = os.path.dirname(os.path.abspath(own))
    if prefix:
        yield os.path.join(prefix.replace("${ORIGIN}", folder), name)
    yield os.path.join(folder, name)
    yield name
    yield os.path.join(os.path.dirname(os.path.realpath(own)), name)


def check_virtual_sources(dataset: Any) -> None:
    """Check that all direct and indirect sources of a virtual dataset exist."""
    with LinkedFiles(dataset.file.filename) as files:
        files.add(dataset)


def other_files(file: Any, path: str, own: str, dataset: Any = None) -> list[str]:
    """Return the files other than `own` that hold data of an object, or links in the path to it.

    `path` is the path of the object in the open `file`. The sources of a `dataset` are followed to
    the end.
    """
    if dataset is not None and _is_plain(file, path, dataset):
        return []
    with LinkedFiles(own) as files:
        files.add_links(file, path)
        if dataset is not None:
            files.add(dataset)
        return files.paths


def _is_plain(file: Any, path: str, dataset: Any) -> bool:
    """Return whether all bytes of a dataset are in the open `file`, and its path has no links."""
    h5py = hdf5.h5py()
    properties, names = dataset.id.get_create_plist(), parts_of(path)
    if properties.get_external_count() or properties.get_layout() == h5py.h5d.VIRTUAL:
        return False
    links = file.id.links
    beginnings = ["/".join(names[:count]) for count in range(1, len(names) + 1)]
    return all(links.get_info(os.fsencode(n)).type == h5py.h5l.TYPE_HARD for n in beginnings)


def warn_of_files_elsewhere(name: str, own: str, paths: list[str]) -> None:
    """Warn of the files `paths`, with data of `name`, that are outside of the folder of `own`."""
    if not paths:
        return
    # The author of the file has chosen these files. They may be any that the user can read.
    folders = {os.path.realpath(os.path.dirname(own)), os.path.dirname(os.path.realpath(own))}
    elsewhere = [path for path in paths if all(os.path.commonpath([path, f]) != f for f in folders)]
    if elsewhere:
        shown = ", ".join(elsewhere[:_MAX_SHOWN])
        shown += f" and {len(elsewhere) - _MAX_SHOWN} more" if len(elsewhere) > _MAX_SHOWN else ""
        warnings.warn(
            f"The dataset {name!r} of {own} takes its elements from outside of that "
            f"file's folder: {shown}. Read it only if you trust who made the file.",
            stacklevel=users_stacklevel(),
        )


def _external_paths(dataset: Any) -> Iterator[str]:
    """Yield the files of external storage (HDF5 reference, H5Pset_efile_prefix)."""
    prefix = environment().get("HDF5_EXTFILE_PREFIX")
    prefix = prefix or os.fsdecode(dataset.id.get_access_plist().get_efile_prefix())
    folder = os.path.dirname(os.path.abspath(dataset.file.filename))
    for name, _, _ in dataset.external or ():
        yield os.path.join(prefix.replace("${ORIGIN}", folder), name)
