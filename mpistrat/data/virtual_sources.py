"""The files behind virtual data sets: HDF5 fills in what it does not find, and says nothing."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from mpistrat import hdf5
from mpistrat.errors import DataError

__all__ = ["check_virtual_sources"]


def check_virtual_sources(dataset: Any) -> None:
    """Make sure that what a virtual data set is composed of exists. Local.

    Nothing happens where `dataset` is no virtual one. Sources whose names count up (``%b``) are
    not looked at.

    Raises
    ------
    DataError
        If a file or a data set is missing.
    """
    if not dataset.is_virtual:
        return
    checked = set()
    for source in dataset.virtual_sources():
        key = source.file_name, source.dset_name
        if "%" not in "".join(key) and key not in checked:
            checked.add(key)
            _check_source(dataset, *key)


def _check_source(dataset: Any, file_name: str, name: str) -> None:
    where = f"The virtual data set {dataset.name!r} of {dataset.file.filename}"
    if file_name == ".":
        if name not in dataset.file:
            raise DataError(f"{where} needs {name!r} of the same file, which is missing.")
        return
    path = next(filter(os.path.exists, _places(dataset, file_name)), None)
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


def _places(dataset: Any, file_name: str) -> Iterator[str]:
    """Yield where HDF5 looks for a source (HDF5 reference, H5Pset_virtual_prefix)."""
    yield file_name
    prefix = dataset.id.get_access_plist().get_virtual_prefix()
    folder = os.path.dirname(dataset.file.filename)
    real_folder = os.path.dirname(os.path.realpath(dataset.file.filename))
    for each in (os.fsdecode(prefix), folder, real_folder):
        for name in (file_name, os.path.basename(file_name)):
            yield os.path.join(each, name)
