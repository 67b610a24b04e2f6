"""One pass over host memory per variable, without large temporaries.

The compiled kernels read and write each array once. Without them, and on the way from halves
to float32 and back, NumPy works on blocks that stay in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpistrat.optimizers.compiled import HostKernel, compiled_kernel
from mpistrat.optimizers.rule import Memory, Rule, Step, Target, compute_dtype, flat_real

__all__ = ["UpdateAll", "host_sum_of_squares", "update_on_host", "update_of_all"]

_BLOCK = 2**15
"""Elements. A block of each array of a rule fits into a core's own cache."""

Engine = Callable[[Target, np.ndarray], None]
"""``engine(target, gradient)`` updates arrays of one dtype in place."""

UpdateAll = Callable[[Step, list[np.ndarray]], None]
"""``update_all(step, gradients)`` does `update` for the targets that it was made for."""


def update_on_host(rule: Rule, step: Step, target: Target, gradient: np.ndarray) -> None:
    """Write to `target` in place, as `rule` says. Local.

    Parameters
    ----------
    rule : Rule
    step : Step
    target : Target
    gradient : array
        Of the shape and dtype of the weight, in C order; only read.
    """
    weight, flat_gradient = target.flat_weight, flat_real(gradient)
    dtype = target.compute_dtype
    compiled = compiled_kernel(rule.kernel, dtype)
    numbers = (step.keep, step.factor, *step.constants)
    if compiled is not None and weight.dtype == dtype:
        compiled(target.memory, [flat_gradient], numbers)
        return
    length = min(_BLOCK, weight.size)
    engine: Engine
    if compiled is None:
        engine = _numpy_engine(rule, step, length, dtype)
    else:
        engine = _compiled_engine(compiled, numbers)
    if weight.dtype != dtype:
        engine = _widening(engine, length, dtype)
    for start in range(0, weight.size, _BLOCK):
        part = slice(start, start + _BLOCK)
        block = Target(weight[part], [slot[part] for slot in target.flat_slots])
        engine(block, flat_gradient[part])


def update_of_all(rule: Rule, targets: Sequence[Target]) -> UpdateAll | None:
    """Return what updates all `targets` in one call, ``None`` where none is compiled. Local."""
    dtype = targets[0].compute_dtype
    compiled = compiled_kernel(rule.kernel, dtype)
    if compiled is None or any(target.flat_weight.dtype != dtype for target in targets):
        return None
    memory = Memory(targets)

    def update_all(step: Step, gradients: list[np.ndarray]) -> None:
        compiled(memory, gradients, (step.keep, step.factor, *step.constants))

    return update_all


def _compiled_engine(compiled: HostKernel, numbers: Sequence[float]) -> Engine:
    def engine(target: Target, gradient: np.ndarray) -> None:
        compiled(target.memory, [gradient], numbers)

    return engine


def _numpy_engine(rule: Rule, step: Step, length: int, dtype: np.dtype) -> Engine:
    constants = [np.array(value, dtype) for value in step.constants]
    keep, factor = np.array(step.keep, dtype), np.array(step.factor, dtype)
    decays, is_scaled = step.keep != 1, step.factor != 1
    scratch = np.empty(length, dtype)
    scaled = np.empty(length if is_scaled else 0, dtype)

    def engine(target: Target, gradient: np.ndarray) -> None:
        weight = target.weight
        if is_scaled:
            gradient = np.multiply(gradient, factor, out=scaled[: gradient.size])
        if decays:
            np.multiply(weight, keep, out=weight)
        rule.in_numpy(weight, gradient, target.slots, constants, scratch[: weight.size])

    return engine


def _widening(engine: Engine, length: int, dtype: np.dtype) -> Engine:
    """Return an engine for halves, which computes in the wider `dtype`."""
    wide_weight, wide_gradient = np.empty(length, dtype), np.empty(length, dtype)

    def widened(target: Target, gradient: np.ndarray) -> None:
        wide = Target(wide_weight[: gradient.size], target.slots)
        wide.weight[...] = target.weight
        wide_gradient[: gradient.size] = gradient
        engine(wide, wide_gradient[: gradient.size])
        target.weight[...] = wide.weight

    return widened


def host_sum_of_squares(array: np.ndarray) -> float:
    """Return the sum of the squares of absolute values, not finite if an element is not. Local.

    Blocks are summed pairwise and then as float64, in an order that does not depend on threads.
    """
    flat = flat_real(array)
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
