"""Giving arrays a dtype that was promised, without losing what they hold."""

from __future__ import annotations

import numpy as np

__all__ = ["fitted"]


def fitted(array: np.ndarray, dtype: np.dtype) -> np.ndarray | None:
    """Return `array` as `dtype`, itself where it has it; ``None`` where it does not fit. Local.

    Floating numbers may be rounded, but not become infinite. Integers fit where their values do,
    whether signed or not, and into floating numbers. Everything else must survive unchanged.
    """
    if array.dtype == dtype:
        return array
    are_integers = array.dtype.kind in "iu" and dtype.kind in "iu"
    if not (are_integers or np.can_cast(array.dtype, dtype, "same_kind")):
        return None
    with np.errstate(over="ignore"):
        cast: np.ndarray = array.astype(dtype)
    return cast if np.can_cast(array.dtype, dtype) or _survives(array, cast) else None


def _survives(array: np.ndarray, cast: np.ndarray) -> bool:
    if cast.dtype.kind in "fc":
        return bool((np.isfinite(cast) == np.isfinite(array)).all())
    if cast.dtype.kind in "iu" and array.size:
        info = np.iinfo(cast.dtype)
        return info.min <= int(array.min()) and int(array.max()) <= info.max
    return bool((cast == array).all())
