"""Strict JSON for numbers that JSON does not have: NaN and the infinities.

They are stored as ``{"$float": "nan"}``, ``"inf"`` or ``"-inf"``. A dict of the user's that looks
like one of these marks is stored as ``{"$dict": ...}``.
"""

from __future__ import annotations

import json
import math
from typing import Any

__all__ = ["dump_json", "load_json"]

_FLOAT = "$float"
_DICT = "$dict"
_NUMBERS = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def dump_json(value: Any) -> str:
    """Return `value` as JSON text that any parser reads. Local."""
    return json.dumps(_marked(value), allow_nan=False)


def load_json(text: bytes) -> Any:
    """Return the value that `dump_json` was given. Local.

    Raises
    ------
    ValueError
        If `text` is no JSON, or holds an unknown mark.
    """
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
