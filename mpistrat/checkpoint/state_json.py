"""State dicts as JSON text and arrays: split for a file, and joined again.

Arrays are taken out of the JSON. A ``null`` keeps their place only if the path cannot tell the
place: inside lists, and under keys that are empty or contain ``/``. A value that JSON has no form
for becomes a `Mark`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import numpy as np

from mpistrat.arrays import adopted, host_copy, is_array, is_foreign
from mpistrat.checkpoint.format import check_path, is_storable
from mpistrat.checkpoint.marks import (
    ARRAY,
    CLASS,
    KEYS,
    NUMPY,
    SAME,
    SCALAR,
    TENSOR,
    TUPLE,
    Mark,
    array_of_mark,
    exact_mark,
    instance_of_mark,
    mark_of_array,
    marked,
    value_of_numpy_mark,
)
from mpistrat.checkpoint.torch_hook import TensorArray, holds_tensors, tensor_library
from mpistrat.pytorch import is_tensor

SplitState = tuple[dict[str, Any] | Mark, dict[str, "np.ndarray | TensorArray"]]
"""The JSON part of a state, and its arrays by path below the owner."""

_ABSENT = object()


def split_state(state: object, owner: str, is_of_tensors: bool = False) -> SplitState:
    """Return the JSON part of `state`, and its arrays by path below the owner.

    Tuples and the types of keys are restored as they were. So are all other types, or `TypeError`
    is raised, unless the state `is_of_tensors` or contains tensors: such states hold ordered dicts,
    for example.
    """
    if not isinstance(state, dict):
        raise TypeError(
            f"state_dict() of {owner!r} must return a dict, not {type(state).__name__}."
        )
    splitter = _Splitter(owner, is_exact=not (is_of_tensors or holds_tensors(state)))
    rest = splitter.rest(state, "", plain=True)
    # `join` takes a None at the path of an array as the place of that array.
    for path in splitter.nones & splitter.arrays.keys():
        raise ValueError(
            f"state_dict() of {owner!r} has two entries with the path {path!r}. Use keys "
            "without '/'."
        )
    return rest, splitter.arrays


def tensor_mark(dtype: str) -> Mark:
    """Return the mark that replaces a tensor of `dtype` in the JSON part of a state."""
    return Mark(TENSOR, dtype)


def json_part(value: object, owner: str, path: str) -> Any:
    """Return a value as JSON with marks, as in `split_state`, but with NumPy's arrays in it."""
    splitter = _Splitter(owner, is_exact=False, are_arrays_inside=True)
    rest = splitter.rest(value, path, plain=False)
    for name in splitter.arrays:
        raise TypeError(
            f"The state of {owner!r} holds a tensor at {name!r}, inside of a value that is saved "
            "as a whole. Put it in a dict or a list."
        )
    return rest


