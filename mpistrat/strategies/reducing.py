"""Reductions in cross-replica context: to the host, and to destinations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.arguments import as_array, normalize_axes
from mpistrat.arrays import Device, host_view, is_array, namespace_of, place
from mpistrat.axis_reductions import reduce_over_axes
from mpistrat.collectives import CollectiveCall
from mpistrat.comm.dtypes import result_dtype, wire_dtype
from mpistrat.options import ReduceOp
from mpistrat.reductions import all_reduce_nest
from mpistrat.strategies.components import Components
from mpistrat.strategies.destinations import parse_destination
from mpistrat.strategies.device_strings import Place
from mpistrat.values import IndexedSlices, mirror

__all__ = ["reduce_pairs", "reduce_to_host"]


def reduce_to_host(call: CollectiveCall, op: ReduceOp, value: Any, axis: Any) -> Any:
    """Reduce a nest over replicas, and over `axis` where given, to host memory. **Collective**.

    Raises
    ------
    ValueError
        For SUM or PROD of a mirrored value, which would count it once per replica.
    """
    components = Components(call.kind, op, value)
    for position, mirrored in components.mirrored.items():
        components.mirrored[position] = _reduce_locally(call.kind, op, mirrored, axis)
    if axis is None:
        reduced = all_reduce_nest(call, op, components.rest)
    else:
        reduced = reduce_over_axes(call, op, components.rest, axis)
    return nests.map_nest(_on_host, components.joined(reduced))


def reduce_pairs(
    call: CollectiveCall, op: ReduceOp, pairs: Sequence[tuple[Any, Any]], strategy: Any
) -> list[Any]:
    """Reduce each value to its destination, small ones together. **Collective**.

    Raises
    ------
    TypeError, ValueError
        For a value or destination that cannot be.
    """
    places = [parse_destination(call, destination, strategy) for _, destination in pairs]
    components = [Components(call.kind, op, value) for value, _ in pairs]
    one_task = [where.task if where is not None else None for where in places]
    together = [each.rest for each, task in zip(components, one_task, strict=True) if task is None]
    reduced = iter(all_reduce_nest(call, op, together))
    results = []
    for each, task, where in zip(components, one_task, places, strict=True):
        rest = next(reduced) if task is None else _reduce_to_task(call, op, each.rest, task)
        if task is None or task == call.channel.rank:
            results.append(_delivered(each.joined(rest), where))
        else:
            results.append(None)
    return results


def _reduce_to_task(call: CollectiveCall, op: ReduceOp, nest: Any, task: int) -> Any:
    leaves, structure = nests.flatten(nest)
    if any(isinstance(leaf, IndexedSlices) for leaf in leaves):
        return all_reduce_nest(call, op, nest)
    arrays = [as_array(call.kind, leaf) for leaf in leaves]
    reduced = call.reduce(op, arrays, task, nests.signature(structure))
    return None if reduced is None else nests.unflatten(structure, reduced)


def _delivered(nest: Any, where: Place | None) -> Any:
    if where is None:
        return mirror(nest)
    device = Device(where.kind, where.index)
    return nests.map_nest(lambda leaf: _placed(leaf, device), nest)


def _placed(leaf: Any, device: Device) -> Any:
    return leaf if isinstance(leaf, IndexedSlices) else place(leaf, device)


def _reduce_locally(kind: str, op: ReduceOp, value: Any, axis: Any) -> Any:
    """Reduce a value that is the same on all replicas, which is exact."""
    array = as_array(kind, value)
    wire_dtype(op, array.dtype)
    if axis is not None:
        along = normalize_axes(kind, axis, array.shape)
        xp = namespace_of(array)
        fold = {ReduceOp.MEAN: xp.mean, ReduceOp.MIN: xp.min, ReduceOp.MAX: xp.max}[op]
        array = fold(array, axis=along)
    result = array.astype(result_dtype(op, np.dtype(array.dtype)))
    return result if is_array(value) and not isinstance(value, np.generic) else result[()]


def _on_host(value: Any) -> Any:
    if isinstance(value, IndexedSlices):
        return IndexedSlices(host_view(value.values), host_view(value.indices), value.dense_shape)
    return value if isinstance(value, np.generic) else host_view(value)
