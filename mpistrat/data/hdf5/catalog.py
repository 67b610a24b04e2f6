"""Catalog of HDF5 files: lengths, shapes, dtypes and chunks of their fields."""

from __future__ import annotations

import contextlib
import dataclasses
import glob
import itertools
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import hdf5, nests
from mpistrat.data.hdf5.alike import Template, layouts_from_json, layouts_to_json
from mpistrat.data.hdf5.fields import Field, as_field, shown
from mpistrat.data.hdf5.layouts import (
    Column,
    ColumnLayout,
    Output,
    Single,
    compose,
    layout_of,
    row_columns,
)
from mpistrat.data.hdf5.listing import Listing
from mpistrat.data.hdf5.locate import (
    Kind,
    Located,
    get_object,
    locate,
    num_rows_of,
    readable_names,
)
from mpistrat.data.hdf5.types import Form
from mpistrat.errors import DataError
from mpistrat.system.callsite import users_stacklevel

Known = Mapping[str, Any]
"""The catalog of a different rank as JSON values, as returned by `Catalog.known`."""


@dataclass(frozen=True)
class Catalog:
    """The contents of several files as one sequence of examples."""

    columns: tuple[Column, ...]
    singles: tuple[Single, ...]
    outputs: tuple[Output, ...]
    structure: nests.Structure
    """The structure of the nest of all outputs."""
    files: tuple[FileEntry, ...]
    is_live: bool = False
    """Whether a program is writing the files, with SWMR."""

    @cached_property
    def offsets(self) -> np.ndarray:
        """Number of the first example of each file; the last entry is the number of examples."""
        return np.cumsum([0, *(file.num_rows for file in self.files)])

    @cached_property
    def row_sizes(self) -> list[int]:
        """Size of one row of each column in bytes."""
        return [layout.row_bytes for layout in self.files[0].layouts]

    @cached_property
    def widest(self) -> int:
        """Number of the column with the largest rows, which take longest to read and decode."""
        return int(np.argmax(self.row_sizes))

    @property
    def example_bytes(self) -> int:
        """Size of one example in bytes, as far as it is known."""
        return sum(self.row_sizes) + sum(single.bytes_per_example for single in self.singles)

    def rows_per_chunk(self, file: FileEntry) -> int:
        """Return how many examples of a file are read together; the order depends on it."""
        # The result must not depend on whether matches are read by their places or by HDF5.
        sizes = [
            (size, not c.is_matches) for size, c in zip(self.row_sizes, self.columns, strict=True)
        ]
        widest_rows = max((size for size, are_rows in sizes if are_rows), default=-1)
        matches = [size for size, are_rows in sizes if not are_rows]
        matches += [s.bytes_per_example for s in self.singles if s.kind is Kind.MATCHES]
        if max(matches, default=-1) >= widest_rows or widest_rows < 0:
            return _ROWS_OF_TEXT if not matches else 1
        return file.layouts[sizes.index((widest_rows, True))].rows_per_chunk

    def row_lengths(self) -> np.ndarray | None:
        """Return the common length of the arrays of each example; ``None`` if it is not stored."""
        found: list[np.ndarray] = []
        for output in self.outputs:
            length = output.spec.shape[0] if output.spec.shape else None
            if length is not None:
                found.append(np.full(self.offsets[-1], length))
                continue
            single = None if output.single is None else self.singles[output.single]
            if single is None or single.kind is not Kind.MATCHES or output.leaf.form is Form.RAGGED:
                return None
            text = shown(single.field)
            found.append(np.concatenate([f.listings[text].shapes[:, 0] for f in self.files]))
        for output, other in zip(self.outputs, found, strict=True):
            wrong = np.flatnonzero(other != found[0])
            if len(wrong):
                number = int(wrong[0])
                raise DataError(
                    f"The arrays of example {number} have the lengths {int(found[0][number])} and "
                    f"{int(other[number])} (for {output.spec}), but unbatch needs one. "
                    "Name fields that belong together with fields=(...)."
                )
        return found[0]

    @property
    def known(self) -> Known:
        """The results that other ranks can use instead of opening the files, as JSON values."""
        return {"listings": self._listings, "files": self._files}

    @property
    def _files(self) -> list[Any]:
        """Stamps, length and layouts of each file; empty if files may differ in more than that."""
        have_rows = all(single.kind is Kind.ROWS for single in self.singles)
        if self.is_live or not have_rows or any(each.is_matches for each in self.columns):
            return []
        first, found = self.files[0], []
        for file in self.files:
            others = [[path, *stamp] for path, stamp in file.stamps.items() if path != file.path]
            layouts = layouts_to_json(file.layouts, first.layouts)
            found.append([list(file.stamp), file.num_rows, others, layouts])
        return found

    @property
    def _listings(self) -> dict[str, list[Any]]:
        """The listings of all files, by the name of their field."""
        found: dict[str, list[Any]] = {}
        for file in self.files:
            for text, listing in file.listings.items():
                found.setdefault(text, []).append([list(file.stamp), listing.to_json()])
        return found

    def read_error(
        self, reason: Exception, file: int, field: int, start: int, stop: int
    ) -> DataError:
        """Return the error that says which rows could not be read."""
        column, entry = self.columns[field], self.files[file]
        which = f"Rows {start} to {stop - 1}"
        if column.is_matches:
            listing = next(e for text, e in entry.listings.items() if text == column.name)
            which = f"{listing.path(start)!r} to {listing.path(stop - 1)!r}"
        return DataError(
            f"{which} of the field {column.name} of {entry.path} cannot be read: {reason}. The "
            "file is damaged, or it changed after the dataset was created."
        )


