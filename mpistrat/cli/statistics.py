"""Statistics of the values of one variable."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["largest_difference", "summarize"]


def summarize(array: np.ndarray) -> dict[str, Any]:
    """Return ``min``, ``max``, ``mean`` and ``nan_count``. Local.

    NaN is left out of the first three, which are ``None`` where nothing is left, and for
    complex numbers, which have no order.
    """
    kind = array.dtype.kind
    is_nan = np.isnan(array) if kind in "fc" else np.zeros(array.shape, bool)
    values = array[~is_nan]
    summary: dict[str, Any] = {"min": None, "max": None, "mean": None}
    if values.size and kind != "c":
        number = float if kind == "f" else int
        with np.errstate(invalid="ignore", over="ignore"):
            mean = float(values.mean(dtype=np.float64))
        summary = {"min": number(values.min()), "max": number(values.max()), "mean": mean}
    return summary | {"nan_count": int(is_nan.sum())}


def largest_difference(a: np.ndarray, b: np.ndarray) -> tuple[float | int, int]:
    """Return the largest absolute difference, and the number of elements that differ. Local.

    NaN equals NaN; NaN against a number differs by NaN. Shapes and dtypes are equal.
    """
    if a.size == 0:
        return 0, 0
    if a.dtype.kind in "biu":
        # Subtraction modulo 2**64 is exact for every integer dtype, since the result fits.
        gap = np.maximum(a, b).astype(np.uint64) - np.minimum(a, b).astype(np.uint64)
        return int(gap.max()), int(np.count_nonzero(gap))
    wide = np.result_type(a.dtype, np.float64)
    differs = (a != b) & ~(np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore", over="ignore"):
        gap = np.abs(a[differs].astype(wide) - b[differs].astype(wide))
    return float(gap.max(initial=0.0)), int(np.count_nonzero(differs))
