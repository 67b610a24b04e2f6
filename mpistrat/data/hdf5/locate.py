"""Locate fields: find what each field is in one file, and how many examples it has there."""

from __future__ import annotations

import enum
import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import hdf5, nests
from mpistrat.data.hdf5.fields import (
    Field,
    has_pattern,
    matches_path,
    parts_of,
    shown,
    what_is_there,
)
from mpistrat.data.hdf5.filters import install_filter, missing_filters
from mpistrat.data.hdf5.linked_files import other_files, warn_of_files_elsewhere
from mpistrat.data.hdf5.listing import Listing, list_matches
from mpistrat.data.hdf5.types import (
    READABLE,
    UnreadableType,
    dtype_of,
    is_readable,
    leaves_of,
)
from mpistrat.errors import DataError
from mpistrat.system.text import counted

_MAX_SHOWN = 8
"""Number of names of a file that an error shows."""

_MAX_VISITED = 1000
"""Number of objects of a file that are visited to find these names."""


class Kind(enum.Enum):
    """The kind of the examples of a field."""

    ROWS = "rows of a dataset"
    MATCHES = "matches of a pattern"
    CONSTANT = "one attribute, the same for every example"


@dataclass(frozen=True)
class Located:
    """A field in one file."""

    field: Field
    kind: Kind
    path: str
    """Path of the object, or of the first match, without members of compound rows."""
    dtype: np.dtype
    """Dtype of the elements of the object, as h5py has it."""
    leaves: Any
    """The nest of `Leaf` of an example."""
    shape: tuple[int | None, ...]
    """Shape of an example, without the dimensions of members."""
    num_rows: int | None
    """Number of examples, ``None`` if the other fields decide it."""
    axis: int = 0
    listing: Listing | None = None
    others: tuple[str, ...] = ()
    """Other files with data of the field."""
    left_out: tuple[str, ...] = ()
    """Members that cannot be read."""

    @property
    def spec(self) -> Any:
        """The nest of specs of an example."""
        return nests.map_nest(lambda leaf: leaf.spec(self.shape), self.leaves)


def locate(
    file: Any,
    path: str,
    field: Field,
    is_literal: bool = False,
    listing: Listing | None = None,
    opened: dict[str, Any] | None = None,
) -> Located:
    """Return a field of an open file.

    If it is literal, its path is the name of a dataset, and members that cannot be read are left
    out. If there is a `listing`, the matches are not listed again. A dataset that this function
    opens is added to `opened`.
    """
    if has_pattern(field) and not is_literal:
        return _locate_matches(file, path, field, listing or list_matches(file, path, field))
    if field.attribute is not None:
        return _locate_constant(file, path, field)
    dataset, members = (file[field.path], ()) if is_literal else _find(file, path, field)
    names = parts_of(field.path)
    place = "/".join(names[: len(names) - len(members)])
    if opened is not None:
        opened[place] = dataset
    others = other_files(file, place, path, dataset)
    warn_of_files_elsewhere(dataset.name, path, others)
    if not dataset.shape:
        raise _unreadable(
            f"The field {shown(field)} of {path} is a scalar or empty, but a dimension that counts "
            "examples was expected. Name other fields; an attribute can be of all examples the "
            "same, and with * in its path a scalar is an example."
        )
    axis = _checked_axis(field, path, dataset)
    left_out: list[tuple[str, ...]] | None = [] if is_literal else None
    dtype = dtype_of(dataset)
    leaves = _leaves(file, path, field, dtype, members, left_out)
    shape = dataset.shape[:axis] + dataset.shape[axis + 1 :]
    is_ragged = any(leaf.form.name == "RAGGED" for leaf in nests.flatten(leaves)[0])
    if is_ragged and shape:
        raise _refusal(file, path, field, f"rows of variable length in {len(shape) + 1} dimensions")
    for each in missing_filters(dataset):
        raise DataError(
            f"The field {shown(field)} of {path} was compressed by {each}, a filter that the HDF5 "
            f"of this rank does not have. {install_filter(each)}"
        )
    # External storage may be missing, and the name of a series of sources is not a file.
    others = list(filter(os.path.isfile, others))
    return Located(
        field,
        Kind.ROWS,
        place,
        dtype,
        leaves,
        shape,
        dataset.shape[axis],
        axis,
        others=tuple(others),
        left_out=tuple("/".join((field.path, *each)) for each in left_out or ()),
    )


