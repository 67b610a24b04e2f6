"""Types of states that JSON lacks: named tuples, enums, ordered dicts, counters, NumPy's scalars.

A class is stored by its name, and found again among the modules that the program has imported: a
file makes no program import anything.
"""

from __future__ import annotations

import collections
import enum
import sys
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np

from mpistrat.checkpoint.json_marks import CLASS, NUMPY, Mark

_DICTS = (collections.OrderedDict, collections.Counter)


def exact_mark(value: Any, where: str, rest: Callable[[Any], Any]) -> Mark | None:
    """Return the mark of a value whose type JSON would lose, ``None`` where it would not.

    Parameters
    ----------
    value : object
        Anything but a NumPy scalar that is stored as an array.
    where : str
        The beginning of an error: whose value it is, and at which path.
    rest : callable
        Gives the form in JSON of what the value is made of: a list, dict, number or string.

    Raises
    ------
    TypeError
        For a subclass of a type of JSON that cannot be made again from a file.
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
    if _find(name) is not kind:
        raise TypeError(
            f"{where}, but no class is found as {kind.__module__}.{kind.__qualname__}. Define it "
            "at module level, under its own name, or convert the value in state_dict()."
        )
    return name


def _find(name: str) -> Any:
    """Return what has the name in the modules of the program, or ``None``."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for attribute in path.split("."):
        found = getattr(found, attribute, None)
    return found


def instance_of_mark(content: dict[str, Any], items: Any) -> Any:
    """Return the instance of the class that a mark names, made of `items`.

    Where the program does not have the class, return the nearest type, with a warning. What is
    damaged raises `ValueError`.
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
    """Return the NumPy scalar that a mark stands for."""
    name, value = content
    return np.float64(value) if name == "float64" else np.str_(value)
