"""Aliasing: which arrays share memory, by where it lies and not by which object it is."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import address_of


def is_plain(array: Any) -> bool:
    """Return whether `array` is a plain `numpy.ndarray` that is sent without a copy."""
    if type(array) is not np.ndarray:
        return False
    flags = array.flags
    return bool(flags.c_contiguous and flags.aligned and array.dtype.isnative)


def in_memory_of(array: Any, target: np.ndarray) -> Any:
    """Return the plain `target` where a plain `array` is the same memory, else `array`.

    MPI takes both as one buffer only if they are one object (MPI 4.1, section 6.1).
    """
    if array is target or type(array) is not np.ndarray or array.dtype != target.dtype:
        return array
    is_same = array.shape == target.shape and address_of(array) == address_of(target)
    return target if is_same and is_plain(array) else array


def are_apart(arrays: Sequence[Any], targets: Sequence[np.ndarray]) -> bool:
    """Return whether each of `targets` shares memory with nothing but its array, and all of it."""
    own = list(map(_span, targets))
    spans = [(*span, True) for span in own]
    for array, span_of_target in zip(arrays, own, strict=True):
        if not isinstance(array, np.ndarray):
            continue  # it is copied to the host
        span = _span(array)
        if span != span_of_target or not is_plain(array):
            spans.append((*span, False))
    return are_disjoint(spans)


def are_disjoint(spans: Iterable[tuple[int, int, bool]]) -> bool:
    """Return whether memory that is written to is apart from all other, read or written to.

    `spans` say of each memory where it begins and ends, and whether it is written to.
    """
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
