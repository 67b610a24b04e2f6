"""Batch normalization arithmetic, given the moments: forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.arrays import Array, namespace_of
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.options import ReduceOp


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
    """Return a value per feature so that it broadcasts with `x`, in the dtype of `x`."""
    shape = [1] * x.ndim
    shape[axis] = -1
    return features.reshape(shape).astype(x.dtype, copy=False)


def _sum_features(x: Array, axis: int) -> Array:
    """Return the sum of each feature in float64, shape ``(num_features,)``."""
    xp: Any = namespace_of(x)
    others = tuple(i for i in range(x.ndim) if i != axis % x.ndim)
    total: Array = xp.sum(x, axis=others, dtype=xp.float64)
    return total


def local_moments(x: Array, axis: int) -> Moments:
    """Return the moments of this replica's `x`, which may be empty."""
    # In two passes: the variance is that of what is left after the mean has been taken away.
    count = x.size // x.shape[axis]
    # An empty part has the count 0, and so adds nothing to the sums of all replicas.
    divisor = max(count, 1)
    mean = _sum_features(x, axis) / divisor
    rounded = mean.astype(x.dtype)
    squares = x - along(rounded, x, axis)
    squares *= squares
    # The squares are those of distances to the rounded mean. Their mean is too large by the square
    # of its distance from the mean.
    variance = _sum_features(squares, axis) / divisor - (mean - rounded) ** 2
    # Rounding may lead below 0, whose square root would be NaN.
    return Moments(mean, namespace_of(x).maximum(variance, 0), float(count))


def pooled_moments(call: CollectiveCall, local: Moments) -> Moments:
    """Return the moments of all replicas' examples together. **Collective**, one message."""
    # The variance is right to about `1e-16 * mean**2`.
    xp = namespace_of(local.mean)
    sums = [local.mean * local.count, (local.variance + local.mean**2) * local.count]
    total, squares, count = call.all_reduce(ReduceOp.SUM, [*sums, xp.asarray(local.count)])
    divisor = max(float(count), 1.0)
    mean = total / divisor
    return Moments(mean, xp.maximum(squares / divisor - mean**2, 0), float(count))


@dataclass(frozen=True)
class Normalization:
    """What the backward pass needs of the forward pass."""

    normalized: Array
    """The examples with mean 0 and variance 1."""
    scale: Array
    """gamma / standard deviation, shape ``(num_features,)``."""
    count: float | None
    """That of the moments."""
    dtype: np.dtype
    """That of the examples."""


def widened(x: Array) -> Array:
    """Return `x` in float32 where its dtype is smaller."""
    return x.astype(np.promote_types(x.dtype, np.float32), copy=False)


def normalize(
    x: Array, moments: Moments, gamma: Array, beta: Array, epsilon: float, axis: int
) -> tuple[Array, Normalization]:
    """Return ``gamma * (x - mean) / sqrt(variance + epsilon) + beta``, and what it leaves."""
    # The mean is taken away in two parts: rounded to the dtype of `x`, a large one would be off by
    # a good part of a standard deviation.
    wide = widened(x)
    inverse = 1 / namespace_of(x).sqrt(moments.variance + epsilon)
    rounded = moments.mean.astype(wide.dtype)
    normalized = wide - along(rounded, wide, axis)
    normalized *= along(inverse, wide, axis)
    normalized -= along((moments.mean - rounded) * inverse, wide, axis)
    y = normalized * along(gamma, wide, axis)
    y += along(beta, wide, axis)
    saved = Normalization(normalized, gamma * inverse, moments.count, x.dtype)
    return y.astype(x.dtype, copy=False), saved


def pull_back(
    saved: Normalization,
    gradient_y: Array,
    pool: Callable[[list[Array]], list[Array]],
    axis: int,
) -> tuple[Array, Array, Array]:
    """Return the gradients of the examples, of gamma and of beta; local where `pool` is."""
    # `pool` turns this replica's sums into those over all examples that the moments come from.
    # Moving averages do not depend on the examples, so they need none.
    gradient_y, normalized = widened(gradient_y), saved.normalized
    gradient_beta = _sum_features(gradient_y, axis)
    gradient_gamma = _sum_features(gradient_y * normalized, axis)
    if saved.count is None:
        gradient_x = gradient_y.astype(normalized.dtype)
    else:
        pooled = pool([gradient_beta, gradient_gamma])
        through_mean, through_variance = (each / max(saved.count, 1) for each in pooled)
        gradient_x = normalized * along(-through_variance, normalized, axis)
        gradient_x += gradient_y
        gradient_x -= along(through_mean, normalized, axis)
    gradient_x *= along(saved.scale, normalized, axis)
    return gradient_x.astype(saved.dtype, copy=False), gradient_gamma, gradient_beta
