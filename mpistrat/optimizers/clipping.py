"""Clipping by the global norm, and the check that all gradients are finite."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from mpistrat.arrays import is_on_host
from mpistrat.optimizers.device_pass import device_sum_of_squares
from mpistrat.optimizers.host_pass import host_sum_of_squares
from mpistrat.values import IndexedSlices

__all__ = ["gradient_factor"]


def _global_norm(gradients: Sequence[Any]) -> float:
    """Return the Euclidean norm of all elements together, not finite if one is not. Local.

    Parameters
    ----------
    gradients : sequence of arrays and IndexedSlices
        `IndexedSlices` coalesced, so that no row counts as two.
    """
    total = 0.0
    for gradient in gradients:
        array = gradient.values if isinstance(gradient, IndexedSlices) else gradient
        sum_of_squares = host_sum_of_squares if is_on_host(array) else device_sum_of_squares
        total += sum_of_squares(array)
    return math.sqrt(total)


def gradient_factor(
    gradients: Sequence[Any], scale: float, clipnorm: float | None, must_be_finite: bool
) -> float | None:
    """Return what to multiply the gradients of one step by. Local.

    They are equal on all ranks, and so is the result.

    Parameters
    ----------
    gradients : sequence of arrays and IndexedSlices
        Summed over replicas.
    scale : float
        What the loss has been multiplied by.
    clipnorm : float, optional
        The largest norm that they may have, without `scale`.
    must_be_finite : bool

    Returns
    -------
    float or None
        ``None`` where they must be finite and are not.
    """
    if clipnorm is None and not must_be_finite:
        return 1 / scale
    norm = _global_norm(gradients) / scale
    if must_be_finite and not math.isfinite(norm):
        return None
    if clipnorm is None or norm <= clipnorm:
        return 1 / scale
    # Elements that are not finite become NaN, as 0 * inf or NaN * anything.
    return clipnorm / norm / scale
