"""Read the attributes of a file: numbers, booleans and texts, and nothing else."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from mpistrat.hdf5 import h5py

__all__ = ["read_attribute", "read_names"]

_LONGEST_BYTES = 2**28
"""Of all texts of one attribute, which could all be the same long one in the file."""


def read_attribute(node: Any, name: str) -> bool | int | str | None:
    """Return one value; ``None`` if it is missing, or of a kind that no checkpoint has. Local."""
    found, stored = _open(node, name)
    if found is None or found.shape != ():
        return None
    value = _read(found, stored, ()).item()
    if isinstance(value, bytes):
        value = value.decode()
    return value if isinstance(value, bool | int | str) else None


def read_names(node: Any, name: str, longest_bytes: int) -> list[str] | None:
    """Return the texts of an attribute, ``None`` if it is missing. Local.

    Parameters
    ----------
    node : h5py.Group or h5py.Dataset
    name : str
    longest_bytes : int
        No text of the file is longer.

    Raises
    ------
    ValueError
        If it is no list of texts, or if they are too long.
    """
    found, stored = _open(node, name)
    if found is None and not h5py().h5a.exists(node.id, name.encode()):
        return None
    if found is None or len(found.shape) != 1 or found.dtype.kind not in "OS":
        raise ValueError(f"the attribute {name} is no list of names")
    if math.prod(found.shape) * max(longest_bytes, found.dtype.itemsize) > _LONGEST_BYTES:
        raise ValueError(f"the attribute {name} has {found.shape[0]} names, which are too long")
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
