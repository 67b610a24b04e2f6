"""Groups, datasets and attributes of checkpoint files, through the low level of h5py.

A checkpoint has hundreds of small nodes. The high level of h5py creates types, spaces and property
lists again for each node, which takes longer than HDF5 itself, so this module creates each once.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.hdf5 import h5py, stored_type

AttributeValue = bool | int | str | Sequence[str]


class Groups:
    """The groups of a file that is being written; each is created when first used."""

    def __init__(self, file: Any) -> None:
        self._known: dict[str, Any] = {"": file.id}

    def __getitem__(self, path: str) -> Any:
        found = self._known.get(path)
        if found is None:
            above, _, name = path.rpartition("/")
            found = self._known[path] = h5py().h5g.create(self[above], name.encode())
        return found

    def create_dataset(self, path: str, shape: tuple[int, ...], dtype: np.dtype) -> Any:
        """Return a new dataset, which has space in the file but no values."""
        return self._create(path, stored_type(dtype), shape)

    def create_text(self, path: str, num_bytes: int) -> Any:
        """Return a new dataset for one string. A variable length would use an unchecked heap."""
        h5t = h5py().h5t
        return self._create(path, _fixed_texts(num_bytes, h5t.STR_NULLPAD, h5t.CSET_UTF8), ())

    def _create(self, path: str, stored: Any, shape: tuple[int, ...]) -> Any:
        above, _, name = path.rpartition("/")
        space, properties = _space(shape), _in_place()
        return h5py().h5d.create(self[above], name.encode(), stored, space, properties)


def write_values(dataset: Any, values: np.ndarray) -> None:
    """Write all values of a small dataset, passed as an array in C order or as one string."""
    every = h5py().h5s.ALL
    if values.dtype.kind == "S":
        dataset.write(every, every, values, dataset.get_type())
    elif values.size:
        dataset.write(every, every, values, stored_type(values.dtype))


class TypesInFile:
    """The dtypes of datasets: a file has few types, which all its datasets share."""

    def __init__(self) -> None:
        self._known: list[tuple[Any, np.dtype, bool]] = []

    def of(self, dataset: Any) -> tuple[np.dtype, bool]:
        """Return the dtype of a dataset, and whether the file stores it as memory does."""
        stored = dataset.get_type()
        for known, dtype, is_as_in_memory in self._known:
            if known.equal(stored):
                return dtype, is_as_in_memory
        dtype = dataset.dtype
        native = dtype.newbyteorder("=")
        is_as_in_memory = dtype == native and bool(stored.equal(stored_type(native)))
        self._known.append((stored, dtype, is_as_in_memory))
        return dtype, is_as_in_memory


@functools.cache
def _in_place() -> Any:
    """Return the properties of contiguous datasets, whose space is allocated at once."""
    h5p, h5d = h5py().h5p, h5py().h5d
    properties = h5p.create(h5p.DATASET_CREATE)
    properties.set_layout(h5d.CONTIGUOUS)
    # By default HDF5 allocates contiguous storage at the first write (H5Pset_alloc_time), but large
    # values are written past HDF5, at an offset that must be known before.
    properties.set_alloc_time(h5d.ALLOC_TIME_EARLY)
    # HDF5 writes no fill values, so each byte is written once.
    properties.set_fill_time(h5d.FILL_TIME_NEVER)
    return properties


@functools.lru_cache(256)
def _space(shape: tuple[int, ...]) -> Any:
    h5s = h5py().h5s
    return h5s.create_simple(shape) if shape else h5s.create(h5s.SCALAR)


def write_attribute(node: Any, name: str, value: AttributeValue) -> None:
    """Add an attribute. Strings have a fixed length: others are in a heap without a checksum."""
    if isinstance(value, int):  # booleans are int too
        array = np.array(value)
        stored = stored_type(array.dtype)
    else:
        texts = value.encode() if isinstance(value, str) else [each.encode() for each in value]
        array = np.array(texts, "S")
        array = array.astype(f"S{array.itemsize + 1}")  # a zero byte ends each string, as in C
        stored = _fixed_texts(array.itemsize, h5py().h5t.STR_NULLTERM, h5py().h5t.CSET_UTF8)
    attribute = h5py().h5a.create(node, name.encode(), stored, _space(array.shape))
    attribute.write(array, stored)


def read_short_text(node: Any, name: str) -> str:
    """Return a string that `write_attribute` has written, ``"None"`` if it is missing.

    It reads little but the string, and so takes a fifth of the time of `read_attribute`.
    """
    h5 = h5py()
    text = b""
    try:
        attribute = h5.h5a.open(node, name.encode())
        # Then the attribute holds at most so many strings, and HDF5 cannot write beyond the buffer.
        if attribute.get_storage_size() <= _SHORT:
            buffer = np.zeros(_SHORT, f"S{_SHORT}")
            attribute.read(buffer, _fixed_texts(_SHORT, h5.h5t.STR_NULLPAD, h5.h5t.CSET_UTF8))
            raw = buffer.tobytes()
            text = raw[:_SHORT].rstrip(b"\0") if raw[_SHORT:] == _NO_OTHER else b""
    except (KeyError, OSError, RuntimeError, TypeError, ValueError):
        text = b""
    if not 0 < len(text) < _SHORT:  # several strings, or none, or one that was cut off
        return str(read_attribute(node, name))
    return text.decode()


_SHORT = 80
"""Bytes for a string; HDF5 would cut off a longer one."""
_NO_OTHER = bytes(_SHORT * (_SHORT - 1))


def read_flag(node: Any, name: str) -> bool | int | str | None:
    """Return a boolean that `write_attribute` has written, or the result of `read_attribute`."""
    stored = stored_type(_FLAG)
    try:
        attribute = h5py().h5a.open(node, name.encode())
        if attribute.get_storage_size() == _FLAG.itemsize and attribute.get_type().equal(stored):
            buffer = np.zeros((), _FLAG)
            attribute.read(buffer, stored)
            return bool(buffer)
    except (KeyError, OSError, RuntimeError, TypeError, ValueError):
        pass
    return read_attribute(node, name)


_FLAG = np.dtype(bool)


def read_attribute(node: Any, name: str) -> bool | int | str | None:
    """Return one value; ``None`` if it is missing, or of a kind that checkpoints do not have."""
    found, stored = _open(node, name)
    if found is None or found.shape != ():
        return None
    if found.get_space().get_simple_extent_type() != h5py().h5s.SCALAR:
        return None  # an attribute without a value, whose shape is () in h5py
    value = _read(found, stored, ()).item()
    if isinstance(value, bytes):
        value = value.decode()
    return value if isinstance(value, bool | int | str) else None


def read_names(node: Any, name: str) -> list[str] | None:
    """Return the strings of an attribute, ``None`` if missing or without a fixed length.

    With variable lengths, a small file could name one long string many times, to fill the memory.
    Raises ValueError if the attribute is not a list of strings.
    """
    found, stored = _open(node, name)
    if found is None and not h5py().h5a.exists(node, name.encode()):
        return None
    if not isinstance(stored, h5py().h5t.TypeStringID) or len(found.shape) != 1:
        raise ValueError(f"the attribute {name} is not a list of names")
    if stored.is_variable_str():
        return None
    return [each.decode() for each in _read(found, stored, found.shape).tolist()]


def _open(node: Any, name: str) -> tuple[Any, Any]:
    """Return an attribute and its type if it is of a kind that checkpoints have."""
    h5a, h5t = h5py().h5a, h5py().h5t
    try:
        found = h5a.open(node, name.encode())
    except KeyError:
        return None, None
    stored = found.get_type()
    kinds = (h5t.TypeStringID, h5t.TypeIntegerID, h5t.TypeEnumID)
    return (found, stored) if isinstance(stored, kinds) else (None, None)


@functools.lru_cache(256)
def _fixed_texts(num_bytes: int, padding: int, charset: int) -> Any:
    """Return the type of strings of `num_bytes` each."""
    found = h5py().h5t.C_S1.copy()
    found.set_size(num_bytes)
    found.set_strpad(padding)
    found.set_cset(charset)
    return found


@functools.cache
def _type_of_texts() -> Any:
    """Return the type of Python's strings in memory."""
    return h5py().h5t.py_create(h5py().string_dtype())


def _read(attribute: Any, stored: Any, shape: tuple[int, ...]) -> np.ndarray:
    h5t = h5py().h5t
    if not isinstance(stored, h5t.TypeStringID):
        values = np.empty(shape, stored.dtype)
        attribute.read(values)
    elif stored.is_variable_str():
        values = np.empty(shape, object)
        attribute.read(values, _type_of_texts())
    else:
        size = stored.get_size()
        values = np.empty(shape, f"S{size}")
        # NumPy pads its strings with zero bytes, whatever the file does.
        attribute.read(values, _fixed_texts(size, h5t.STR_NULLPAD, stored.get_cset()))
    return values
