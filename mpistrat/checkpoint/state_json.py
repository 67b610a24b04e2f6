"""State dicts as JSON text and arrays: split for a file, and joined again.

Arrays leave the JSON, which keeps a ``null`` in their place only where the path alone could
not tell the place: inside lists, and under keys that are empty or contain ``/``. What JSON has no
form for is a `Mark`: in the text a dict of one key that begins with ``$``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.arrays import adopted, host_copy, is_array, is_foreign
from mpistrat.checkpoint.format import FORMAT_VERSION, OLD_VERSION, check_path, is_storable
from mpistrat.checkpoint.tensors import TensorArray, holds_tensors, tensor_library
from mpistrat.pytorch import is_tensor

__all__ = [
    "SplitState",
    "dump_json",
    "has_marks",
    "join_state",
    "json_part",
    "load_json",
    "marked",
    "plain_state",
    "split_state",
    "tensor_mark",
    "tied_paths",
    "unmarked",
    "value_paths",
]

_FLOAT = "$float"
_DICT = "$dict"
_KEYS = "$keys"
_SAME = "$same"
_TENSOR = "$tensor"
_TUPLE = "$tuple"
_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MARKS = {
    OLD_VERSION: {_FLOAT, _DICT},
    FORMAT_VERSION: {_FLOAT, _DICT, _KEYS, _SAME, _TENSOR, _TUPLE},
}
"""By version of the format."""


@dataclass(frozen=True)
class Mark:
    """A value that JSON has no form for."""

    name: str
    content: Any
    """Of ``$tuple`` the items, of ``$keys`` the pairs of keys and values of a dict, of ``$tensor``
    the dtype, of ``$same`` the path of the tensor that it is tied to."""


def dump_json(value: Any) -> str:
    """Return `value` as JSON text that any parser reads."""
    return json.dumps(marked(value), allow_nan=False)


def load_json(text: bytes, version: int = FORMAT_VERSION) -> Any:
    """Return the value that `dump_json` was given; ValueError for other texts."""
    return unmarked(json.loads(text), version)


def marked(value: Any) -> Any:
    """Return `value` as JSON values, with marks for the others."""
    if isinstance(value, Mark):
        return {value.name: marked(value.content)}
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(float(value))}
    if isinstance(value, list):
        return [marked(item) for item in value]
    if isinstance(value, dict):
        items = {key: marked(item) for key, item in value.items()}
        return {_DICT: items} if _is_mark(value, FORMAT_VERSION) else items
    return value


def unmarked(value: Any, version: int = FORMAT_VERSION) -> Any:
    """Return the value of which `marked` made `value`; of its marks those of a `version` count."""
    if isinstance(value, list):
        return [unmarked(item, version) for item in value]
    if not isinstance(value, dict):
        return value
    if not _is_mark(value, version):
        return {key: unmarked(item, version) for key, item in value.items()}
    ((mark, content),) = value.items()
    if mark == _DICT and isinstance(content, dict):
        return {key: unmarked(item, version) for key, item in content.items()}
    if mark == _FLOAT and content in _NUMBERS:
        return _NUMBERS[content]
    if mark in (_SAME, _TENSOR) and isinstance(content, str):
        return Mark(mark, content)
    if mark == _TUPLE and isinstance(content, list):
        return Mark(mark, unmarked(content, version))
    if mark == _KEYS and isinstance(content, list) and all(map(_is_pair, content)):
        return Mark(mark, unmarked(content, version))
    raise ValueError(f"{json.dumps(value)} is no number and no dict")


def _is_mark(value: dict[str, Any], version: int) -> bool:
    return len(value) == 1 and next(iter(value)) in _MARKS[version]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


SplitState = tuple[dict[str, Any] | Mark, dict[str, "np.ndarray | TensorArray"]]
"""The JSON part of a state, and its arrays by path below the owner."""

_ABSENT = object()


def split_state(state: object, owner: str, keeps_types: bool = False) -> SplitState:
    """Return the JSON part of `state`, and its arrays by path below the owner.

    Where it `keeps_types` or has tensors, tuples and the types of keys come back as they were;
    otherwise tuples become lists, and keys must be strings.
    """
    if not isinstance(state, dict):
        raise TypeError(
            f"state_dict() of {owner!r} must return a dict, not {type(state).__name__}."
        )
    splitter = _Splitter(owner, keeps_types or holds_tensors(state))
    rest = splitter.rest_of_dict(state, "", plain=True)
    for path in splitter.nones & splitter.arrays.keys():
        raise ValueError(
            f"state_dict() of {owner!r} has two entries with the path {path!r}. Use keys "
            "without '/'."
        )
    return rest, splitter.arrays


def tensor_mark(dtype: str) -> Mark:
    """Return what stands in the JSON part of a state for a tensor of `dtype`."""
    return Mark(_TENSOR, dtype)


def json_part(value: object, owner: str, path: str) -> Any:
    """Return what `split_state` makes of a part of a state that has no arrays, or TypeError."""
    splitter = _Splitter(owner, keeps_types=True)
    rest = splitter.rest(value, path, plain=False)
    for name in splitter.arrays:
        raise TypeError(
            f"The state of {owner!r} holds an array at {name!r}, inside of a value that is saved "
            "as a whole. Make it a tensor in a dict or a list."
        )
    return rest


class _Splitter:
    """The walk through one state, which collects its arrays."""

    def __init__(self, owner: str, keeps_types: bool) -> None:
        self.owner = owner
        self.keeps_types = keeps_types
        self.arrays: dict[str, np.ndarray | TensorArray] = {}
        self.nones: set[str] = set()
        """The paths of the state's own ``None``."""
        self._tensors: dict[Hashable, str] = {}
        """The paths of tensors that others may be tied to, by identity."""

    def rest(self, value: Any, path: str, plain: bool) -> Any:
        """Return `value` without its arrays.

        `plain` says that all containers above are dicts whose keys are not empty and have no ``/``.
        """
        if value is None:
            self.nones.add(path)
            return value
        if isinstance(value, bool | int | float | str):
            return value
        if is_foreign(value):
            value = adopted(f"state_dict() of {self.owner!r} at {path!r}", value)
        if is_array(value):
            self.take(value, path)
            return _ABSENT if plain else None
        if is_tensor(value):
            return self.take_tensor(value, path)
        if isinstance(value, list | tuple):
            items = [self.rest(item, _below(path, i), False) for i, item in enumerate(value)]
            return Mark(_TUPLE, items) if self.keeps_types and isinstance(value, tuple) else items
        if isinstance(value, dict):
            return self.rest_of_dict(value, path, plain)
        raise TypeError(
            f"state_dict() of {self.owner!r} holds a {type(value).__name__} at {path!r}. A "
            "checkpoint stores arrays, tensors, numbers, strings, booleans, None, and lists and "
            "dicts of them. Convert it in state_dict() and back in load_state_dict()."
        )

    def rest_of_dict(self, value: dict[Any, Any], path: str, plain: bool) -> Any:
        if self.keeps_types and not all(isinstance(key, str) for key in value):
            pairs = [
                [self.rest_of_key(key, path), self.rest(item, _below(path, key), False)]
                for key, item in value.items()
            ]
            return Mark(_KEYS, pairs)
        rest = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"state_dict() of {self.owner!r} has the key {key!r} at {path or '/'!r}, but "
                    "JSON keys are strings. Convert it with str()."
                )
            left = self.rest(item, _below(path, key), plain and key != "" and "/" not in key)
            if left is not _ABSENT:
                rest[key] = left
        return rest

    def rest_of_key(self, key: Any, path: str) -> Any:
        if isinstance(key, tuple):
            return Mark(_TUPLE, [self.rest_of_key(each, path) for each in key])
        if key is None or isinstance(key, bool | int | float | str):
            return key
        raise TypeError(
            f"state_dict() of {self.owner!r} has the key {key!r} at {path or '/'!r}, a "
            f"{type(key).__name__}. A checkpoint stores keys that are strings, numbers, booleans, "
            "None and tuples of them."
        )

    def take(self, value: Any, path: str) -> None:
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(
                f"state_dict() of {self.owner!r} holds a masked array at {path!r}, whose mask a "
                "checkpoint would lose. Give its .data and its .mask."
            )
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
            return Mark(_SAME, tied_to)
        self.add(array, path)
        return Mark(_TENSOR, array.tensor_dtype)

    def add(self, array: np.ndarray | TensorArray, path: str) -> None:
        check_path(path)
        check_path(f"{self.owner}/{path}")  # which may be too long
        if path in self.arrays:
            raise ValueError(
                f"state_dict() of {self.owner!r} has two arrays with the path {path!r}. Use keys "
                "without '/'."
            )
        self.arrays[path] = array