_ROWS_OF_TEXT = 64
"""Number of rows of any length that are shuffled together: they are stored near each other."""


@dataclass(frozen=True)
class FileEntry:
    """The contents of one file."""

    path: str
    num_rows: int
    layouts: tuple[ColumnLayout, ...]
    """The layouts of the columns."""
    listings: dict[str, Listing]
    """The listings of fields with ``*``, by the name of the field."""
    stamps: dict[str, tuple[int, ...]]
    """The `_stamp_of` each file with data of the fields, taken before the file was read."""
    is_live: bool = False

    @property
    def stamp(self) -> tuple[int, ...]:
        """The stamp of the file itself."""
        return self.stamps[self.path]

    def changed_path(self) -> str | None:
        """Return the path of a file that has been written to or replaced since, if there is one."""
        changed = (
            path for path, stamp in self.stamps.items() if _stamp_of(path, self.is_live) != stamp
        )
        return next(changed, None)


def _resolve_paths(patterns: Sequence[str]) -> list[str]:
    """Return the files of paths and glob patterns; the files of a pattern are sorted by name."""
    paths: list[str] = []
    for pattern in patterns:
        # The name of a file may itself contain characters of a pattern.
        if not glob.has_magic(pattern) or os.path.exists(pattern):
            paths.append(pattern)
            continue
        # glob returns names in arbitrary order, but the order of files numbers the examples, and
        # must be the same on all ranks.
        found = sorted(glob.glob(pattern, recursive=True))
        if not found:
            raise DataError(f"No file matches {pattern!r}. It is relative to {os.getcwd()}.")
        paths += found
    return paths


def _stamp_of(path: str, is_live: bool) -> tuple[int, ...]:
    """Return a stamp that changes if a file is written or replaced; for live files, if replaced."""
    status = os.stat(path)
    # The size and time of a file change with each write. A new inode means that it was replaced.
    if is_live:
        return (status.st_ino,)
    return (status.st_size, status.st_mtime_ns, status.st_ino)


def read_catalog(
    patterns: Sequence[str], fields: Any, known: Known | None = None, is_live: bool = False
) -> Catalog:
    """Return the catalog of the files of paths and glob patterns; each file is opened once."""
    paths = _resolve_paths(patterns)
    given, structure = nests.flatten(fields)
    names = list(map(as_field, given)) if fields is not None else []
    located: list[list[Located]] = []
    columns: list[Column] = []
    files: list[FileEntry] = []
    known_files = (known or {}).get("files", ())
    known_files = known_files if len(known_files) == len(paths) else [None] * len(paths)
    template: Template | None = None
    for number, path in enumerate(paths):
        entry = _known_entry(path, known_files[number], files[0]) if files else None
        if entry is not None:
            located.append(located[0])
            files.append(entry)
            continue
        with hdf5.opened_for_reading(path, is_live) as file, _naming(path):
            # The stamp is taken before anything is read, so that later changes are noticed.
            stamp = _stamp_of(path, is_live)
            alike = template.entry(file, path) if template is not None else None
            if alike is not None:
                located.append(located[0])
                files.append(FileEntry(path, *alike, {}, {path: stamp}))
                continue
            if not files and fields is None:
                names, structure = _top_level_fields(file, path)
            opened: dict[str, Any] = {}
            found = [
                locate(
                    *(file, path, each, fields is None),
                    *(_known(known, number, each, file, stamp), opened),
                )
                for each in names
            ]
            located.append(found)
            if not files:
                columns = row_columns(found)
            _check_same(located[0], found, paths[0], path)
            layouts = tuple(
                layout_of(opened.get(c.path) or file[c.path], path, c.axis, c.dtype, is_live)
                for c in columns
            )
            opened.clear()
            if not files and len(paths) > 1 and not is_live:
                template = Template.of(file, found, columns, layouts)
        listings = {shown(e.field): e.listing for e in found if e.listing is not None}
        others = sorted({other for each in found for other in each.others})
        stamps = {path: stamp} | {other: _stamp_of(other, is_live) for other in others}
        num_rows = num_rows_of(path, found, is_live)
        files.append(FileEntry(path, num_rows, layouts, listings, stamps, is_live))
    if not sum(entry.num_rows for entry in files):
        raise DataError(
            f"There are no examples in {', '.join(paths)}: {names[0].path!r} has length 0."
        )
    parts = compose(located, columns, structure, not is_live)
    files = [
        dataclasses.replace(file, layouts=(*file.layouts, *(of[n] for of in parts.layouts)))
        for n, file in enumerate(files)
    ]
    return Catalog(
        parts.columns, parts.singles, parts.outputs, parts.structure, tuple(files), is_live
    )