def _locate_matches(file: Any, path: str, field: Field, listing: Listing) -> Located:
    first = matches_path(listing.parts, listing.names[0].split("/"))
    found = file[first]
    if field.attribute is not None:
        found = found.attrs.get_id(field.attribute)
    dtype = dtype_of(found)
    if dtype.kind == "S":
        dtype = np.dtype(f"S{listing.width}")
    leaves = _leaves(file, path, field, dtype, listing.members, None)
    shape = _shape_of_all(listing.shapes)
    if any(leaf.form.name == "RAGGED" for leaf in nests.flatten(leaves)[0]) and shape:
        what = f"rows of variable length in {counted(len(shape), 'dimension')}"
        raise _refusal(file, path, field, what)
    warn_of_files_elsewhere(field.path, path, list(listing.files))
    others = tuple(filter(os.path.isfile, listing.files))
    count = len(listing.names)
    return Located(field, Kind.MATCHES, first, dtype, leaves, shape, count, 0, listing, others)


def _shape_of_all(shapes: np.ndarray) -> tuple[int | None, ...]:
    same = (shapes == shapes[:1]).all(axis=0).tolist()
    return tuple(
        length if known else None for length, known in zip(shapes[0].tolist(), same, strict=True)
    )


def _locate_constant(file: Any, path: str, field: Field) -> Located:
    found = get_object(file, field.path) if parts_of(field.path) else file
    if not hasattr(found, "attrs"):
        raise DataError(_missing(file, path, field, found))
    if field.attribute not in found.attrs:
        known = ", ".join(map(repr, itertools.islice(found.attrs, _MAX_SHOWN))) or "none"
        raise DataError(
            f"The field {shown(field)}: {field.path!r} of {path} has no attribute "
            f"{field.attribute!r}. It has {known}."
        )
    attribute = found.attrs.get_id(field.attribute)
    if attribute.shape is None or attribute.get_space().get_simple_extent_dims() is None:
        raise _refusal(file, path, field, "an empty attribute")
    dtype = dtype_of(attribute)
    leaves = _leaves(file, path, field, dtype, (), None)
    shape = attribute.shape
    if any(leaf.form.name == "RAGGED" for leaf in nests.flatten(leaves)[0]) and shape:
        raise _refusal(file, path, field, "nested rows of variable length")
    own_shape = getattr(found, "shape", None)
    # If no other field has a length, the length of the attribute's dataset counts.
    length = own_shape[0] if own_shape else None
    place = "/".join(parts_of(field.path)) or "/"
    others = other_files(file, field.path, path)
    warn_of_files_elsewhere(field.path, path, others)
    return Located(field, Kind.CONSTANT, place, dtype, leaves, shape, length, others=tuple(others))


def get_object(file: Any, path: str) -> Any:
    """Return the object at a path of a file, ``None`` if it is missing or cannot be opened."""
    try:
        return file.get(path)
    except (OSError, RuntimeError, ValueError):  # damaged files, and circular links
        return None


def _find(file: Any, path: str, field: Field) -> tuple[Any, tuple[str, ...]]:
    """Return the dataset of a field, and the names of members at the end of its path."""
    found = get_object(file, field.path)
    if hasattr(found, "shape"):
        return found, ()
    if found is None:
        parts = parts_of(field.path)
        for count in range(len(parts) - 1, 0, -1):
            dataset = get_object(file, "/".join(parts[:count]))
            if dataset is None:
                continue
            members = tuple(parts[count:])
            if hasattr(dataset, "shape") and dtype_of(dataset).names:
                _check_members(dataset, path, field, members)
                return dataset, members
            break
    raise DataError(_missing(file, path, field, found))


def _check_members(dataset: Any, path: str, field: Field, members: tuple[str, ...]) -> None:
    dtype = dtype_of(dataset)
    for name in members:
        if name not in (dtype.names or ()):
            known = ", ".join(map(repr, (dtype.names or ())[:_MAX_SHOWN])) or "none"
            raise DataError(
                f"The field {shown(field)} is missing in {path}: {dataset.name!r} has no member "
                f"{'/'.join(members)!r}. Members there are {known}."
            )
        dtype = dtype[name]


def _missing(file: Any, path: str, field: Field, found: Any) -> str:
    what = _what_is_there(file, field.path, found)
    there = what_is_there(file.id, parts_of(field.path))
    way_out = " Name a dataset in it, or all with *." if hasattr(found, "keys") else ""
    return f"The field {shown(field)} {what} in {path}: {there}.{way_out}"