def _below(path: str, name: object) -> str:
    text = name if isinstance(name, str) else str(name)
    return "/".join((path, text)) if path else text  # the text of a name that is an enum


def has_marks(rest: Any) -> bool:
    """Return whether the JSON part of a state keeps types that JSON has not."""
    return any(True for _ in _marks(rest, ""))


def _marks(value: Any, path: str) -> Iterator[tuple[str, Mark]]:
    """Yield each mark in `value`, with its path."""
    if isinstance(value, Mark):
        yield path, value
    for name, item in _items(value):
        yield from _marks(item, _below(path, name))


def _items(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield what is in a container, with its key as it was."""
    if isinstance(value, dict):
        yield from value.items()
    elif isinstance(value, list):
        yield from enumerate(value)
    elif isinstance(value, Mark) and value.name == _TUPLE:
        yield from enumerate(value.content)
    elif isinstance(value, Mark) and value.name == _KEYS:
        yield from ((_key(key), item) for key, item in value.content)


def _key(value: Any) -> Any:
    """Return the key of a dict of which `rest_of_key` made `value`."""
    if isinstance(value, Mark) and value.name == _TUPLE:
        return tuple(map(_key, value.content))
    if isinstance(value, Mark | list | dict):
        raise ValueError(f"{json.dumps(marked(value))} is no key of a dict")
    return value


def join_state(
    rest: Any, arrays: Mapping[str, Any], blank: dict[str, Any] | None = None
) -> dict[Any, Any]:
    """Return the state that `split_state` was given.

    Where `blank` is given, tensors have no memory, and are put there by path.
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
    """Return by path the tensors that marks name; their arrays are no longer `left`."""
    tensors: dict[str, Any] = {}
    make: Callable[[np.ndarray, str], Any] | None = None
    for path, mark in _marks(rest, ""):
        if mark.name == _TENSOR:
            if path not in left:
                raise ValueError(f"there is no array for the tensor {path!r}")
            if make is None:
                library = tensor_library()
                make = library.blank if are_blank else library.tensor
            tensors[path] = make(left.pop(path), mark.content)
    return tensors


class _Joiner:
    """The walk through the JSON part of a state, which puts its arrays into their places."""

    def __init__(self, arrays: dict[str, np.ndarray], tensors: dict[str, Any]) -> None:
        self._arrays = arrays
        self._tensors = tensors

    def join(self, value: Any, path: str) -> Any:
        if value is None and path in self._arrays:
            return self._arrays.pop(path)
        if isinstance(value, Mark) and value.name in (_TENSOR, _SAME):
            of = path if value.name == _TENSOR else value.content
            if of not in self._tensors:
                raise ValueError(f"{path!r} is tied to {of!r}, which is no tensor")
            return self._tensors[of]
        joined = {key: self.join(item, _below(path, key)) for key, item in _items(value)}
        if isinstance(value, list):
            return list(joined.values())
        if isinstance(value, Mark) and value.name == _TUPLE:
            return tuple(joined.values())
        return joined if isinstance(value, dict | Mark) else value


def plain_state(rest: Any) -> Any:
    """Return the JSON part of a state for people: without tensors, with texts as keys."""
    if isinstance(rest, Mark) and rest.name == _SAME:
        return f"same as {rest.content}"
    items = {str(key): plain_state(item) for key, item in _items(rest) if not _is_tensors(item)}
    if isinstance(rest, list) or (isinstance(rest, Mark) and rest.name == _TUPLE):
        return list(items.values())
    return items if isinstance(rest, dict | Mark) else rest


def _is_tensors(rest: Any) -> bool:
    """Return whether there are tensors in a part of a state, and nothing else."""
    if isinstance(rest, Mark) and rest.name == _TENSOR:
        return True
    items = [item for _, item in _items(rest)]
    return bool(items) and all(map(_is_tensors, items))


def tied_paths(rest: Any) -> dict[str, str]:
    """Return the paths of tied tensors in the JSON part of a state, with those of their values."""
    return {path: mark.content for path, mark in _marks(rest, "") if mark.name == _SAME}


def value_paths(rest: Any, path: str = "") -> Iterator[str]:
    """Yield the paths of what is no tensor in the JSON part of a state."""
    if isinstance(rest, dict | list) or (isinstance(rest, Mark) and rest.name in (_TUPLE, _KEYS)):
        for name, item in _items(rest):
            yield from value_paths(item, _below(path, name))
    elif not isinstance(rest, Mark):
        yield path
