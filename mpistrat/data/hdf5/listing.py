"""Listing of the matches of a pattern in one file: names, shapes and places."""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.data.hdf5.fields import (
    DanglingLink,
    Field,
    encoded,
    groups_of_pattern,
    link_leads_nowhere,
    matches_path,
    object_at,
    parts_of,
    shown,
    what_is_there,
)
from mpistrat.data.hdf5.filters import install_filter, missing_filters
from mpistrat.data.hdf5.linked_files import LinkedFiles
from mpistrat.data.hdf5.types import dtype_of
from mpistrat.errors import DataError
from mpistrat.system.text import counted


@dataclass(frozen=True, eq=False)
class Listing:
    """The matches of one field in one file, in natural order."""

    names: tuple[str, ...]
    """The names that match the parts with ``*``, joined by ``/``."""
    parts: tuple[str, ...]
    """The names of the path up to the object."""
    members: tuple[str, ...]
    """The rest of the path, if the object is a compound dataset."""
    shapes: np.ndarray
    """The shape of each match: an array of shape (matches, dimensions)."""
    offsets: np.ndarray
    """The offset of the elements of each match in the file, -1 if they are not in one piece."""
    width: int
    """Size of the widest element in bytes: strings may have different widths."""
    files: tuple[str, ...] = ()
    """Other files that hold matches."""

    @cached_property
    def paths(self) -> list[bytes]:
        """The path of each match."""
        return [encoded(matches_path(self.parts, name.split("/"))) for name in self.names]

    def path(self, number: int) -> str:
        """Return the path of a match, for error messages."""
        return matches_path(self.parts, self.names[number].split("/"))

    @cached_property
    def digest(self) -> str:
        """A digest of names and shapes, which is the same for copies of the file."""
        text = json.dumps([self.names, self.parts, self.members, self.shapes.tolist()])
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def is_of(self, file: Any) -> bool:
        """Return whether some datasets of an open file have the offsets of this listing."""
        # The file may be a copy with the same bytes, or may have been written again.
        step = max(len(self.names) // _NUM_TRIED, 1)
        for number in range(0, len(self.names), step):
            if self.offsets[number] >= 0:
                found = object_at(file.id, self.path(number))
                is_dataset = isinstance(found, hdf5.h5py().h5d.DatasetID)
                if not is_dataset or found.get_offset() != self.offsets[number]:
                    return False
        return True

    def to_json(self) -> dict[str, Any]:
        """Return the listing as JSON values."""
        arrays = [np.ascontiguousarray(each, np.int64) for each in (self.shapes, self.offsets)]
        packed = zlib.compress(b"".join(each.tobytes() for each in arrays), 1)
        values = dataclasses.asdict(self)
        del values["offsets"]
        return {
            **values,
            "shapes": list(self.shapes.shape),
            "arrays": base64.b64encode(packed).decode(),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Listing:
        """Return the listing from the JSON values of `to_json`."""
        values = dict(values)
        arrays = np.frombuffer(zlib.decompress(base64.b64decode(values.pop("arrays"))), np.int64)
        num_matches, ndim = values.pop("shapes")
        texts = {key: tuple(values[key]) for key in ("names", "parts", "members", "files")}
        count = num_matches * ndim
        shapes = arrays[:count].reshape(num_matches, ndim)
        return cls(**{**values, **texts}, shapes=shapes, offsets=arrays[count:])


_NUM_TRIED = 16
"""Number of datasets of a copy that are compared."""


def list_matches(file: Any, path: str, field: Field) -> Listing:
    """Return the matches of a field with ``*`` in an open file."""
    parts = parts_of(field.path)
    with LinkedFiles(path) as linked:
        return _list_matches(_Lister(file, path, field, linked), parts)


def _list_matches(lister: _Lister, parts: list[str]) -> Listing:
    file, field = lister.file, lister.field
    # The part after the last * may be a path within compound rows, which the first match shows.
    last = max(number for number, part in enumerate(parts) if "*" in part)
    try:
        for found in groups_of_pattern(file.id, parts):
            lister.add(found.group, found.before, found.names, parts[last + 1 :])
    except DanglingLink as link:
        raise DataError(
            f"{lister.where} matches {str(link)!r}, a broken link. Remove or repair it, "
            "or use a field that does not match it."
        ) from None
    if not lister.names:
        if lister.a_group and field.attribute is None:
            raise DataError(
                f"{lister.where} matches groups, such as {lister.a_group!r}, but datasets were "
                "expected. Add the name of a dataset in them, or attribute=...."
            )
        raise DataError(
            f"{lister.where} matches nothing: {what_is_there(file.id, parts)}. * stands for any "
            "characters within one name."
        )
    num_after = len(parts) - len(lister.members)
    return lister.listing(parts[:num_after])


class _Lister:
    """Opens each match, and collects the content of a listing."""

    def __init__(self, file: Any, path: str, field: Field, linked: LinkedFiles) -> None:
        h5py = hdf5.h5py()
        self._h5d, self._h5a, self._h5f = h5py.h5d, h5py.h5a, h5py.h5f
        self._own_name = self._h5f.get_name(file.id)
        self.file, self.field, self._linked = file, field, linked
        self._attribute = None if field.attribute is None else encoded(field.attribute)
        self.where = f"The field {shown(field)} of {path}"
        self.members: tuple[str, ...] = ()
        self.names: list[str] = []
        self._shapes: list[tuple[int, ...]] = []
        self._offsets: list[int] = []
        self._type: Any = None
        self._dtype: np.dtype | None = None
        self._is_plain = False
        self._itemsize = self._width = 0
        self.a_group = ""

    def add(
        self, group: Any, before: tuple[str, ...], names: Sequence[str], rest: list[str]
    ) -> None:
        """Add the matches `names` of a group, or the objects at the path `rest` in each of them."""
        for name in names:
            found = self._open(group, name, rest)
            if found is not None:
                self._note(found, "/".join((*before, name)))

    def _open(self, group: Any, name: str, rest: list[str]) -> Any:
        inner = rest[: len(rest) - len(self.members)]
        path = "/".join([name, *inner])
        if self._attribute is not None:
            try:
                return self._h5a.open(group, self._attribute, obj_name=encoded(path))
            except (KeyError, OSError, RuntimeError):
                return self._without_attribute(group, path)
        try:
            return self._h5d.open(group, encoded(path))
        except (KeyError, OSError, RuntimeError, ValueError, TypeError):
            return self._otherwise(group, name, rest, path)

    def _without_attribute(self, group: Any, path: str) -> None:
        """Raise an error if there is an object without the attribute, or a broken link."""
        if link_leads_nowhere(group, path):
            raise DanglingLink(path)
        if object_at(group, path) is not None:
            raise DataError(f"{self.where}: {path!r} has no attribute {self.field.attribute!r}.")

    def _otherwise(self, group: Any, name: str, rest: list[str], path: str) -> Any:
        """Return the compound dataset in which the path ends, ``None`` if there is no match."""
        found = object_at(group, path)
        if found is not None:
            self.a_group = self.a_group or path
            return None
        if link_leads_nowhere(group, path):
            raise DanglingLink(path)
        # The first match decides how many of the names are members of compound rows.
        for num_members in range(1, len(rest) + 1) if not self.names else ():
            found = object_at(group, "/".join([name, *rest[:-num_members]]))
            if isinstance(found, self._h5d.DatasetID) and dtype_of(found).names:
                self.members = tuple(rest[-num_members:])
                return found
        return None

    def _note(self, found: Any, name: str) -> None:
        own_type = found.get_type()
        if self._type is None:
            self._begin(found, own_type)
        # There may be 100,000 matches, and H5Tequal is cheaper than creating a dtype for each.
        is_same = own_type.equal(self._type)
        if not is_same:
            self._check_type(found, name)
        space = found.get_space()
        shape = space.get_simple_extent_dims()
        if shape is None:
            raise DataError(f"{self.where}: {name!r} is empty, without any shape.")
        if self._shapes and len(shape) != len(self._shapes[0]):
            raise DataError(
                f"{self.where} matches {self.names[0]!r} with "
                f"{counted(len(self._shapes[0]), 'dimension')} and {name!r} with {len(shape)}, but "
                "all must have the same number."
            )
        offset = -1
        if self._attribute is None:
            is_plain = is_same and self._is_plain
            offset = self._place(found, name, space) if is_plain else self._look_closer(found, name)
        elif self._h5f.get_name(found) != self._own_name:
            self._add_links(name)
        self.names.append(name)
        self._shapes.append(shape)
        self._offsets.append(offset)

    def _begin(self, found: Any, own_type: Any) -> None:
        self._type, self._dtype = own_type, dtype_of(found)
        dtype = self._dtype
        self._itemsize = self._width = dtype.itemsize
        is_known = dtype.kind in "biufcS" and dtype.isnative
        is_dataset = self._attribute is None
        self._is_plain = is_dataset and is_known and hdf5.is_stored_as(found, dtype)
        self._is_plain = self._is_plain and hdf5.has_offsets(found)

    def _check_type(self, found: Any, name: str) -> None:
        expected, came = self._dtype, dtype_of(found)
        if expected is None:
            return
        if expected.kind == came.kind == "S":
            self._width = max(self._width, came.itemsize)
            return
        same_mark = _mark(expected) == _mark(came)
        if expected.newbyteorder("=") != came.newbyteorder("=") or not same_mark:
            raise DataError(
                f"{self.where} matches {self.names[0]!r} of dtype {_named(expected)} and {name!r} "
                f"of dtype {_named(came)}, but all must have one dtype."
            )

    def _add_links(self, name: str) -> None:
        path = matches_path(parts_of(self.field.path), name.split("/"))
        self._linked.add_links(self.file, path)

    def _place(self, found: Any, name: str, space: Any) -> int:
        """Return the offset of the elements of a dataset; -1 if they are not in one piece."""
        is_here = self._h5f.get_name(found) == self._own_name
        num_bytes = space.get_simple_extent_npoints() * self._itemsize
        offset = hdf5.offset_of_block(found, num_bytes) if is_here else None
        return self._look_closer(found, name) if offset is None else offset

    def _look_closer(self, found: Any, name: str) -> int:
        """Add the other files with data of a dataset; return -1, an unknown offset."""
        properties = found.get_create_plist()
        dataset = hdf5.h5py().Dataset(found)
        for each in missing_filters(dataset) if properties.get_nfilters() else ():
            raise DataError(
                f"{self.where}: {dataset.name!r} was compressed by {each}, a filter that the HDF5 "
                f"of this rank does not have. {install_filter(each)}"
            )
        is_here = self._h5f.get_name(found) == self._own_name
        is_virtual = properties.get_layout() == self._h5d.VIRTUAL
        if not is_here or is_virtual or properties.get_external_count():
            self._add_links(name)
            self._linked.add(dataset)
        return -1

    def listing(self, parts: Sequence[str]) -> Listing:
        """Return the listing of all matches that were added."""
        shapes = np.array(self._shapes, np.int64).reshape(len(self.names), -1)
        # HDF5 must read strings of different widths, because it widens them.
        have_places = self._width == self._itemsize
        offsets = self._offsets if have_places else [-1] * len(self.names)
        return Listing(
            tuple(self.names),
            tuple(parts),
            self.members,
            shapes,
            np.array(offsets, np.int64),
            self._width,
            tuple(self._linked.paths),
        )


def _mark(dtype: np.dtype) -> Any:
    """Return the marks of h5py in a dtype: text, rows of variable length or references."""
    h5py = hdf5.h5py()
    if not dtype.hasobject or dtype.names:
        return None
    is_text = h5py.check_string_dtype(dtype) is not None
    return is_text, h5py.check_vlen_dtype(dtype), h5py.check_ref_dtype(dtype)


def _named(dtype: np.dtype) -> str:
    is_text, base, _ = _mark(dtype) or (False, None, None)
    return "text" if is_text else f"rows of {base}" if base is not None else str(dtype)
