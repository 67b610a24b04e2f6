"""Attributes of a file: numbers, booleans and texts, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.hdf5 import h5py

__all__ = ["read_attribute", "read_names", "write_attribute"]


def write_attribute(node: Any, name: str, value: bool | int | str | Sequence[str]) -> None:
    """Add an attribute. Texts have a fixed length: others lie in a heap that has no checksum."""
    if isinstance(value, int):  # as booleans are too
        node.attrs[name] = value
        return
    texts = value.encode() if isinstance(value, str) else [each.encode() for each in value]
    array = np.array(texts, "S")
    array = array.astype(f"S{array.itemsize + 1}")  # a zero byte ends each text, as in C
    h5a, h5s = h5py().h5a, h5py().h5s
    space = h5s.create(h5s.SCALAR) if array.shape == () else h5s.create_simple(array.shape)
    stored = _type_of_fixed_texts(array.itemsize)
    h5a.create(node.id, name.encode(), stored, space).write(array, stored)


def read_attribute(node: Any, name: str) -> bool | int | str | None:
    """Return one value; ``None`` if it is missing, or of a kind that no checkpoint has. Local."""
    found, stored = _open(node, name)
    if found is None or found.shape != ():
        return None
    value = _read(found, stored, ()).item()
    if isinstance(value, bytes):
        value = value.decode()
    return value if isinstance(value, bool | int | str) else None


def read_names(node: Any, name: str) -> list[str] | None:
    """Return the texts of an attribute, ``None`` if it is missing or they have no fixed length.

    Of texts of variable length a small file can name a long one many times, to fill the memory.
    Raises ValueError if it is no list of texts.
    """
    found, stored = _open(node, name)
    if found is None and not h5py().h5a.exists(node.id, name.encode()):
        return None
    if not isinstance(stored, h5py().h5t.TypeStringID) or len(found.shape) != 1:
        raise ValueError(f"the attribute {name} is no list of names")
    if stored.is_variable_str():
        return None
    return [each.decode() for each in _read(found, stored, found.shape).tolist()]


def _open(node: Any, name: str) -> tuple[Any, Any]:
    """Return the low-level attribute and its type if it is of one of our kinds."""
    h5a, h5t = h5py().h5a, h5py().h5t
    try:
        found = h5a.open(node.id, name.encode())
    except KeyError:
        return None, None
    stored = found.get_type()
    kinds = (h5t.TypeStringID, h5t.TypeIntegerID, h5t.TypeEnumID)
    return (found, stored) if isinstance(stored, kinds) else (None, None)


@functools.cache
def _type_of_fixed_texts(num_bytes: int) -> Any:
    """Return the type of texts in UTF-8, each with a zero byte at its end."""
    h5t = h5py().h5t
    found = h5t.C_S1.copy()
    found.set_size(num_bytes)
    found.set_cset(h5t.CSET_UTF8)
    return found


@functools.cache
def _type_of_texts() -> Any:
    """Return the type of Python's strings in memory, which h5py would make for each read."""
    return h5py().h5t.py_create(h5py().string_dtype())


def _read(attribute: Any, stored: Any, shape: tuple[int, ...]) -> np.ndarray:
    if isinstance(stored, h5py().h5t.TypeStringID) and stored.is_variable_str():
        values = np.empty(shape, object)
        attribute.read(values, _type_of_texts())
    else:
        values = np.empty(shape, stored.dtype)
        attribute.read(values)
    return values
