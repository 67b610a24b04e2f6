"""What callers may give: leaves that become arrays, and axes."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, is_array, is_number
from mpistrat.tensors import host_array, is_tensor

__all__ = ["as_array", "as_index", "normalize_axes"]


def as_array(kind: str, leaf: Any) -> Array:
    """Return a leaf of the value given to the collective `kind` as an array. Local.

    Raises
    ------
    TypeError
        If it is no array, tensor or number.
    """
    if type(leaf) is np.ndarray:
        return leaf
    if isinstance(leaf, np.ma.MaskedArray):
        raise TypeError(f"{kind} does not know masked arrays. Fill it first: array.filled(value).")
    if is_tensor(leaf):
        return host_array(leaf)
    if is_array(leaf):
        return leaf
    if is_number(leaf) or hasattr(leaf, "__array__"):
        return np.asarray(leaf)
    raise TypeError(
        f"{kind} takes arrays, numbers and nests of them, but a leaf of the value is {leaf!r} of "
        f"type {type(leaf).__name__}."
    )


def as_index(kind: str, axis: Any) -> int:
    """Return `axis` as an integer. Local.

    Raises
    ------
    TypeError
        If it is none.
    """
    try:
        if isinstance(axis, bool):
            raise TypeError
        return operator.index(axis)
    except TypeError:
        raise TypeError(
            f"{kind}: axis must be an integer, not {axis!r} of type {type(axis).__name__}."
        ) from None


def normalize_axes(kind: str, axis: Any, shape: Sequence[int]) -> tuple[int, ...]:
    """Return `axis`, an integer or a tuple of them, as sorted positions in `shape`. Local.

    Raises
    ------
    TypeError
        If an axis is no integer.
    ValueError
        If an axis is out of range or occurs twice.
    """
    axes = [as_index(kind, each) for each in (axis if isinstance(axis, tuple) else (axis,))]
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
