"""One pass over host memory per variable: blocks that stay in the cache, no large temporaries."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mpistrat.optimizers.rule import Rule, Step, compute_dtype, real_parts

__all__ = ["sum_of_squares", "update"]

_BLOCK = 2**15
"""Elements. A block of each array of a rule fits into a core's own cache."""


def update(
    rule: Rule, step: Step, weight: np.ndarray, gradient: np.ndarray, slots: Sequence[np.ndarray]
) -> None:
    """Write `weight` and `slots` in place, as `rule` says. Local.

    Parameters
    ----------
    rule : Rule
    step : Step
    weight, gradient : array
        Of one shape and dtype, in C order; `gradient` is only read.
    slots : sequence of array
        Of the same shape and of `compute_dtype`.
    """
    flat_weight, flat_gradient, *flat_slots = real_parts([weight, gradient, *slots])
    dtype = compute_dtype(weight.dtype)
    constants = [np.array(value, dtype) for value in step.constants]
    keep, factor = np.array(step.keep, dtype), np.array(step.factor, dtype)
    decays, is_scaled, is_widened = step.keep != 1, step.factor != 1, flat_weight.dtype != dtype
    length = min(_BLOCK, flat_weight.size)
    scratch, wide_gradient, wide_weight = (
        np.empty(length if needed else 0, dtype)
        for needed in (True, is_scaled or is_widened, is_widened)
    )
    for start in range(0, flat_weight.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        w, g = flat_weight[part], flat_gradient[part]
        if is_scaled or is_widened:
            g = np.multiply(g, factor, out=wide_gradient[: g.size], dtype=dtype)
        if is_widened:
            w = wide_weight[: g.size]
            w[...] = flat_weight[part]
        if decays:
            np.multiply(w, keep, out=w)
        rule.on_host(w, g, [slot[part] for slot in flat_slots], constants, scratch[: g.size])
        if is_widened:
            flat_weight[part] = w


def sum_of_squares(array: np.ndarray) -> float:
    """Return the sum of the squares of absolute values, not finite if an element is not. Local.

    Blocks are summed pairwise and then as float64, in an order that does not depend on threads.
    """
    (flat,) = real_parts([array])
    total = _sum_of_squares(flat, compute_dtype(flat.dtype))
    # Squares of finite float32 numbers can overflow; those of float64 then decide.
    return total if np.isfinite(total) else _sum_of_squares(flat, np.dtype(np.float64))


def _sum_of_squares(flat: np.ndarray, dtype: np.dtype) -> float:
    scratch = np.empty(min(_BLOCK, flat.size), dtype)
    total = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, flat.size, _BLOCK):
            block = flat[start : start + _BLOCK]
            squares = np.multiply(block, block, out=scratch[: block.size], dtype=dtype)
            total += float(np.add.reduce(squares))
    return total
