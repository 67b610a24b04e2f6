"""Default names of variables, equal on all ranks."""

from __future__ import annotations

import functools
import re
import weakref
from typing import Any

from mpistrat.system import units

_DEFAULT = re.compile(r"Variable(_\d+)?")


class _Names:
    """The names that look like default ones and are taken, of one strategy."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._next = 0
        """The number of the next default name, if that is free."""

    def next_default(self) -> str:
        """Return the next default name that is free, which is taken then."""
        while True:
            name = f"Variable_{self._next}" if self._next else "Variable"
            self._next += 1
            if name not in self._taken:
                self.take(name)
                return name

    def take(self, name: str) -> None:
        """Have no variable get `name` by default."""
        if _DEFAULT.fullmatch(name) and name not in self._taken:
            self._taken.add(name)
            units.on_undo(functools.partial(self._give_back, name))

    def _give_back(self, name: str) -> None:
        self._taken.discard(name)
        self._next = 0  # the first that is free is that of all ranks, however far each has come


_of_strategies: weakref.WeakKeyDictionary[Any, _Names] = weakref.WeakKeyDictionary()
_of_plain = _Names()
"""For plain variables, which belong to no strategy."""


def names_of(strategy: Any) -> _Names:
    """Return the names of the variables of `strategy`, of plain ones for ``None``."""
    # Variables of a strategy are made by all ranks in the same order, so all find the same.
    return _of_plain if strategy is None else _of_strategies.setdefault(strategy, _Names())
