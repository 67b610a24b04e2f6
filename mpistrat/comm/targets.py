"""Memory of the caller for results: whether a reduction may write there while it reads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, address_of

__all__ = ["can_reduce_into", "can_repeat_into"]


def can_reduce_into(arrays: Sequence[Array], targets: Sequence[Any]) -> bool:
    """Return whether `arrays` may be reduced to `targets` of fitting shapes and dtypes."""
    return all(map(_is_plain, targets)) and _are_apart(arrays, targets)


def can_repeat_into(array: np.ndarray, target: object) -> bool:
    """Return whether a plain `array` may be reduced to `target`, whose fit is not known yet."""
    if target is array:
        return bool(array.flags.writeable)
    return (
        type(target) is np.ndarray
        and _is_plain(target)
        and target.shape == array.shape
        and target.dtype == array.dtype
        and target.flags.writeable
        and _are_apart([array], [target])
    )


def _is_plain(array: Any) -> bool:
    if type(array) is not np.ndarray:
        return False
    flags = array.flags
    return bool(flags.c_contiguous and flags.aligned and array.dtype.isnative)


def _are_apart(arrays: Sequence[Any], targets: Sequence[np.ndarray]) -> bool:
    """Return whether each of `targets` shares memory with nothing but its array, and all of it."""
    own = list(map(_span, targets))
    spans = [(*span, True) for span in own]
    for array, span_of_target in zip(arrays, own, strict=True):
        if not isinstance(array, np.ndarray):
            continue  # it is copied to the host
        span = _span(array)
        if span != span_of_target or not _is_plain(array):
            spans.append((*span, False))
    end_of_targets = end_of_all = 0
    for begin, end, is_target in sorted(spans):
        # Two arrays that are only read may overlap.
        if begin < (end_of_all if is_target else end_of_targets) and begin < end:
            return False
        end_of_all = max(end_of_all, end)
        if is_target:
            end_of_targets = max(end_of_targets, end)
    return True


def _span(array: np.ndarray) -> tuple[int, int]:
    """Return where the memory of `array` begins and ends, or a span around it."""
    begin: int = address_of(array)
    reach = [
        stride * (n - 1) for stride, n in zip(array.strides, array.shape, strict=True) if array.size
    ]
    low, high = (sum(each for each in reach if (each < 0) is sign) for sign in (True, False))
    return begin + low, begin + high + (array.itemsize if array.size else 0)
