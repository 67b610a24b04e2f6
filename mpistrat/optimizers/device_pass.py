"""One pass over device memory per variable: a kernel made from the rule's source."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

from mpistrat.arrays import Array, elementwise_kernel, namespace_of
from mpistrat.optimizers.rule import Rule, Step, compute_dtype, real_parts

__all__ = ["sum_of_squares", "update"]


def update(
    rule: Rule, step: Step, weight: Array, gradient: Array, slots: Sequence[Array]
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
    real = compute_dtype(weight.dtype).type
    flat_weight, flat_gradient, *flat_slots = real_parts([weight, gradient, *slots])
    constants = [real(value) for value in (step.keep, step.factor, *step.constants)]
    _kernel(rule)(flat_gradient, *constants, flat_weight, *flat_slots)


@functools.lru_cache
def _kernel(rule: Rule) -> Callable[..., object]:
    """Return the kernel: T is the dtype of the weight, C the one to compute in."""
    inputs = ["T gradient_in", *(f"C {name}" for name in ("keep", "factor", *rule.constants))]
    outputs = ["T weight_out", *(f"C {name}" for name in rule.slots)]
    body = (
        "C weight = static_cast<C>(weight_out) * keep;\n"
        "const C gradient = static_cast<C>(gradient_in) * factor;\n"
        f"{rule.on_device}\n"
        "weight_out = weight;"
    )
    return elementwise_kernel(", ".join(inputs), ", ".join(outputs), body, f"mpistrat_{rule.name}")


def sum_of_squares(array: Array) -> float:
    """Return the sum of the squares of absolute values, not finite if an element is not. Local."""
    xp = namespace_of(array)
    (flat,) = real_parts([array])
    wide = flat.astype(compute_dtype(flat.dtype), copy=False)
    total = float(xp.dot(wide, wide))
    return total if xp.isfinite(total) else float(xp.sum(wide.astype(xp.float64) ** 2))
