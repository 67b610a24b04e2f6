"""Marks: values of a state that JSON has no form for, and how they stand in the text.

A mark is a dict of one key that begins with ``$``: tensors, and the types that JSON lacks, such as
named tuples, enums, ordered dicts, counters and NumPy's scalars. The file stores a class by its
name. A restore looks the name up among the modules that the program has imported: a file makes no
program import anything.
"""

from __future__ import annotations

import base64
import collections
import enum
import json
import math
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

FLOAT = "$float"
DICT = "$dict"
KEYS = "$keys"
SAME = "$same"
TENSOR = "$tensor"
TUPLE = "$tuple"
SCALAR = "$scalar"
NUMPY = "$numpy"
ARRAY = "$array"
CLASS = "$class"
_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_MARKS = {FLOAT, DICT, KEYS, SAME, TENSOR, TUPLE, SCALAR, NUMPY, ARRAY, CLASS}


@dataclass(frozen=True)
class Mark:
    """A value that JSON has no form for."""

    name: str
    content: Any
    """The content of the mark.

    For ``$tuple`` the items, for ``$keys`` the pairs of keys and values of a dict,
    for ``$tensor`` the dtype, for ``$same`` the path of the tensor that it is tied to, for
    ``$scalar`` the dtype of a NumPy scalar that is stored as an array, for ``$numpy`` the type name
    and the value of any other NumPy scalar, for ``$array`` a dict of a whole NumPy array or scalar,
    for ``$class`` a dict with the name of a class and the parts of an instance.
    """


def dump_json(value: Any) -> str:
    """Return `value` as JSON text that any parser reads."""
    return json.dumps(marked(value), allow_nan=False)


def load_json(text: bytes) -> Any:
    """Return the value from which `dump_json` made `text`; ValueError for other strings."""
    return unmarked(json.loads(text))


def marked(value: Any) -> Any:
    """Return `value` as JSON values, with marks for values that JSON lacks."""
    if isinstance(value, Mark):
        return {value.name: marked(value.content)}
    if isinstance(value, float) and not math.isfinite(value):
        return {FLOAT: str(float(value))}
    if isinstance(value, list):
        return [marked(item) for item in value]
    if isinstance(value, dict):
        items = {key: marked(item) for key, item in value.items()}
        # A dict of the user that looks like a mark must be restored as a dict.
        return {DICT: items} if _is_mark(value) else items
    return value


def unmarked(value: Any) -> Any:
    """Return the value from which `marked` made `value`."""
    if isinstance(value, list):
        return [unmarked(item) for item in value]
    if not isinstance(value, dict):
        return value
    if not _is_mark(value):
        return {key: unmarked(item) for key, item in value.items()}
    ((mark, content),) = value.items()
    if mark == DICT and isinstance(content, dict):
        return {key: unmarked(item) for key, item in content.items()}
    if mark == FLOAT and content in _NUMBERS:
        return _NUMBERS[content]
    if mark in (SAME, TENSOR, SCALAR) and isinstance(content, str):
        return Mark(mark, content)
    if mark == TUPLE and isinstance(content, list):
        return Mark(mark, unmarked(content))
    if mark == NUMPY and _is_pair(content) and content[0] in ("float64", "str"):
        return Mark(mark, unmarked(content))
    if mark == CLASS and isinstance(content, dict) and {"class", "items"} <= content.keys():
        return Mark(mark, unmarked(content))
    if mark == ARRAY and isinstance(content, dict) and content.keys() == _KEYS_OF_ARRAY:
        return Mark(mark, content)
    if mark == KEYS and isinstance(content, list) and all(map(_is_pair, content)):
        return Mark(mark, unmarked(content))
    raise ValueError(f"{json.dumps(value)} is neither a number nor a dict")


def _is_mark(value: dict[str, Any]) -> bool:
    return len(value) == 1 and next(iter(value)) in _MARKS


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2


_DICTS = (collections.OrderedDict, collections.Counter)


