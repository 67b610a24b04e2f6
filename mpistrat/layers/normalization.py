"""The arithmetic of batch normalization, given the moments: forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from mpistrat.arrays import Array, namespace_of
from mpistrat.layers.moments import Moments, along, sum_features

__all__ = ["Normalization", "normalize", "pull_back", "widened"]


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
    """Return `x` in float32 where its dtype is smaller. Local."""
    return x.astype(np.promote_types(x.dtype, np.float32), copy=False)


def normalize(
    x: Array, moments: Moments, gamma: Array, beta: Array, epsilon: float, axis: int
) -> tuple[Array, Normalization]:
    """Return ``gamma * (x - mean) / sqrt(variance + epsilon) + beta``, and what it leaves. Local.

    The mean is taken away in two parts: rounded to the dtype of `x`, a large one would be off by
    a good part of a standard deviation.
    """
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
    """Return the gradients of the examples, of gamma and of beta. Local where `pool` is.

    Parameters
    ----------
    saved : Normalization
    gradient_y : array
        Of the shape of the examples.
    pool : callable
        From this replica's sums to those over all examples that the moments come from. Not
        called for moving averages, which do not depend on the examples.
    axis : int
        Of the features.
    """
    gradient_y, normalized = widened(gradient_y), saved.normalized
    gradient_beta = sum_features(gradient_y, axis)
    gradient_gamma = sum_features(gradient_y * normalized, axis)
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
