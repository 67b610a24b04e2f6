"""Catalog of HDF5 files: lengths, shapes, dtypes and chunks of their fields."""

from __future__ import annotations

import contextlib
import glob
import itertools
import math
import os
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import hdf5, nests
from mpistrat.data.hdf5.filters import install_filter, missing_filters
from mpistrat.data.hdf5.storage import CompressedChunks, Storage, find_chunks, find_contiguous
from mpistrat.data.spec import ArraySpec
from mpistrat.errors import DataError

__all__ = [
    "Catalog",
    "FileEntry",
    "check_virtual_sources",
    "read_catalog",
]

_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 2**15, 2**18
"""Rows of data without chunks are read so much at a time: long reads are fast, and short ones mix
small files well."""

_BLOCKS_PER_FILE = 512

_MAX_SHOWN = 8
"""Names that an error shows of a file."""


@dataclass(frozen=True)
class Catalog:
    """Several files as one sequence of examples."""

    names: tuple[str, ...]
    """The paths of the fields inside the files."""
    structure: nests.Structure
    """The nest that the fields form."""
    files: tuple[FileEntry, ...]

    @cached_property
    def offsets(self) -> np.ndarray:
        """Number of the first example of each file, and at the end the number of examples."""
        return np.cumsum([0, *(file.num_rows for file in self.files)])

    @cached_property
    def row_sizes(self) -> list[int]:
        """Size of one example of each field in bytes."""
        return [_bytes_per_row(layout.spec) for layout in self.files[0].layouts]

    @cached_property
    def widest(self) -> int:
        """Number of the field with the largest rows, which cost most to read and decode."""
        return int(np.argmax(self.row_sizes))


@dataclass(frozen=True)
class FileEntry:
    """One file."""

    path: str
    num_rows: int
    layouts: tuple[_FieldLayout, ...]
    """The layouts of the fields, in the order of `Catalog.names`."""
    stamps: dict[str, tuple[int, ...]]
    """What `_stamp_of` gave of each file with data of the fields, before they were looked at."""

    def changed_path(self) -> str | None:
        """Return the path of a file that has been written to or replaced since, if there is one."""
        changed = (path for path, stamp in self.stamps.items() if _stamp_of(path) != stamp)
        return next(changed, None)


@dataclass(frozen=True)
class _FieldLayout:
    """One field in one file."""

    spec: ArraySpec
    """Shape and dtype of one example, in native byte order."""
    rows_per_chunk: int
    """How many rows are read together."""
    is_chunked: bool
    """Whether HDF5 must decode a whole chunk to give one row of it."""
    storage: Storage | None
    """Where the rows lie, if nothing has to be decoded."""
    compressed: CompressedChunks | None
    """Where the chunks lie, if compiled code can decode them."""


def _resolve_paths(patterns: Sequence[str]) -> list[str]:
    """Return the files of paths and glob patterns; those of a pattern sorted by name."""
    paths: list[str] = []
    for pattern in patterns:
        # The name of a file may itself contain characters of a pattern.
        if not glob.has_magic(pattern) or os.path.exists(pattern):
            paths.append(pattern)
            continue
        found = sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise DataError(f"No file matches {pattern!r}. It is relative to {os.getcwd()}.")
        paths += found
    return paths


def _stamp_of(path: str) -> tuple[int, ...]:
    """Return what changes when a file is written to or replaced."""
    status = os.stat(path)
    return (status.st_size, status.st_mtime_ns, status.st_ino)


def read_catalog(patterns: Sequence[str], fields: Any) -> Catalog:
    """Return what the files of paths and glob patterns contain; each is opened once."""
    paths = _resolve_paths(patterns)
    names, structure = nests.flatten(fields)
    files: list[FileEntry] = []
    for path in paths:
        with contextlib.closing(hdf5.open_for_reading(path, DataError)) as file:
            # Before anything is read, so that a change from here on is noticed.
            stamp = _stamp_of(path)
            if fields is None and not files:
                names, structure = nests.flatten(_top_level_names(file, path))
            files.append(_read_entry(file, path, names, stamp))
        _check_same_specs(names, files[0], files[-1])
    if not sum(entry.num_rows for entry in files):
        raise DataError(f"There are no examples in {', '.join(paths)}: {names[0]!r} has length 0.")
    return Catalog(tuple(names), structure, tuple(files))


def _top_level_names(file: Any, path: str) -> dict[str, str]:
    names = {name: name for name in file if hasattr(file.get(name), "shape")}
    if not names:
        raise DataError(
            f"{path} has no data set at its top level. Say which fields to read, for example "
            'fields=("group/image", "group/label").'
        )
    return names


def _read_entry(file: Any, path: str, names: Sequence[str], stamp: tuple[int, ...]) -> FileEntry:
    pairs = [_find(file, path, name) for name in names]
    datasets = [dataset for dataset, _ in pairs]
    lengths = {name: len(dataset) for name, dataset in zip(names, datasets, strict=True)}
    if len(set(lengths.values())) > 1:
        found = ", ".join(f"{name!r} has {length}" for name, length in lengths.items())
        raise DataError(
            f"The fields of {path} must have one length, but {found} rows. Name fields that "
            "belong together with fields=(...)."
        )
    layouts = tuple(map(_read_layout, datasets, itertools.repeat(path), names))
    others = sorted({other for _, paths in pairs for other in paths})
    stamps = {path: stamp} | {other: _stamp_of(other) for other in others}
    return FileEntry(path, lengths[names[0]], layouts, stamps)


