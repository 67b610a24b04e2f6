"""State dicts as JSON text and arrays: split for a file, and joined again.

Arrays leave the JSON, which keeps a ``null`` in their place only where the path alone could
not tell the place: inside lists, and under keys that contain ``/``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from mpistrat.arrays import host_copy, is_array
from mpistrat.checkpoint.format import check_path, is_storable

__all__ = ["dump_json", "join_state", "load_json", "split_state"]

_FLOAT = "$float"
_DICT = "$dict"
_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dump_json(value: Any) -> str:
    """Return `value` as JSON text that any parser reads."""
    return json.dumps(_marked(value), allow_nan=False)


def load_json(text: bytes) -> Any:
    """Return the value that `dump_json` was given; ValueError for other texts."""
    return _unmarked(json.loads(text))


def _marked(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {_FLOAT: str(float(value))}
    if isinstance(value, list):
        return [_marked(item) for item in value]
    if isinstance(value, dict):
        marked = {key: _marked(item) for key, item in value.items()}
        return {_DICT: marked} if _is_mark(value) else marked
    return value


def _unmarked(value: Any) -> Any:
    if isinstance(value, list):
        return [_unmarked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not _is_mark(value):
        return {key: _unmarked(item) for key, item in value.items()}
    ((mark, content),) = value.items()
    if mark == _DICT and isinstance(content, dict):
        return {key: _unmarked(item) for key, item in content.items()}
    if mark == _FLOAT and content in _NUMBERS:
        return _NUMBERS[content]
    raise ValueError(f"{json.dumps(value)} is no number and no dict")


def _is_mark(value: dict[str, Any]) -> bool:
    return len(value) == 1 and next(iter(value)) in (_FLOAT, _DICT)


_ABSENT = object()


def split_state(state: object, owner: str) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the JSON part of `state`, and its arrays by path below the owner."""
    if not isinstance(state, dict):
        raise TypeError(
            f"state_dict() of {owner!r} must return a dict, not {type(state).__name__}."
        )
    splitter = _Splitter(owner)
    rest = splitter.rest_of_dict(state, "", plain=True)
    for path, place in _nulls(rest, ""):
        if path in splitter.arrays and _at(state, place) is None:
            raise ValueError(
                f"state_dict() of {owner!r} has two entries with the path {path!r}. Use keys "
                "without '/'."
            )
    return rest, splitter.arrays


class _Splitter:
    """The walk through one state, which collects its arrays."""

    def __init__(self, owner: str) -> None:
        self.owner = owner
        self.arrays: dict[str, np.ndarray] = {}

    def rest(self, value: Any, path: str, plain: bool) -> Any:
        """Return `value` without its arrays.

        `plain` says that all containers above are dicts whose keys have no ``/``.
        """
        if value is None or isinstance(value, bool | int | float | str):
            return value
        if is_array(value):
            self.take(value, path)
            return _ABSENT if plain else None
        if isinstance(value, list | tuple):
            return [self.rest(item, _below(path, str(i)), False) for i, item in enumerate(value)]
        if isinstance(value, dict):
            return self.rest_of_dict(value, path, plain)
        raise TypeError(
            f"state_dict() of {self.owner!r} holds a {type(value).__name__} at {path!r}. A "
            "checkpoint stores arrays, numbers, strings, booleans, None, and lists and dicts of "
            "them."
        )

    def rest_of_dict(self, value: dict[Any, Any], path: str, plain: bool) -> dict[str, Any]:
        rest = {}
        for key, item in value.items():
            if not isinstance(key, str):
                raise TypeError(
                    f"state_dict() of {self.owner!r} has the key {key!r} at {path or '/'!r}, but "
                    "JSON keys are strings. Convert it with str()."
                )
            left = self.rest(item, _below(path, key), plain and "/" not in key)
            if left is not _ABSENT:
                rest[key] = left
        return rest

    def take(self, value: Any, path: str) -> None:
        check_path(path)
        if path in self.arrays:
            raise ValueError(
                f"state_dict() of {self.owner!r} has two arrays with the path {path!r}. Use keys "
                "without '/'."
            )
        array = host_copy(value)
        if not is_storable(array.dtype):
            raise TypeError(
                f"state_dict() of {self.owner!r} holds an array of dtype {array.dtype} at "
                f"{path!r}. A checkpoint stores numbers and booleans."
            )
        self.arrays[path] = array


def _below(path: str, name: str) -> str:
    return f"{path}/{name}" if path else name


def _nulls(value: Any, path: str) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """Yield the path and the keys of each None in `value`."""
    stack: list[tuple[Any, str, tuple[Any, ...]]] = [(value, path, ())]
    while stack:
        value, path, place = stack.pop()
        if value is None:
            yield path, place
        elif isinstance(value, dict):
            stack += [(item, _below(path, k), (*place, k)) for k, item in value.items()]
        elif isinstance(value, list):
            stack += [(item, _below(path, str(i)), (*place, i)) for i, item in enumerate(value)]


def _at(value: Any, place: tuple[Any, ...]) -> Any:
    for key in place:
        value = value[key]
    return value


def join_state(rest: dict[str, Any], arrays: dict[str, np.ndarray]) -> dict[str, Any]:
    """Return the state that `split_state` was given; `rest` is filled in place."""
    left = dict(arrays)
    for path, place in list(_nulls(rest, "")):
        if path in left:
            _at(rest, place[:-1])[place[-1]] = left.pop(path)
    for path, array in left.items():
        *parents, name = path.split("/")
        container = rest
        for parent in parents:
            container = container.setdefault(parent, {})
            if not isinstance(container, dict):
                raise ValueError(f"the array {path!r} lies below {parent!r}, which is no dict")
        if name in container:
            raise ValueError(f"{path!r} is both an array and a JSON value")
        container[name] = array
    return rest
