"""One pass over device memory per variable: a kernel made from the rule's source."""

from __future__ import annotations

import functools
from typing import Any

from mpistrat.arrays import Array, elementwise_kernel, namespace_of
from mpistrat.optimizers.kernels import Kernel
from mpistrat.optimizers.rule import Rule, Step, Target, compute_dtype, flat_real

__all__ = ["device_sum_of_squares", "update_on_device"]


def update_on_device(rule: Rule, step: Step, target: Target, gradient: Array) -> None:
    """Write to `target` in place, as `rule` says. Local.

    Parameters
    ----------
    rule : Rule
    step : Step
    target : Target
    gradient : array
        Of the shape and dtype of the weight, in C order; only read.
    """
    real = compute_dtype(target.weight.dtype).type
    numbers = [real(value) for value in (step.keep, step.factor, *step.constants)]
    _kernel(rule.kernel)(flat_real(gradient), *numbers, target.flat_weight, *target.flat_slots)


@functools.lru_cache
def _kernel(kernel: Kernel) -> Any:
    """Return the device's kernel: T is the dtype of the weight, C the one to compute in."""
    inputs = ["T gradient_in", *(f"C {name}" for name in ("keep", "factor", *kernel.constants))]
    outputs = ["T weight_out", *(f"C {name}" for name in kernel.slots)]
    body = (
        "const C gradient = static_cast<C>(gradient_in) * factor;\n"
        "C weight = static_cast<C>(weight_out) * keep;\n"
        f"{kernel.body}\n"
        "weight_out = weight;"
    )
    name = f"mpistrat_{kernel.name}"
    return elementwise_kernel(", ".join(inputs), ", ".join(outputs), body, name)


def device_sum_of_squares(array: Array) -> float:
    """Return the sum of the squares of absolute values, not finite if an element is not. Local."""
    xp = namespace_of(array)
    flat = flat_real(array)
    wide = flat.astype(compute_dtype(flat.dtype), copy=False)
    total = float(xp.dot(wide, wide))
    return total if xp.isfinite(total) else float(xp.sum(wide.astype(xp.float64) ** 2))
