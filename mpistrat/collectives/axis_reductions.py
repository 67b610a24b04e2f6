"""Reductions over replicas and over axes of their arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.arguments import normalize_axes
from mpistrat.arrays import Array, host_view, namespace_of
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.nest_reductions import leaf_arrays
from mpistrat.comm.wire import identity, result_dtype, wire_dtype
from mpistrat.options import ReduceOp


def reduce_over_axes(call: CollectiveCall, op: ReduceOp, nest: Any, axis: Any) -> Any:
    """Reduce each leaf of `nest` over replicas and over its `axis`, to the host. **Collective**."""
    # Every element of every replica has the same weight, so a short part of a batch weighs less.
    leaves, structure = nests.flatten(nest)
    arrays = leaf_arrays(call, leaves, structure)
    axes = tuple(normalize_axes(call.kind, axis, array.shape) for array in arrays)
    if op in (ReduceOp.MIN, ReduceOp.MAX):
        results = _extreme(call, op, arrays, axes, nests.signature(structure))
    else:
        results = _accumulate(call, op, arrays, axes, nests.signature(structure))
    dtypes = [result_dtype(op, np.dtype(array.dtype)) for array in arrays]
    cast = [r.astype(dtype, copy=False) for r, dtype in zip(results, dtypes, strict=True)]
    return nests.unflatten(structure, cast)


def _accumulate(
    call: CollectiveCall,
    op: ReduceOp,
    arrays: Sequence[Array],
    axes: tuple[tuple[int, ...], ...],
    structure: str,
) -> list[np.ndarray]:
    """Return SUM, PROD or MEAN over replicas and axes."""
    asked = call.options.wire_dtype
    wires = [wire_dtype(op, np.dtype(array.dtype), asked) for array in arrays]
    in_order = call.options.deterministic
    partials = [_partial(op, *each, in_order) for each in zip(arrays, axes, strict=True)]
    details = (op.name, "axis", axes, tuple(partial.shape for partial in partials), structure)
    if op is not ReduceOp.MEAN:
        return call.all_reduce(op, partials, details, wires)
    counts = [_num_elements(*each) for each in zip(arrays, axes, strict=True)]
    if asked is None:
        return _mean(call, partials, counts, details)
    return _mean_on_wire(call, partials, counts, details, wires)


def _partial(op: ReduceOp, array: Array, along: tuple[int, ...], in_order: bool) -> np.ndarray:
    """Return the SUM or PROD of this replica; with `in_order` its bits ignore the memory layout."""
    xp, dtype = namespace_of(array), np.dtype(array.dtype)
    if in_order:
        array = xp.asarray(array, dtype=dtype.newbyteorder("="), order="C")
    fold = xp.prod if op is ReduceOp.PROD else xp.sum
    return host_view(fold(array, axis=along, dtype=wire_dtype(op, dtype)))


def _mean(
    call: CollectiveCall, partials: Sequence[np.ndarray], counts: Sequence[int], details: object
) -> list[np.ndarray]:
    """Return the means."""
    # The counts are sent behind the sums, in the same message.
    messages = [
        np.concatenate([partial.reshape(-1), np.array(_digits(count), partial.dtype)])
        for partial, count in zip(partials, counts, strict=True)
    ]
    results = []
    for total, partial in zip(
        call.all_reduce(ReduceOp.SUM, messages, details), partials, strict=True
    ):
        count = total.dtype.type(_from_digits(total[partial.size :]))
        with np.errstate(invalid="ignore", divide="ignore"):
            results.append(total[: partial.size].reshape(partial.shape) / count)
    return results


def _mean_on_wire(
    call: CollectiveCall,
    partials: Sequence[np.ndarray],
    counts: Sequence[int],
    details: object,
    wires: Sequence[np.dtype],
) -> list[np.ndarray]:
    """Return the means, divided before they are narrowed, so that they need not overflow."""
    # The counts are sent first, in their own message: a narrow dtype would round them.
    totals = call.all_reduce(ReduceOp.SUM, [np.array(count, np.int64) for count in counts], details)
    with np.errstate(invalid="ignore", divide="ignore"):
        shares = [
            np.asarray(partial / partial.dtype.type(total))
            for partial, total in zip(partials, totals, strict=True)
        ]
    return call.all_reduce(ReduceOp.SUM, shares, (), wires)


def _num_elements(array: Array, along: tuple[int, ...]) -> int:
    return int(np.prod([array.shape[i] for i in along]))


# float32 holds integers up to 2**24 exactly, and 4096 ranks times a digit below 4096 is less.
_DIGIT = 4096
_NUM_DIGITS = 4


def _digits(count: int) -> list[int]:
    """Split a count so that sums over up to 4096 ranks stay exact, even in float32."""
    return [count // _DIGIT**i % _DIGIT for i in range(_NUM_DIGITS)]


def _from_digits(digits: np.ndarray) -> int:
    return sum(int(digit.real) * _DIGIT**i for i, digit in enumerate(digits))


def _extreme(
    call: CollectiveCall,
    op: ReduceOp,
    arrays: Sequence[Array],
    axes: tuple[tuple[int, ...], ...],
    structure: str,
) -> list[np.ndarray]:
    """Return MIN or MAX over replicas and axes."""
    # A rank without elements contributes the neutral element.
    partials = []
    for array, along in zip(arrays, axes, strict=True):
        wire_dtype(op, np.dtype(array.dtype))
        partials.append(_local_extreme(op, array, along))
    counts = [np.array(_num_elements(*each), np.int64) for each in zip(arrays, axes, strict=True)]
    # Every rank learns whether any element exists at all, so either all raise or none.
    with_most = call.all_reduce(ReduceOp.MAX, counts, (op.name, "axis", axes, structure))
    reduced = call.all_reduce(op, partials, structure)
    if any(count == 0 for count in with_most):
        raise ValueError(
            f"{call.kind}: {op.name} over axis has no element on any of the "
            f"{call.channel.size} replicas."
        )
    return reduced


def _local_extreme(op: ReduceOp, array: Array, along: tuple[int, ...]) -> np.ndarray:
    xp = namespace_of(array)
    if all(array.shape[i] for i in along):
        return host_view(
            xp.min(array, axis=along) if op is ReduceOp.MIN else xp.max(array, axis=along)
        )
    shape = [n for i, n in enumerate(array.shape) if i not in along]
    dtype = np.dtype(array.dtype).newbyteorder("=")
    return np.full(shape, identity(op, dtype, dtype), dtype)