class _Splitter:
    """The walk through one state, which collects its arrays."""

    def __init__(self, owner: str, is_exact: bool, are_arrays_inside: bool = False) -> None:
        self.owner = owner
        self._are_arrays_inside = are_arrays_inside
        """Whether arrays and NumPy's scalars become marks."""
        self.is_exact = is_exact
        """Whether subclasses of JSON's types are restored exactly, or raise."""
        self.arrays: dict[str, np.ndarray | TensorArray] = {}
        self.nones: set[str] = set()
        """The paths of the ``None`` values in the state itself."""
        self._tensors: dict[Hashable, str] = {}
        """The paths of tensors that others may be tied to, by identity."""

    def rest(self, value: Any, path: str, plain: bool) -> Any:
        """Return `value` without its arrays.

        `plain` says that all containers above are dicts, whose keys are not empty and contain no
        ``/``.
        """
        if value is None:
            self.nones.add(path)
            return value
        if self._are_arrays_inside and isinstance(value, np.ndarray | np.generic):
            self.check_array(value, path)
            return mark_of_array(value)
        if self.is_exact:
            where = f"state_dict() of {self.owner!r} holds a {type(value).__name__} at {path!r}"
            mark = exact_mark(value, where, lambda items: self.rest(items, path, False))
            if mark is not None:
                return mark
        if isinstance(value, bool | int | float | str):
            return value
        if is_foreign(value):
            value = adopted(f"state_dict() of {self.owner!r} at {path!r}", value)
        if is_array(value):
            self.take(value, path)
            if self.is_exact and isinstance(value, np.generic):
                return Mark(SCALAR, str(value.dtype))
            # Below plain dicts the path by itself says where an array belongs. In a list, None
            # keeps its place.
            return _ABSENT if plain else None
        if is_tensor(value):
            return self.take_tensor(value, path)
        if isinstance(value, list | tuple):
            items = [self.rest(item, _below(path, i), False) for i, item in enumerate(value)]
            return Mark(TUPLE, items) if isinstance(value, tuple) else items
        if isinstance(value, dict):
            return self.rest_of_dict(value, path, plain)
        raise TypeError(
            f"state_dict() of {self.owner!r} holds a {type(value).__name__} at {path!r}. A "
            "checkpoint stores arrays, tensors, numbers, strings, booleans, None, and lists and "
            "dicts of them. Convert it in state_dict() and back in load_state_dict()."
        )

    def rest_of_dict(self, value: dict[Any, Any], path: str, plain: bool) -> Any:
        if not all(type(key) is str if self.is_exact else isinstance(key, str) for key in value):
            pairs = [
                [self.rest_of_key(key, path), self.rest(item, _below(path, key), False)]
                for key, item in value.items()
            ]
            return Mark(KEYS, pairs)
        rest = {}
        for key, item in value.items():
            left = self.rest(item, _below(path, key), plain and key != "" and "/" not in key)
            if left is not _ABSENT:
                rest[key] = left
        return rest

    def rest_of_key(self, key: Any, path: str) -> Any:
        if self.is_exact:
            where = (
                f"state_dict() of {self.owner!r} has the key {key!r} at {path or '/'!r}, a "
                f"{type(key).__name__}"
            )
            mark = exact_mark(key, where, lambda items: self.rest_of_key(items, path))
            if mark is not None:
                return mark
        if isinstance(key, tuple):
            return Mark(TUPLE, [self.rest_of_key(each, path) for each in key])
        if key is None or isinstance(key, bool | int | float | str):
            return key
        raise TypeError(
            f"state_dict() of {self.owner!r} has the key {key!r} at {path or '/'!r}, a "
            f"{type(key).__name__}. A checkpoint stores keys that are strings, numbers, booleans, "
            "None and tuples of them."
        )

    def check_array(self, value: Any, path: str) -> None:
        """Raise TypeError for arrays of NumPy that a checkpoint would change."""
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(
                f"state_dict() of {self.owner!r} holds a masked array at {path!r}, whose mask a "
                "checkpoint would lose. Give its .data and its .mask."
            )
        if isinstance(value, np.ndarray) and type(value) not in (np.ndarray, np.memmap):
            raise TypeError(
                f"state_dict() of {self.owner!r} holds a {type(value).__name__} at {path!r}, a "
                "subclass of NumPy's array, which a checkpoint would lose. Convert it with "
                "numpy.asarray() in state_dict(), and back in load_state_dict()."
            )
        if self._are_arrays_inside and value.dtype.kind not in "biufcU":
            raise TypeError(
                f"The state of {self.owner!r} holds an array of dtype {value.dtype} at {path!r}. A "
                "checkpoint stores arrays of numbers, booleans and strings."
            )

    def take(self, value: Any, path: str) -> None:
        self.check_array(value, path)
        array = host_copy(value)
        if not is_storable(array.dtype):
            raise TypeError(
                f"state_dict() of {self.owner!r} holds an array of dtype {array.dtype} at "
                f"{path!r}. A checkpoint stores numbers and booleans."
            )
        self.add(array, path)

    def take_tensor(self, value: Any, path: str) -> Mark:
        library = tensor_library()
        try:
            array = library.stored(value)
        except TypeError as reason:
            raise TypeError(f"state_dict() of {self.owner!r} holds {reason} at {path!r}.") from None
        identity = library.identity(value)
        tied_to = path if identity is None else self._tensors.setdefault(identity, path)
        if tied_to != path:
            return Mark(SAME, tied_to)
        self.add(array, path)
        return Mark(TENSOR, array.tensor_dtype)

    def add(self, array: np.ndarray | TensorArray, path: str) -> None:
        check_path(path)
        check_path(f"{self.owner}/{path}")  # the path may be too long
        if path in self.arrays:
            raise ValueError(
                f"state_dict() of {self.owner!r} has two arrays with the path {path!r}. Use keys "
                "without '/'."
            )
        self.arrays[path] = array


def _below(path: str, name: object) -> str:
    text = name if isinstance(name, str) else str(name)
    return "/".join((path, text)) if path else text  # str of a name that is an enum


def _marks(value: Any, path: str) -> Iterator[tuple[str, Mark]]:
    """Yield each mark in `value`, with its path."""
    if isinstance(value, Mark):
        yield path, value
    for name, item in _items(value):
        yield from _marks(item, _below(path, name))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the items of a container, with their keys as they were."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)
    elif isinstance(value, Mark) and value.name == TUPLE:
        yield from enumerate(value.content)
    elif isinstance(value, Mark) and value.name == KEYS:
        yield from ((_key(key), item) for key, item in value.content)
    elif isinstance(value, Mark) and value.name == CLASS:
        yield from _items(value.content["items"])


def _key(value: Any) -> Any:
    """Return the key of a dict from which `rest_of_key` made `value`."""
    if isinstance(value, Mark) and value.name == TUPLE:
        return tuple(map(_key, value.content))
    if isinstance(value, Mark) and value.name == NUMPY:
        return value_of_numpy_mark(value.content)
    if isinstance(value, Mark) and value.name == CLASS:
        return instance_of_mark(value.content, _key(value.content["items"]))
    if isinstance(value, Mark | list | dict):
        raise ValueError(f"{json.dumps(marked(value))} is no key of a dict")
    return value


