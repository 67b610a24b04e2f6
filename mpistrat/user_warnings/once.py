"""Warnings that are given once per place in the user's program."""

from __future__ import annotations

import sys
import warnings
from types import CodeType

from mpistrat.errors import ScopeWarning
from mpistrat.system.callsite import call_site, users_place, users_stacklevel

_given: set[tuple[str, CodeType | None, int]] = set()
"""The messages that were given, each with the user's instruction that it is about."""


def warn_once(message: str, category: type[ScopeWarning] = ScopeWarning, key: str = "") -> None:
    """Warn at the user's line that called this package, the first time that it gets there.

    Messages that differ from time to time are one if they have the same `key`.
    """
    # Not left to the filters of `warnings`: under "always" a training loop would warn at each step.
    place = users_place(sys._getframe(1))
    given = (key or message, *(place or (None, 0)))
    if given in _given:
        return
    # The line stands in the text too, as the filename of a warning may be a file of this package
    # where the program's line is on another thread.
    warnings.warn(f"{call_site()}: {message}", category, stacklevel=users_stacklevel())
    _given.add(given)  # not where the warning has become an error
