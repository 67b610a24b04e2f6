"""JSON text of the states of objects, with marks for the values that JSON has no form for.

In the text a mark is a dict of one key that begins with ``$``.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from typing import Any

from mpistrat.checkpoint.format import FORMAT_VERSION, OLD_VERSION

FLOAT = "$float"
DICT = "$dict"
KEYS = "$keys"
SAME = "$same"
TENSOR = "$tensor"
TUPLE = "$tuple"
SCALAR = "$scalar"
NUMPY = "$numpy"
CLASS = "$class"
_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MARKS = {
    OLD_VERSION: {FLOAT, DICT},
    FORMAT_VERSION: {FLOAT, DICT, KEYS, SAME, TENSOR, TUPLE, SCALAR, NUMPY, CLASS},
}
"""By version of the format."""


@dataclass(frozen=True)
class Mark:
    """A value that JSON has no form for."""

    name: str
    content: Any
    """Of ``$tuple`` the items, of ``$keys`` the pairs of keys and values of a dict, of ``$tensor``
    the dtype, of ``$same`` the path of the tensor that it is tied to, of ``$scalar`` the dtype of a
    NumPy scalar that is stored as an array, of ``$numpy`` the name of the type of another one and
    its value, of ``$class`` a dict with the name of a class and what an instance is made of."""


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
        return {FLOAT: str(float(value))}
    if isinstance(value, list):
        return [marked(item) for item in value]
    if isinstance(value, dict):
        items = {key: marked(item) for key, item in value.items()}
        # A dict of the user that looks like a mark must come back as a dict.
        return {DICT: items} if _is_mark(value, FORMAT_VERSION) else items
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
    if mark == DICT and isinstance(content, dict):
        return {key: unmarked(item, version) for key, item in content.items()}
    if mark == FLOAT and content in _NUMBERS:
        return _NUMBERS[content]
    if mark in (SAME, TENSOR, SCALAR) and isinstance(content, str):
        return Mark(mark, content)
    if mark == TUPLE and isinstance(content, list):
        return Mark(mark, unmarked(content, version))
    if mark == NUMPY and _is_pair(content) and content[0] in ("float64", "str"):
        return Mark(mark, unmarked(content, version))
    if mark == CLASS and isinstance(content, dict) and {"class", "items"} <= content.keys():
        return Mark(mark, unmarked(content, version))
    if mark == KEYS and isinstance(content, list) and all(map(_is_pair, content)):
        return Mark(mark, unmarked(content, version))
    raise ValueError(f"{json.dumps(value)} is neither a number nor a dict")


def _is_mark(value: dict[str, Any], version: int) -> bool:
    # In files of the old version the later marks are keys like any other.
    return len(value) == 1 and next(iter(value)) in _MARKS[version]


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2
