"""Validators of arguments: integers, numbers, booleans, devices, nests."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, adopted, is_array, is_foreign, is_number
from mpistrat.pytorch import host_array, is_tensor


def as_array(kind: str, leaf: Any) -> Array:
    """Return a leaf of the value passed to the collective `kind` as an array."""
    if type(leaf) is np.ndarray:
        return leaf
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"{kind} does not know masked arrays. Fill it first: array.filled(value).")
    if is_tensor(leaf):
        return host_array(leaf)
    if is_array(leaf):
        array: Array = leaf
        return array
    if hasattr(leaf, "_why_no_array"):
        raise TypeError(leaf._why_no_array(kind))
    if is_foreign(leaf):
        return adopted(kind, leaf)
    if is_number(leaf) or hasattr(leaf, "__array__"):
        return np.asarray(leaf)
    raise TypeError(
        f"{kind} takes arrays, numbers and nests of them, but a leaf of the value is {leaf!r} of "
        f"type {type(leaf).__name__}."
    )


def as_bool(what: str, value: Any) -> bool:
    """Return `value`, which must be a bool: text such as "no" would count as true."""
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"{what} must be True or False, not {value!r} of type {type(value).__name__}."
        )
    return bool(value)


def as_integer(
    what: str, value: Any, minimum: int | None = None, maximum: int | None = None
) -> int:
    """Return `value`, which must be an integer in these bounds and not a bool."""
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(
            f"{what} must be an integer, not {value!r} of type {type(value).__name__}."
        ) from None
    if minimum is not None and number < minimum:
        raise ValueError(f"{what} must be at least {minimum}, not {number}.")
    if maximum is not None and number > maximum:
        raise ValueError(f"{what} must be at most {maximum}, not {number}.")
    return number


def as_real(what: str, value: Any) -> float:
    """Return a number, or a 0-d array or Variable, as a float, which may be NaN."""
    if not _is_real_scalar(value):
        raise TypeError(f"{what} must be a number, not {value!r} of type {type(value).__name__}.")
    return float(value)


def as_finite(what: str, value: Any, minimum: float | None = None) -> float:
    """Return `value` like `as_real`; it must be finite, and not below `minimum`."""
    number = as_real(what, value)
    if not math.isfinite(number):
        raise ValueError(f"{what} must be finite, not {number}.")
    if minimum is not None and number < minimum:
        raise ValueError(f"{what} must be at least {minimum}, not {number}.")
    return number


def _is_real_scalar(value: Any) -> bool:
    """Return whether `value` is a real number, or an array or Variable that holds one."""
    if isinstance(value, numbers.Real):
        return True
    is_real = getattr(getattr(value, "dtype", None), "kind", "") in "biuf"
    return is_real and getattr(value, "shape", None) == ()


def span_outside(indices: Array, num_rows: int) -> tuple[int, int] | None:
    """Return the lowest and the highest of `indices` if one of them is not a row."""
    if not indices.size:
        return None
    low, high = int(indices.min()), int(indices.max())
    return None if 0 <= low <= high < num_rows else (low, high)


def normalize_axes(kind: str, axis: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """Return `axis`, an integer or a tuple of them, as sorted positions in `shape`."""
    given = axis if isinstance(axis, tuple) else (axis,)
    axes = [as_integer(f"{kind}: axis", each) for each in given]
    ndim = len(shape)
    for each in axes:
        if not -ndim <= each < ndim:
            remedy = f"Use an axis in [{-ndim}, {ndim - 1}]." if ndim else "Use axis=None."
            raise ValueError(
                f"{kind}: axis {each} is out of range for the array of shape {tuple(shape)}. "
                + remedy
            )
    positions = sorted(each % ndim for each in axes)
    if len(set(positions)) < len(positions):
        raise ValueError(f"{kind}: the axes {tuple(axes)} name one axis twice.")
    return tuple(positions)


def is_constant(value: Any) -> bool:
    """Return whether `value` is immutable, so that a parameter keeps its signature."""
    return value is None or isinstance(value, bool | int | float) or callable(value)


def format_value(value: Any) -> str:
    """Return the signature of a parameter, the same for 1, 1.0 and ``np.float64(1)``."""
    # Dataclasses, such as schedules, are compared by their fields, other objects by their type.
    if _is_real_scalar(value) and not isinstance(value, bool):
        return str(float(value))
    is_shown = value is None or isinstance(value, str | bool) or dataclasses.is_dataclass(value)
    return repr(value) if is_shown else type(value).__name__
