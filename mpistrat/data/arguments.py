"""Checks of the arguments of data sets."""

from __future__ import annotations

import operator
from typing import Any

__all__ = ["integer"]


def integer(name: str, value: Any, minimum: int) -> int:
    """Return `value` as an integer. Local.

    Raises
    ------
    TypeError
        If it is none; bools are none.
    ValueError
        If it is less than `minimum`.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{name} must be an integer, not {value!r} of type {type(value).__name__}."
        ) from None
    if number < minimum:
        raise ValueError(f"{name} must be at least {minimum}, not {number}.")
    return number
