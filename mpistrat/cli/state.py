"""State of checkpoints (JSON values) as text: shortened, and the paths at which two differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain, zip_longest
from typing import Any

__all__ = ["differing_paths", "in_short"]

_SHORT = 200
"""Characters that are shown as they are."""
_FEW = 3
"""Items of a long dict or list that are shown each, in place of the first and the last."""

_NOUNS = {dict: "dicts", list: "lists", str: "texts", bool: "booleans"} | dict.fromkeys(
    (int, float), "numbers"
)


def in_short(value: Any) -> str:
    """Return a JSON value as text; of long lists, dicts and texts the size, the first and last."""
    whole = json.dumps(value)
    if len(whole) <= _SHORT:
        return whole
    if isinstance(value, list):
        return _ends("list", value, [in_short(each) for each in _first_and_last(value)])
    if isinstance(value, dict):
        items = list(value.items())
        if len(items) <= _FEW:
            return "{" + ", ".join(map(_pair, items)) + "}"
        return _ends("dict", list(value.values()), list(map(_pair, _first_and_last(items))))
    if isinstance(value, str):
        half = _SHORT // 4
        return f"text of {len(value)} characters: {json.dumps(f'{value[:half]}...{value[-half:]}')}"
    return whole


def _first_and_last(items: list[Any]) -> list[Any]:
    return items if len(items) <= _FEW else [items[0], items[-1]]


def _pair(item: tuple[str, Any]) -> str:
    return f"{json.dumps(item[0])}: {in_short(item[1])}"


def _ends(kind: str, values: list[Any], shown: list[str]) -> str:
    nouns = {_NOUNS.get(type(value), "nulls") for value in values}
    noun = nouns.pop() if len(nouns) == 1 else "items"
    between = ", ..., " if len(values) > len(shown) else ", "
    return f"{kind} of {len(values)} {noun}: {between.join(shown)}"


_MISSING = object()


def differing_paths(path: str, a: Any, b: Any) -> Iterator[tuple[str, str]]:
    """Yield each path inside of two JSON values at which they differ, such as ``rows[3]/loss``."""
    if a is _MISSING or b is _MISSING:
        yield path, f"only in {'b' if a is _MISSING else 'a'}"
    elif isinstance(a, dict) and isinstance(b, dict):
        for key in dict.fromkeys(chain(a, b)):
            yield from differing_paths(f"{path}/{key}", a.get(key, _MISSING), b.get(key, _MISSING))
    elif isinstance(a, list) and isinstance(b, list):
        for number, (of_a, of_b) in enumerate(zip_longest(a, b, fillvalue=_MISSING)):
            yield from differing_paths(f"{path}[{number}]", of_a, of_b)
    elif a != b and (a == a or b == b):  # NaN is NaN here
        yield path, f"{in_short(a)} in a, {in_short(b)} in b"