@contextlib.contextmanager
def _naming(path: str) -> Iterator[None]:
    """Turn errors of HDF5 within the ``with`` block into a DataError that names the file."""
    try:
        yield
    except DataError:
        raise
    except (OSError, RuntimeError, KeyError, ValueError) as reason:
        raise DataError(
            f"{path} is damaged: {hdf5.error_text(reason)}. Copy or write it again."
        ) from reason


def _top_level_fields(file: Any, path: str) -> tuple[list[Field], nests.Structure]:
    """Return the datasets at the top level that can be read, as fields of a dict."""
    names: list[str] = []
    left_out: list[str] = []
    reason = ""
    for name in file:
        found = get_object(file, name)
        if found is None:
            left_out.append(name)
        if not hasattr(found, "shape"):
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the warnings are repeated when the field is read
            try:
                left_out += locate(file, path, Field(name), is_literal=True).left_out
            except DataError as error:
                if not error._is_of_field:
                    raise
                left_out.append(name)
                reason = reason or f" {error}"
                continue
        names.append(name)
    if not names:
        deeper = ", ".join(map(repr, itertools.islice(readable_names(file), 8)))
        raise DataError(
            f"{path} has no dataset at its top level that can be read as examples. Say which "
            f"fields to read with fields=(...), for example of {deeper or 'another file'}.{reason}"
        )
    if left_out:
        warnings.warn(
            f"from_hdf5 skipped {', '.join(map(repr, left_out))} of {path}, which cannot be read "
            "as examples (scalars, references, opaque and nested types, and broken links). Name "
            "the fields to read with fields=(...).",
            stacklevel=users_stacklevel(),
        )
    given, structure = nests.flatten({name: name for name in names})
    return list(map(Field, given)), structure


def _known_entry(path: str, values: Any, first: FileEntry) -> FileEntry | None:
    """Return the entry of a file from a rank that has opened it, if it is the same file here."""
    if values is None or values[3] is None:
        return None
    stamp, num_rows, others, layouts = values
    stamps = {path: tuple(stamp)} | {other: tuple(of_other) for other, *of_other in others}
    try:
        if any(_stamp_of(each, False) != stamp for each, stamp in stamps.items()):
            return None  # for example, this rank has its own copy
    except OSError:
        return None  # opening the file raises the error
    found = layouts_from_json(layouts, first.layouts)
    return None if found is None else FileEntry(path, num_rows, found, {}, stamps)


def _known(
    known: Known | None, number: int, field: Field, file: Any, stamp: tuple[int, ...]
) -> Listing | None:
    """Return the listing of a rank that has listed its copy of a file, if there is one."""
    of_files = (known or {}).get("listings", {}).get(shown(field))
    if of_files is None or number >= len(of_files):
        return None
    own, values = of_files[number]
    listing = Listing.from_json(values)
    if tuple(own) == stamp or listing.is_of(file):
        return listing
    # If the datasets of a copy have different offsets, they are read by name.
    return dataclasses.replace(listing, offsets=np.full(len(listing.names), -1))


def _check_same(
    first: Sequence[Located], other: Sequence[Located], first_path: str, path: str
) -> None:
    for expected, came in zip(first, other, strict=True):
        must_be_equal = expected.kind is Kind.ROWS
        if must_be_equal and expected.spec == came.spec:
            continue
        if not must_be_equal and _kinds(expected) == _kinds(came):
            continue
        raise DataError(
            f"The field {shown(expected.field)} has examples of {came.spec} in {path}, but of "
            f"{expected.spec} in {first_path}. They must be the same in all files."
        )


def _kinds(located: Located) -> Any:
    """Return the properties that must be equal if shapes, and widths of strings, may differ."""
    leaves, structure = nests.flatten(located.leaves)
    kinds = [
        (leaf.members, "S" if leaf.dtype.kind == "S" else leaf.dtype, leaf.shape, leaf.form)
        for leaf in leaves
    ]
    return structure, kinds, len(located.shape)