def join_state(
    rest: Any, arrays: Mapping[str, Any], blank: dict[str, Any] | None = None
) -> dict[Any, Any]:
    """Return the state that `split_state` has split.

    If `blank` is passed, tensors have no memory, and are added to `blank` by path.
    """
    left = dict(arrays)
    tensors = _make_tensors(rest, left, are_blank=blank is not None)
    if blank is not None:
        blank |= tensors
    state: dict[Any, Any] = _Joiner(left, tensors).join(rest, "")
    for path, array in left.items():
        *parents, name = path.split("/")
        container = state
        for parent in parents:
            container = container.setdefault(parent, {})
            if not isinstance(container, dict):
                raise ValueError(f"the array {path!r} lies below {parent!r}, which is no dict")
        if name in container:
            raise ValueError(f"{path!r} is both an array and a JSON value")
        container[name] = array
    return state


def _make_tensors(rest: Any, left: dict[str, Any], are_blank: bool) -> dict[str, Any]:
    """Return by path the tensors that marks name, and remove their arrays from `left`."""
    tensors: dict[str, Any] = {}
    make: Callable[[np.ndarray, str], Any] | None = None
    for path, mark in _marks(rest, ""):
        if mark.name == TENSOR:
            if path not in left:
                raise ValueError(f"there is no array for the tensor {path!r}")
            if make is None:
                library = tensor_library()
                make = library.blank if are_blank else library.tensor
            tensors[path] = make(left.pop(path), mark.content)
    return tensors


class _Joiner:
    """The walk through the JSON part of a state, which inserts its arrays."""

    def __init__(self, arrays: dict[str, np.ndarray], tensors: dict[str, Any]) -> None:
        self._arrays = arrays
        self._tensors = tensors

    def join(self, value: Any, path: str) -> Any:
        if value is None and path in self._arrays:
            return self._arrays.pop(path)
        if isinstance(value, Mark) and value.name in (TENSOR, SAME):
            of = path if value.name == TENSOR else value.content
            if of not in self._tensors:
                raise ValueError(f"{path!r} is tied to {of!r}, which is no tensor")
            return self._tensors[of]
        if isinstance(value, Mark) and value.name == SCALAR:
            if path not in self._arrays:
                raise ValueError(f"there is no array for the scalar {path!r}")
            return self._arrays.pop(path)[()]
        if isinstance(value, Mark) and value.name == NUMPY:
            return value_of_numpy_mark(value.content)
        if isinstance(value, Mark) and value.name == ARRAY:
            return array_of_mark(value.content)
        if isinstance(value, Mark) and value.name == CLASS:
            return instance_of_mark(value.content, self.join(value.content["items"], path))
        joined = {key: self.join(item, _below(path, key)) for key, item in _items(value)}
        if isinstance(value, list):
            return list(joined.values())
        if isinstance(value, Mark) and value.name == TUPLE:
            return tuple(joined.values())
        return joined if isinstance(value, dict | Mark) else value


def plain_state(rest: Any) -> Any:
    """Return the JSON part of a state for display: without tensors, with strings as keys."""
    if isinstance(rest, Mark) and rest.name == SAME:
        return f"same as {rest.content}"
    if isinstance(rest, Mark) and rest.name == NUMPY:
        return rest.content[1]
    if isinstance(rest, Mark) and rest.name == ARRAY:
        return array_of_mark(rest.content).tolist()
    if isinstance(rest, Mark) and rest.name == CLASS:
        return plain_state(rest.content["items"])
    items = {str(key): plain_state(item) for key, item in _items(rest) if not _is_tensors(item)}
    if isinstance(rest, list) or (isinstance(rest, Mark) and rest.name == TUPLE):
        return list(items.values())
    return items if isinstance(rest, dict | Mark) else rest


def _is_tensors(rest: Any) -> bool:
    """Return whether a part of a state contains tensors, and nothing else."""
    if isinstance(rest, Mark) and rest.name in (TENSOR, SCALAR):
        return True
    items = [item for _, item in _items(rest)]
    return bool(items) and all(map(_is_tensors, items))


def tied_paths(rest: Any) -> dict[str, str]:
    """Return the paths of tied tensors in the JSON part of a state, and of their values."""
    return {path: mark.content for path, mark in _marks(rest, "") if mark.name == SAME}


def value_paths(rest: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of values that are not tensors in the JSON part of a state."""
    if isinstance(rest, Mark) and rest.name == CLASS:
        yield from value_paths(rest.content["items"], path)
    elif isinstance(rest, dict | list) or (isinstance(rest, Mark) and rest.name in (TUPLE, KEYS)):
        for name, item in _items(rest):
            yield from value_paths(item, _below(path, name))
    elif not isinstance(rest, Mark) or rest.name in (NUMPY, ARRAY):
        yield path