def exact_mark(value: Any, where: str, rest: Callable[[Any], Any]) -> Mark | None:
    """Return the mark of a value whose type JSON would lose, ``None`` if JSON keeps the type.

    Parameters
    ----------
    value : object
        Any value except a NumPy scalar that is stored as an array.
    where : str
        The beginning of an error: whose value it is, and at which path.
    rest : callable
        Returns the JSON form of the value's content: a list, dict, number or string.

    Raises
    ------
    TypeError
        For a subclass of a type of JSON that cannot be created again from a file.
    """
    kind = type(value)
    if kind in (bool, int, float, str, list, tuple, dict):
        return None
    if kind is np.float64:
        return Mark(NUMPY, ["float64", float(value)])
    if kind is np.str_:
        return Mark(NUMPY, ["str", str(value)])
    if isinstance(value, bool | int | float | str) and isinstance(value, enum.Enum):
        return Mark(CLASS, {"class": _name_of(kind, where), "items": rest(value.value)})
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        fields = list(kind._fields)
        name = _name_of(kind, where)
        return Mark(CLASS, {"class": name, "fields": fields, "items": rest(tuple(value))})
    if kind in _DICTS:
        return Mark(CLASS, {"class": f"collections:{kind.__name__}", "items": rest(dict(value))})
    for base in (bool, int, float, str, list, tuple, dict):
        if isinstance(value, base):
            raise TypeError(
                f"{where}, a subclass of {base.__name__}, which a checkpoint would lose. Convert "
                f"it with {base.__name__}() in state_dict(), and back in load_state_dict()."
            )
    return None


def _name_of(kind: type, where: str) -> str:
    name = f"{kind.__module__}:{kind.__qualname__}"
    # A restore looks the class up by this name, so the name must find the class now.
    if _find(name) is not kind:
        raise TypeError(
            f"{where}, but no class is found as {kind.__module__}.{kind.__qualname__}. Define it "
            "at module level, under its own name, or convert the value in state_dict()."
        )
    return name


def _find(name: str) -> Any:
    """Return the object of this name in the modules of the program, or ``None``."""
    module, _, path = name.partition(":")
    # Never imported: a file must not decide which code runs.
    found: Any = sys.modules.get(module)
    for attribute in path.split("."):
        found = getattr(found, attribute, None)
    return found


def instance_of_mark(content: dict[str, Any], items: Any) -> Any:
    """Return an instance, made of `items`, of the class that a mark names.

    If the program does not have the class, return the nearest type, with a warning. Damaged content
    raises `ValueError`.
    """
    name, fields = content["class"], content.get("fields")
    found = _find(name) if isinstance(name, str) else None
    if found in _DICTS and isinstance(items, dict):
        return found(items)
    kind: Any = found if isinstance(found, type) else type(None)
    if isinstance(fields, list) and isinstance(items, tuple):
        if issubclass(kind, tuple) and list(getattr(kind, "_fields", ())) == fields:
            return kind._make(items)
        _warn(name, "a named tuple with the same fields")
        short = name.rpartition(":")[2].rpartition(".")[2]
        return collections.namedtuple(short, fields)(*items)
    if isinstance(items, bool | int | float | str):
        if issubclass(kind, enum.Enum) and items in {each.value for each in kind}:
            return kind(items)
        _warn(name, f"its value, {items!r}")
        return items
    raise ValueError(f"{name!r} is no class that a checkpoint stores")


def _warn(name: str, what: str) -> None:
    warnings.warn(
        f"The checkpoint has a value of the class {name.replace(':', '.')}, which this program has "
        f"not imported, or has with different fields or values. It is restored as {what}. Import "
        "the class first to get it back.",
        UserWarning,
        stacklevel=2,
    )


def value_of_numpy_mark(content: list[Any]) -> Any:
    """Return the NumPy scalar that a mark represents."""
    name, value = content
    return np.float64(value) if name == "float64" else np.str_(value)


_KEYS_OF_ARRAY = {"dtype", "shape", "bytes", "is_scalar"}


def mark_of_array(value: np.ndarray | np.generic) -> Mark:
    """Return the mark that holds a whole NumPy array or scalar, its bytes in base 64."""
    array = np.asarray(value)
    little = array.astype(array.dtype.newbyteorder("<"), order="C", copy=False)
    content = {
        "dtype": little.dtype.str,
        "shape": list(array.shape),
        "bytes": base64.b64encode(little.tobytes()).decode(),
        "is_scalar": isinstance(value, np.generic),
    }
    return Mark(ARRAY, content)


def array_of_mark(content: dict[str, Any]) -> Any:
    """Return the NumPy array or scalar that `mark_of_array` has stored; ValueError if damaged."""
    try:
        dtype = np.dtype(content["dtype"])
        if dtype.kind not in "biufcU":
            raise ValueError(f"an array of dtype {dtype}")
        values = np.frombuffer(base64.b64decode(content["bytes"], validate=True), dtype)
        array = values.reshape(content["shape"]).astype(dtype.newbyteorder("="))
    except (TypeError, ValueError) as reason:
        raise ValueError(f"an array in the state cannot be read: {reason}") from None
    return array[()] if content["is_scalar"] else array
