"""Reductions whose results go to memory of the caller: ``all_reduce(..., out=)``."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.arrays import Array, is_array, namespace_of
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.nested import leaf_arrays
from mpistrat.comm.targets import can_reduce_into
from mpistrat.comm.wire import result_dtype
from mpistrat.options import ReduceOp
from mpistrat.pytorch import is_tensor
from mpistrat.values import IndexedSlices, localize

__all__ = ["all_reduce_into"]


def all_reduce_into(call: CollectiveCall, op: ReduceOp, nest: Any, out: Any) -> Any:
    """Reduce each leaf of `nest` over replicas into the same leaf of `out`. **Collective**."""
    # The ranks need not agree on `out`: what travels is the same without it.
    leaves, structure = nests.flatten(localize(nest))
    targets, structure_of_out = nests.flatten(localize(out))
    if structure_of_out != structure:
        raise ValueError(
            f"{call.kind}: out must have the structure of the value, "
            f"{nests.signature(structure)}, but it has {nests.signature(structure_of_out)}."
        )
    for leaf in leaves:
        if isinstance(leaf, IndexedSlices) or is_tensor(leaf):
            raise TypeError(
                f"{call.kind}: out takes the results of arrays and numbers, but the value holds "
                f"{type(leaf).__name__}. Leave out= away."
            )
    arrays = leaf_arrays(call, leaves, structure)
    for number, (array, target) in enumerate(zip(arrays, targets, strict=True)):
        path = nests.paths_of(structure)[number]
        _check(call.kind, f"out{f' at {path!r}' if path else ''}", op, array, target)
    direct = targets if can_reduce_into(arrays, targets) else None
    results = call.all_reduce(op, arrays, nests.signature(structure), out=direct)
    for result, target in zip(results, targets, strict=True):
        if result is not target:
            target[...] = namespace_of(target).asarray(result)
    return out


def _check(kind: str, what: str, op: ReduceOp, array: Array, target: Any) -> None:
    """Refuse a `target` that the reduction of `array` does not fit."""
    if not is_array(target) or is_tensor(target):
        raise TypeError(
            f"{kind}: {what} must be an array, not {target!r} of type {type(target).__name__}."
        )
    dtype = result_dtype(op, np.dtype(array.dtype))
    if tuple(target.shape) != tuple(array.shape) or target.dtype.newbyteorder("=") != dtype:
        raise ValueError(
            f"{kind}: {what} must have shape {tuple(array.shape)} and dtype {dtype}, not "
            f"{tuple(target.shape)} and {target.dtype}."
        )
    if isinstance(target, np.ndarray) and not target.flags.writeable:
        raise ValueError(f"{kind}: {what} is read-only.")
