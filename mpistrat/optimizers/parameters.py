"""Parameters of optimizers and schedules, spelt for the ranks to compare."""

from __future__ import annotations

import dataclasses
from typing import Any

from mpistrat.arguments import is_real_scalar

__all__ = ["is_constant", "spelled"]


def is_constant(value: Any) -> bool:
    """Return whether what a parameter is spelled as cannot change behind its name. Local."""
    return value is None or isinstance(value, bool | int | float) or callable(value)


def spelled(value: Any) -> str:
    """Return a parameter in the words that ranks compare: 1, 1.0 and ``np.float64(1)`` agree.

    Local. Dataclasses, such as schedules, go by their fields, other objects by their type.
    """
    if is_real_scalar(value):
        return str(float(value))
    has_words = value is None or isinstance(value, str) or dataclasses.is_dataclass(value)
    return repr(value) if has_words else type(value).__name__
