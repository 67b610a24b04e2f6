"""Linked files: what other files hold data of a data set."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from typing import Any

from mpistrat import hdf5
from mpistrat.errors import DataError
from mpistrat.system.callsite import users_stacklevel

__all__ = ["check_virtual_sources", "other_files", "warn_of_files_elsewhere"]

_MAX_SHOWN = 8
"""Names that a warning shows."""


def check_virtual_sources(dataset: Any) -> list[str]:
    """Make sure that the sources of a virtual data set exist, and return their paths."""
    # A series (``%b`` in its name) may end anywhere, so its sources need not exist.
    if not dataset.is_virtual:
        return []
    paths = {}
    for source in dataset.virtual_sources():
        key = source.file_name, source.dset_name
        if key not in paths:
            is_series = "%" in "".join(key)
            paths[key] = (
                _series_path(dataset, key[0]) if is_series else _check_source(dataset, *key)
            )
    return list(paths.values())


def _series_path(dataset: Any, file_name: str) -> str:
    folder = os.path.dirname(dataset.file.filename)
    return str(dataset.file.filename if file_name == "." else os.path.join(folder, file_name))


def _check_source(dataset: Any, file_name: str, name: str) -> str:
    """Return the path of a source, or raise DataError where there is none."""
    where = f"The virtual data set {dataset.name!r} of {dataset.file.filename}"
    if file_name == ".":
        if name not in dataset.file:
            raise DataError(f"{where} needs {name!r} of the same file, which is missing.")
        return str(dataset.file.filename)
    path = next(filter(os.path.exists, _source_paths(dataset, file_name)), None)
    if path is None:
        raise DataError(
            f"{where} needs the file {file_name}, which is missing: HDF5 would give its fill "
            "value instead. Put the file beside this one."
        )
    try:
        with hdf5.h5py().File(path, "r") as file:
            is_there = name in file
    except OSError as reason:
        raise DataError(f"{where} needs the file {path}, which cannot be read: {reason}.") from None
    if not is_there:
        raise DataError(f"{where} needs {name!r} of {path}, which has no such data set.")
    return path


def _source_paths(dataset: Any, file_name: str) -> Iterator[str]:
    """Yield where HDF5 looks for a source (HDF5 reference, H5Pset_virtual_prefix)."""
    yield file_name
    prefix = dataset.id.get_access_plist().get_virtual_prefix()
    folder = os.path.dirname(dataset.file.filename)
    real_folder = os.path.dirname(os.path.realpath(dataset.file.filename))
    for each in (os.fsdecode(prefix), folder, real_folder):
        for name in (file_name, os.path.basename(file_name)):
            yield os.path.join(each, name)


def other_files(dataset: Any, own: str) -> list[str]:
    """Return the files other than `own`, where `dataset` was found, that hold data of it."""
    # The file of `dataset` is another one where an external link leads there.
    given = (dataset.file.filename, *_external_paths(dataset), *check_virtual_sources(dataset))
    return sorted({os.path.realpath(path) for path in given} - {os.path.realpath(own)})


def warn_of_files_elsewhere(name: str, own: str, paths: list[str]) -> None:
    """Warn of those of `paths`, which hold data of `name`, outside of the folder of `own`."""
    # Whoever made the file has chosen them: they may be any that the user of the program can read.
    folders = {os.path.realpath(os.path.dirname(own)), os.path.dirname(os.path.realpath(own))}
    elsewhere = [path for path in paths if all(os.path.commonpath([path, f]) != f for f in folders)]
    if elsewhere:
        shown = ", ".join(elsewhere[:_MAX_SHOWN])
        shown += f" and {len(elsewhere) - _MAX_SHOWN} more" if len(elsewhere) > _MAX_SHOWN else ""
        warnings.warn(
            f"The data set {name!r} of {own} takes its elements from outside of that "
            f"file's folder: {shown}. Read it only if you trust who made the file.",
            stacklevel=users_stacklevel(),
        )


def _external_paths(dataset: Any) -> Iterator[str]:
    """Yield the files of external storage (HDF5 reference, H5Pset_efile_prefix)."""
    prefix = os.fsdecode(dataset.id.get_access_plist().get_efile_prefix())
    folder = os.path.dirname(os.path.abspath(dataset.file.filename))
    for name, _, _ in dataset.external or ():
        yield os.path.join(prefix.replace("${ORIGIN}", folder), name)