def _what_is_there(file: Any, name: str, found: Any) -> str:
    if found is None:
        try:
            _ = file[name]
        except KeyError:
            pass
        except (OSError, RuntimeError, ValueError) as reason:
            return f"cannot be opened ({reason})"
        try:
            leads_nowhere = file.get(name, getlink=True) is not None
        except (KeyError, RuntimeError, ValueError):
            leads_nowhere = False
        return "is a broken link" if leads_nowhere else "is missing"
    is_group = hasattr(found, "keys")
    return "is a group, not a dataset" if is_group else "is a named type, not a dataset"


def _checked_axis(field: Field, path: str, dataset: Any) -> int:
    ndim = len(dataset.shape)
    if not -ndim <= field.axis < ndim:
        raise DataError(
            f"The field {shown(field)} of {path} has the shape {dataset.shape}, without an axis "
            f"{field.axis}. Use one in [{-ndim}, {ndim - 1}]."
        )
    return field.axis % ndim


def _leaves(
    file: Any,
    path: str,
    field: Field,
    dtype: np.dtype,
    members: tuple[str, ...],
    left_out: list[tuple[str, ...]] | None,
) -> Any:
    inner = dtype
    for name in members:
        if name not in (inner.names or ()):
            raise DataError(
                f"The field {shown(field)} of {path} has no member {name!r} in its rows."
            )
        inner = inner[name]
    try:
        return leaves_of(inner, members, left_out=left_out)
    except UnreadableType as reason:
        raise _refusal(file, path, field, str(reason), _members_beside(inner, field)) from None


def _members_beside(dtype: np.dtype, field: Field) -> list[str]:
    """Return fields for the members of a compound type that can be read."""
    names = () if field.attribute is not None else dtype.names or ()
    return [f"{field.path}/{name}" for name in names if is_readable(dtype[name])]


def _refusal(
    file: Any, path: str, field: Field, what: str, members: Sequence[str] = ()
) -> DataError:
    found = itertools.chain(members, readable_names(file))
    names = ", ".join(map(repr, itertools.islice(found, _MAX_SHOWN)))
    return _unreadable(
        f"The field {shown(field)} of {path} cannot be read: its type is {what}; {READABLE}. Name "
        f"the fields to read with fields=(...), for example of {names or 'another file'}."
    )


def _unreadable(text: str) -> DataError:
    error = DataError(text)
    error._is_of_field = True
    return error


def readable_names(file: Any) -> Iterator[str]:
    """Yield names of datasets that can be read, among the first objects of a file."""
    waiting: list[tuple[str, Any]] = [("", file)]
    seen = {file.id}
    for _ in range(_MAX_VISITED):
        if not waiting:
            return
        prefix, group = waiting.pop(0)
        for name in itertools.islice(group, _MAX_VISITED):
            link = group.get(name, getlink=True)
            found: Any = group.get(name) if isinstance(link, hdf5.h5py().HardLink) else None
            if hasattr(found, "keys") and found.id not in seen:
                seen.add(found.id)
                waiting.append((f"{prefix}{name}/", found))
            elif getattr(found, "shape", None) and is_readable(dtype_of(found)):
                yield prefix + name


def num_rows_of(path: str, located: Sequence[Located], is_live: bool = False) -> int:
    """Return how many examples all fields of a file have, so far if it is being written."""
    _check_names(path, [each for each in located if each.listing is not None])
    known = [each for each in located if each.kind is not Kind.CONSTANT] or located
    lengths = {shown(each.field): each.num_rows for each in known}
    if None in lengths.values():
        raise DataError(
            f"All fields of {path} are attributes, so the number of examples is unknown. Add a "
            "dataset, or a path with *."
        )
    # In a live file lengths may differ, because the writer appends to one dataset after the other.
    if len(set(lengths.values())) > 1 and not is_live:
        found = ", ".join(f"{name} has {length}" for name, length in lengths.items())
        raise DataError(
            f"The fields of {path} must have one length, but {found} rows. Name fields that "
            "belong together with fields=(...)."
        )
    return min(length or 0 for length in lengths.values())


def _check_names(path: str, located: Sequence[Located]) -> None:
    """Check that all patterns match the same names; otherwise raise DataError."""
    for other in located[1:]:
        for has, lacks in ((located[0], other), (other, located[0])):
            if has.listing is None or lacks.listing is None:
                continue
            there = set(lacks.listing.names)
            name = next((each for each in has.listing.names if each not in there), None)
            if name is not None:
                raise DataError(
                    f"All patterns must match the same names in {path}, but {name!r}, which "
                    f"{shown(has.field)} matches, is missing in {shown(lacks.field)}."
                )
