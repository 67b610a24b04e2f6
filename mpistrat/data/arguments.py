"""Checks of the arguments of data sets."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np

__all__ = ["boolean", "integer"]


def boolean(name: str, value: Any) -> bool:
    """Return `value`, which must be a bool. Local.

    Raises
    ------
    TypeError
        If it is none: text such as "no" would count as true.
    """
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"{name} must be True or False, not {value!r} of type {type(value).__name__}."
        )
    return bool(value)


def integer(name: str, value: Any, minimum: int, maximum: int | None = None) -> int:
    """Return `value` as an integer. Local.

    Raises
    ------
    TypeError
        If it is none; bools are none.
    ValueError
        If it is less than `minimum` or more than `maximum`.
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
    if maximum is not None and number > maximum:
        raise ValueError(f"{name} must be at most {maximum}, not {number}.")
    return number
