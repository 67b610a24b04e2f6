"""Parameters of optimizers and schedules: checked, and spelt for the ranks to compare."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from typing import Any

__all__ = ["at_least_0", "integer", "is_constant", "number", "real", "spelled"]


def real(kind: str, name: str, value: Any) -> float:
    """Return the parameter `name` of a `kind`, which may be infinite or NaN, as a float. Local.

    Parameters
    ----------
    kind : str
        The class, for messages.
    name : str
    value : number, or array or Variable of no axes

    Raises
    ------
    TypeError
        If it is no real number.
    """
    if not _is_scalar(value):
        raise TypeError(
            f"{kind}: {name} must be a number, not {value!r} of type {type(value).__name__}."
        )
    return float(value)


def _is_scalar(value: Any) -> bool:
    if isinstance(value, numbers.Real):
        return True
    is_real = getattr(getattr(value, "dtype", None), "kind", "") in "biuf"
    return is_real and getattr(value, "shape", None) == ()


def number(kind: str, name: str, value: Any) -> float:
    """Return a parameter as a finite float. Local.

    Raises
    ------
    TypeError, ValueError
        As `real`, and for one that is not finite.
    """
    result = real(kind, name, value)
    if not math.isfinite(result):
        raise ValueError(f"{kind}: {name} must be finite, not {result}.")
    return result


def at_least_0(kind: str, name: str, value: Any) -> float:
    """Return a parameter as a finite float that is not negative. Local.

    Raises
    ------
    TypeError, ValueError
        As `number`, and for a negative one.
    """
    result = number(kind, name, value)
    if result < 0:
        raise ValueError(f"{kind}: {name} must be at least 0, not {result}.")
    return result


def integer(kind: str, name: str, value: Any) -> int:
    """Return a parameter as an integer. Local.

    Raises
    ------
    TypeError
        If it is none.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(
            f"{kind}: {name} must be an integer, not {value!r} of type {type(value).__name__}."
        ) from None


def is_constant(value: Any) -> bool:
    """Return whether what a parameter is spelled as cannot change behind its name. Local."""
    return value is None or isinstance(value, bool | int | float) or callable(value)


def spelled(value: Any) -> str:
    """Return a parameter in the words that ranks compare: 1, 1.0 and ``np.float64(1)`` agree.

    Local. Dataclasses, such as schedules, go by their fields, other objects by their type.
    """
    if _is_scalar(value):
        return str(float(value))
    has_words = value is None or isinstance(value, str) or dataclasses.is_dataclass(value)
    return repr(value) if has_words else type(value).__name__
