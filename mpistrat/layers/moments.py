"""Mean and variance of each feature, of one replica's examples and of all replicas' together.

Whatever has one element per feature is float64, so that float32 examples with a large mean keep
their variance. What is as large as the examples stays in their dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mpistrat.arrays import Array, namespace_of
from mpistrat.collectives import CollectiveCall
from mpistrat.options import ReduceOp

__all__ = ["Moments", "along", "local_moments", "pooled_moments", "sum_features"]


@dataclass(frozen=True)
class Moments:
    """Mean and (biased) variance of each feature; both 0 where there is no example."""

    mean: Array
    """Shape ``(num_features,)``, float64."""
    variance: Array
    """Shape ``(num_features,)``, float64."""
    count: float | None = None
    """Number of elements of each feature that they come from; ``None`` for moving averages."""


def along(features: Array, x: Array, axis: int) -> Array:
    """Return a value per feature so that it broadcasts with `x`, in the dtype of `x`. Local."""
    shape = [1] * x.ndim
    shape[axis] = -1
    return features.reshape(shape).astype(x.dtype, copy=False)


def sum_features(x: Array, axis: int) -> Array:
    """Return the sum of each feature in float64, shape ``(num_features,)``. Local."""
    xp: Any = namespace_of(x)
    others = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    return xp.sum(x, axis=others, dtype=xp.float64)


def local_moments(x: Array, axis: int) -> Moments:
    """Return the moments of this replica's `x`, which may be empty. Local.

    In two passes: the variance is that of what is left after the mean has been taken away.
    """
    count = x.size // x.shape[axis]
    divisor = max(count, 1)
    mean = sum_features(x, axis) / divisor
    rounded = mean.astype(x.dtype)
    squares = x - along(rounded, x, axis)
    squares *= squares
    variance = sum_features(squares, axis) / divisor - (mean - rounded) ** 2
    return Moments(mean, namespace_of(x).maximum(variance, 0), float(count))


def pooled_moments(call: CollectiveCall, local: Moments) -> Moments:
    """Return the moments of all replicas' examples together. **Collective**, one message.

    The variance is right to about ``1e-16 * mean**2``.
    """
    xp = namespace_of(local.mean)
    sums = [local.mean * local.count, (local.variance + local.mean**2) * local.count]
    total, squares, count = call.all_reduce(ReduceOp.SUM, [*sums, xp.asarray(local.count)])
    divisor = max(float(count), 1.0)
    mean = total / divisor
    return Moments(mean, xp.maximum(squares / divisor - mean**2, 0), float(count))
