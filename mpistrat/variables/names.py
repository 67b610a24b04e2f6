"""Default names of variables, equal on all ranks."""

from __future__ import annotations

import functools
import itertools
import re
import weakref
from typing import Any

from mpistrat.system.units import on_undo

_DEFAULT = re.compile(r"Variable(_\d+)?")
_numbers = itertools.count()
"""For plain variables, which belong to no strategy."""

_given: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
_given_to_plain: set[str] = set()
"""Names that look like default ones and are taken."""


def default_name(strategy: Any) -> str:
    """Return the next name that no variable of `strategy` has."""
    # Variables of a strategy are made by all ranks in the same order, so all find the same.
    numbers = _numbers if strategy is None else strategy.extended._variable_numbers
    first = next(numbers)
    if strategy is not None:
        on_undo(functools.partial(_number_from, strategy.extended, first))
    numbers = itertools.chain([first], numbers)
    names = (f"Variable_{number}" if number else "Variable" for number in numbers)
    return next(name for name in names if name not in _taken(strategy))


def _number_from(extended: Any, first: int) -> None:
    extended._variable_numbers = itertools.count(first)


def note_given_name(strategy: Any, name: str) -> None:
    """Keep `name` from being given by default."""
    taken = _taken(strategy)
    if _DEFAULT.fullmatch(name) and name not in taken:
        taken.add(name)
        on_undo(functools.partial(taken.discard, name))


def _taken(strategy: Any) -> set[str]:
    return _given_to_plain if strategy is None else _given.setdefault(strategy, set())
