"""Stored types: which HDF5 types become arrays, strings and rows of varying length."""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import hdf5, nests
from mpistrat.data.spec import ArraySpec

READABLE = (
    "numbers, bools, text, rows of numbers of any length, and compound types of these can be read"
)


_OPAQUE = "opaque or unknown to NumPy"


class UnreadableType(Exception):
    """Raised if a type cannot be represented as an array; the message names the type."""


class Form(enum.Enum):
    """How the values of a type become arrays."""

    FIXED = "as they are"
    TEXT = "strings of any length"
    RAGGED = "arrays, each of its own length"


@nests.leaf_type
@dataclass(frozen=True)
class Leaf:
    """One array of an example: a type without members, or a member of a compound type."""

    members: tuple[str, ...]
    """The names of the member and of the members that contain it, from the outside."""
    dtype: np.dtype
    """Dtype of the elements, in native byte order."""
    shape: tuple[int, ...]
    """Shape of the member in each element."""
    form: Form

    def spec(self, shape: tuple[int | None, ...]) -> ArraySpec:
        """Return the spec of elements of `shape`."""
        shape += self.shape
        return ArraySpec((*shape, None) if self.form is Form.RAGGED else shape, self.dtype)


def dtype_of(node: Any) -> np.dtype:
    """Return the dtype of a dataset or an attribute, opaque if NumPy has no such type."""
    # h5py raises an error for times, for numbers of 24 bits, and for types that contain them.
    try:
        found: np.dtype = node.dtype
    except (TypeError, ValueError):
        return _dtype_of_type(getattr(node, "id", node).get_type())
    return found


def _dtype_of_type(stored: Any) -> np.dtype:
    try:
        found: np.dtype = stored.dtype
        return found
    except (TypeError, ValueError):
        h5t = hdf5.h5py().h5t
    if isinstance(stored, h5t.TypeArrayID):
        return np.dtype((_dtype_of_type(stored.get_super()), stored.get_array_dims()))
    if not isinstance(stored, h5t.TypeCompoundID):
        return np.dtype(f"V{stored.get_size()}")
    numbers = range(stored.get_nmembers())
    names = map(stored.get_member_name, numbers)
    return np.dtype(
        {
            "names": [name.decode("utf-8", "surrogateescape") for name in names],
            "formats": [_dtype_of_type(stored.get_member_type(n)) for n in numbers],
            "offsets": list(map(stored.get_member_offset, numbers)),
            "itemsize": stored.get_size(),
        }
    )


def leaves_of(
    dtype: np.dtype,
    members: tuple[str, ...] = (),
    shape: tuple[int, ...] = (),
    left_out: list[tuple[str, ...]] | None = None,
) -> Any:
    """Return the nest of leaves of a type, with a dict for a compound type.

    If `left_out` is a list, members that cannot be read are left out and their names appended to
    it.
    """
    if dtype.subdtype is not None:
        base, inner = dtype.subdtype
        return leaves_of(base, members, shape + inner, left_out)
    if dtype.names and not shape:
        nest = {}
        for name in dtype.names:
            try:
                nest[name] = leaves_of(dtype[name], (*members, name), (), left_out)
            except UnreadableType:
                if left_out is None:
                    raise
                left_out.append((*members, name))
        if not nest:
            raise UnreadableType("a compound type without a member that can be read")
        return nest
    if dtype.kind in "biufcS":
        return Leaf(members, np.dtype(dtype.newbyteorder("=").str), shape, Form.FIXED)
    if not dtype.hasobject:
        raise _unreadable(members, "arrays of a compound type" if dtype.names else _OPAQUE)
    h5py = hdf5.h5py()
    if h5py.check_string_dtype(dtype) is not None:
        return Leaf(members, np.dtype("U"), shape, Form.TEXT)
    base = h5py.check_vlen_dtype(dtype)
    if base is None:
        raise _unreadable(members, "arrays of a compound type" if dtype.names else "references")
    if shape or base.hasobject or base.kind not in "biufcS":
        raise _unreadable(members, f"nested rows of variable length, of {base}")
    return Leaf(members, np.dtype(base.newbyteorder("=").str), (), Form.RAGGED)


def is_readable(dtype: np.dtype) -> bool:
    """Return whether a type can be read completely."""
    try:
        leaves_of(dtype)
    except UnreadableType:
        return False
    return True


def _unreadable(members: tuple[str, ...], what: str) -> UnreadableType:
    where = f", in the member {'/'.join(members)!r}" if members else ""
    return UnreadableType(f"{what}{where}")


def subset(dtype: np.dtype, members: Iterable[tuple[str, ...]]) -> np.dtype:
    """Return the packed type, in native byte order, of some members of a compound type."""
    chosen: dict[str, list[tuple[str, ...]]] = {}
    for first, *rest in members:
        chosen.setdefault(first, []).append(tuple(rest))
    return np.dtype(
        [
            (name, subset(dtype[name], rest) if all(rest) else _native(dtype[name]))
            for name, rest in chosen.items()
        ]
    )


def _native(dtype: np.dtype) -> np.dtype:
    # A dtype that h5py marks by metadata, such as text, would lose the metadata.
    return dtype if dtype.hasobject else dtype.newbyteorder("=")


def assign(target: np.ndarray, elements: np.ndarray) -> None:
    """Copy the members of compound `elements` that `target` has, or plain elements as a whole."""
    if target.dtype.names is None:
        target[...] = elements
        return
    for name in target.dtype.names:
        assign(target[name], elements[name])


def member(value: Any, members: tuple[str, ...]) -> Any:
    """Return a member of an array or an element of a compound type."""
    for name in members:
        value = value[name]
    return value


def value_of(value: Any, leaf: Leaf) -> Any:
    """Return a value of h5py as the array of `leaf`; raise UnicodeDecodeError if not UTF-8."""
    value = member(value, leaf.members)
    if leaf.form is Form.FIXED:
        return value
    if leaf.form is Form.RAGGED:
        row = value[()] if isinstance(value, np.ndarray) and value.dtype == object else value
        # A row that was never written is not an array, but has the initial value: None or zero.
        is_written = isinstance(row, np.ndarray | bytes)
        return np.asarray(row, leaf.dtype).reshape(-1) if is_written else np.zeros(0, leaf.dtype)
    if isinstance(value, np.ndarray):
        texts = [_decoded(each) for each in value.reshape(-1).tolist()]
        return np.array(texts, np.str_).reshape(value.shape)
    return np.str_(_decoded(value))


def _decoded(text: Any) -> str:
    if isinstance(text, bytes):
        return text.decode()
    return text if isinstance(text, str) else ""