def _find(file: Any, path: str, name: str) -> tuple[Any, list[str]]:
    """Return a data set, and the other files that hold data of it."""
    dataset = file.get(name)
    if not hasattr(dataset, "shape"):
        known = ", ".join(map(repr, itertools.islice(file, _MAX_SHOWN))) or "nothing"
        known += f" and {len(file) - _MAX_SHOWN} more" if len(file) > _MAX_SHOWN else ""
        what = _what_is_there(file, name, dataset)
        raise DataError(f"The field {name!r} {what} in {path}, which has {known} at its top level.")
    others = _other_files(dataset, path)
    _warn_of_files_elsewhere(dataset, path, others)
    if not dataset.shape:
        raise DataError(
            f"The field {name!r} of {path} is a scalar or empty, but a first dimension, the "
            "examples, was expected. Name the fields to read with fields=(...)."
        )
    # External storage may be missing, and a source that is a series is no file.
    return dataset, list(filter(os.path.isfile, others))


def _what_is_there(file: Any, name: str, found: Any) -> str:
    if found is None:
        leads_nowhere = file.get(name, getlink=True) is not None
        return "is a link that leads nowhere" if leads_nowhere else "is missing"
    is_group = hasattr(found, "keys")
    return "is a group, not a data set" if is_group else "is a named type, not a data set"


def _read_layout(dataset: Any, path: str, name: str) -> _FieldLayout:
    if dataset.dtype.kind not in "biufcS":
        kind = "variable-length or references" if dataset.dtype.hasobject else "compound or opaque"
        raise DataError(
            f"The field {name!r} of {path} has the dtype {dataset.dtype} ({kind}), which batches "
            "cannot hold. Name the fields to read with fields=(...), and store numbers, bools or "
            "strings of a fixed length."
        )
    for each in missing_filters(dataset):
        raise DataError(
            f"The field {name!r} of {path} was compressed by {each}, a filter that the HDF5 of "
            f"this rank does not have. {install_filter(each)}"
        )
    spec = ArraySpec(dataset.shape[1:], dataset.dtype.newbyteorder("="))
    if dataset.chunks:
        storage, compressed = find_chunks(dataset, path)
        return _FieldLayout(spec, dataset.chunks[0], True, storage, compressed)
    row_bytes = max(_bytes_per_row(spec), 1)
    share = len(dataset) * row_bytes // _BLOCKS_PER_FILE
    block_bytes = min(max(share, _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES)
    storage = find_contiguous(dataset, path)
    return _FieldLayout(spec, max(block_bytes // row_bytes, 1), False, storage, None)


def _bytes_per_row(spec: ArraySpec) -> int:
    """Return the size of one example of a field."""
    return spec.dtype.itemsize * math.prod(spec._known_shape)


def _check_same_specs(names: Sequence[str], first: FileEntry, other: FileEntry) -> None:
    for name, expected, came in zip(names, first.layouts, other.layouts, strict=True):
        if expected.spec != came.spec:
            raise DataError(
                f"The field {name!r} has examples of {came.spec} in {other.path}, but of "
                f"{expected.spec} in {first.path}. All files must have the same."
            )


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


def _other_files(dataset: Any, own: str) -> list[str]:
    """Return the files other than `own`, where `dataset` was found, that hold data of it."""
    # The file of `dataset` is another one where an external link leads there.
    given = (dataset.file.filename, *_external_paths(dataset), *check_virtual_sources(dataset))
    return sorted({os.path.realpath(path) for path in given} - {os.path.realpath(own)})


def _warn_of_files_elsewhere(dataset: Any, own: str, paths: list[str]) -> None:
    """Warn of those of `paths`, which hold data of `dataset`, outside of the folder of `own`."""
    # Whoever made the file has chosen them: they may be any that the user of the program can read.
    folders = {os.path.realpath(os.path.dirname(own)), os.path.dirname(os.path.realpath(own))}
    elsewhere = [path for path in paths if all(os.path.commonpath([path, f]) != f for f in folders)]
    if elsewhere:
        shown = ", ".join(elsewhere[:_MAX_SHOWN])
        shown += f" and {len(elsewhere) - _MAX_SHOWN} more" if len(elsewhere) > _MAX_SHOWN else ""
        warnings.warn(
            f"The data set {dataset.name!r} of {own} takes its elements from outside of that "
            f"file's folder: {shown}. Read it only if you trust who made the file.",
            stacklevel=2,
        )


def _external_paths(dataset: Any) -> Iterator[str]:
    """Yield the files of external storage (HDF5 reference, H5Pset_efile_prefix)."""
    prefix = os.fsdecode(dataset.id.get_access_plist().get_efile_prefix())
    folder = os.path.dirname(os.path.abspath(dataset.file.filename))
    for name, _, _ in dataset.external or ():
        yield os.path.join(prefix.replace("${ORIGIN}", folder), name)
