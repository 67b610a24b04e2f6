"""Reductions to destinations: devices, variables, components."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from mpistrat import context, nests, user_warnings
from mpistrat.arguments import as_array, normalize_axes
from mpistrat.arrays import Array, Device, host_result, is_array, namespace_of, place
from mpistrat.collectives.axis_reductions import reduce_over_axes
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.nest_reductions import all_reduce_nest, leaf_arrays
from mpistrat.comm.wire import result_dtype, wire_dtype
from mpistrat.layout import Layout
from mpistrat.options import ReduceOp, ReduceOpLike
from mpistrat.values import DistributedValues, IndexedSlices, Mirrored, PerReplica, localize, mirror
from mpistrat.variables import MirroredVariable, ShardedVariable, Variable

Destination: TypeAlias = "Variable | DistributedValues[Any] | Array | str"
"""Destination of a reduced value: the replicas, or the device that a string names."""

_GRAMMAR = re.compile(
    r"(?:/job:worker)?(?:/replica:0)?(?:/task:(?P<task>\d+))?/?(?:device:)?"
    r"(?P<kind>cpu|gpu|cuda)(?::(?P<index>\d+))?",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Place:
    """A device on one rank, or on every rank."""

    task: int | None
    """The rank, ``None`` for every rank."""
    kind: str
    """``"cpu"`` or ``"gpu"``."""
    index: int
    """Number of the device among the devices of its kind."""
    is_own: bool = False
    """Whether the string is ``"gpu"`` without a number, which means the rank's own GPU."""


def warn_of_empty_parts(replicas: Sequence[int], value: Any) -> None:
    """Warn if a `value` to be reduced is NaN on a replica here because its batch part was empty."""
    for leaf in nests.flatten(value)[0]:
        parts = leaf.values if isinstance(leaf, DistributedValues) else (leaf,)
        for replica, part in zip(replicas, parts, strict=False):
            user_warnings.warn_of_nan(replica, [("the value given to reduce", part)])


def parse_place(text: str, num_tasks: int) -> Place:
    """Return the place that `text` names among `num_tasks` ranks."""
    match = _GRAMMAR.fullmatch(text)
    if match is None:
        raise ValueError(
            f'Unknown device {text!r}. Use a form such as "cpu:0", "gpu:0" or '
            '"/job:worker/task:1/device:GPU:0".'
        )
    task = None if match["task"] is None else int(match["task"])
    if task is not None and task >= num_tasks:
        raise ValueError(
            f"The device {text!r} is on task {task}, but the tasks are 0 to {num_tasks - 1}."
        )
    kind = match["kind"].lower().replace("cuda", "gpu")
    is_own = kind == "gpu" and match["index"] is None
    return Place(task, kind, int(match["index"] or 0), is_own)


def parse_destination(call: CollectiveCall, destination: Any, strategy: Any) -> Place | None:
    """Return the place that a device string names, ``None`` for the devices of the replicas."""
    if isinstance(destination, str):
        return _named_place(call, destination, strategy)
    if destination is None:
        raise ValueError(
            f"{call.kind}: destinations is None. Pass a variable, a distributed value, an array "
            'or a device string such as "cpu:0".'
        )
    if isinstance(destination, Variable) and destination.strategy not in (None, strategy):
        raise ValueError(
            f"{call.kind}: the destination {destination.name!r} is a variable of "
            f"{destination.strategy!r}, not of {strategy!r}. Different strategies cannot be mixed."
        )
    if isinstance(destination, DistributedValues | Variable) or is_array(destination):
        return None
    raise TypeError(
        f"{call.kind}: destinations must be a variable, a distributed value, an array or a device "
        f"string, not {destination!r} of type {type(destination).__name__}."
    )


def _named_place(call: CollectiveCall, text: str, strategy: Any) -> Place:
    where = parse_place(text, context.layout_of(strategy).num_ranks)
    device = strategy.extended.device
    if where.task is not None:
        device = context.collectives_of(strategy).capabilities.device_of(where.task)
    if where.is_own and device.kind == "gpu":
        where = dataclasses.replace(where, index=device.index)
    if (where.kind, where.index) not in (("cpu", 0), (device.kind, device.index)):
        choices = " or ".join(sorted({'"cpu:0"', f'"{device}"'}))
        raise ValueError(
            f"{call.kind}: the destination {text!r} is not a device of this strategy, "
            f"whose replicas are on {device}. Use {choices}."
        )
    return where


class _Components:
    """A nest whose mirrored leaves need no communication.

    Parameters
    ----------
    kind : str
        Name of the public function, for messages.
    op : ReduceOp
    value : nest
        Arrays, numbers, variables and distributed values, which may hold nests themselves.

    Attributes
    ----------
    mirrored : dict
        The mirrored leaves by position. Variables are copied, `Mirrored` values are not.
    rest : nest
        This rank's components, with an empty tuple in place of each mirrored leaf, so that the
        ranks agree on which leaves are mirrored.

    Raises
    ------
    ValueError
        For SUM or PROD of a mirrored leaf, which would count it once per replica.
    """

    def __init__(self, kind: str, op: ReduceOp, value: Any) -> None:
        leaves, self._structure = nests.flatten(nests.map_nest(_opened, value))
        self.mirrored: dict[int, Any] = {}
        kept: list[Any] = []
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Mirrored | MirroredVariable | ShardedVariable):
                _check_mirrored(kind, op, leaf)
                component = leaf.values[0]
                is_view = isinstance(leaf, Variable)
                self.mirrored[position] = component.copy() if is_view else component
                kept.append(())
            else:
                kept.append(_local_component(leaf))
        self.rest = nests.unflatten(self._structure, kept)

    def joined(self, reduced_rest: Any) -> Any:
        """Return the nest of the reduced `rest` and the mirrored leaves."""
        reduced = iter(nests.flatten(reduced_rest)[0])
        positions = range(self._structure.num_leaves)
        leaves = [self.mirrored[i] if i in self.mirrored else next(reduced) for i in positions]
        return nests.unflatten(self._structure, leaves)


def with_whole_values(reduce_op: ReduceOpLike, value: Any) -> Any:
    """Return `value` with all rows of sharded variables, if the op needs them. **Collective**."""
    if str(getattr(reduce_op, "name", reduce_op)).upper() not in ("MEAN", "MIN", "MAX"):
        return value  # it raises later, before any row is sent
    return nests.map_nest(
        lambda leaf: Mirrored(leaf.value()) if isinstance(leaf, ShardedVariable) else leaf, value
    )


def local_components(value: Any) -> Any:
    """Return `value` with this rank's component of each variable and distributed value."""
    return nests.map_nest(_local_component, localize(value))


def _opened(leaf: Any) -> Any:
    """Return a distributed value that holds a nest as a nest of distributed values."""
    if isinstance(leaf, PerReplica):
        return nests.map_nest(_opened, leaf.values[0])
    if isinstance(leaf, Mirrored):
        return mirror(leaf.values[0])
    return leaf


def _local_component(leaf: Any) -> Any:
    is_whole = isinstance(leaf, Variable) and not isinstance(leaf, ShardedVariable)
    return leaf.values[0] if is_whole else leaf


def _check_mirrored(kind: str, op: ReduceOp, value: Any) -> None:
    if op in (ReduceOp.SUM, ReduceOp.PROD):
        raise ValueError(
            f"{kind}: {op.name} of a value that is mirrored on all replicas ({value!r}) would "
            "count it once per replica. Use MEAN to get the value, or multiply it by "
            "num_replicas_in_sync if that is what you mean."
        )


def reduce_to_host(call: CollectiveCall, op: ReduceOp, value: Any, axis: Any) -> Any:
    """Reduce a nest over replicas, and over `axis` if given, to host memory. **Collective**."""
    components = _Components(call.kind, op, value)
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
    """Reduce each value to its destination, small ones together. **Collective**."""
    places = [parse_destination(call, destination, strategy) for _, destination in pairs]
    components = [_Components(call.kind, op, value) for value, _ in pairs]
    one_task = [where.task if where is not None else None for where in places]
    for each, task in zip(components, one_task, strict=True):
        if task is not None:  # before the first agreement, or the other ranks would not learn of it
            leaf_arrays(call, *nests.flatten(each.rest))
    together = [each.rest for each, task in zip(components, one_task, strict=True) if task is None]
    reduced = iter(all_reduce_nest(call, op, together))
    results, layout = [], context.layout_of(strategy)
    for each, task, where in zip(components, one_task, places, strict=True):
        # Each of these is a collective. All ranks have the pairs in the same order.
        rest = next(reduced) if task is None else _reduce_to_task(call, op, each.rest, task, layout)
        if task is None or task == layout.rank:
            results.append(_delivered(each.joined(rest), where))
        else:
            results.append(None)
    return results


def _reduce_to_task(
    call: CollectiveCall, op: ReduceOp, nest: Any, task: int, layout: Layout
) -> Any:
    leaves, structure = nests.flatten(nest)
    if any(isinstance(leaf, IndexedSlices) for leaf in leaves):
        # The ranks have different numbers of rows, which a reduction to one rank does not support.
        # So all ranks get the result, and all but one drop it.
        return all_reduce_nest(call, op, nest)
    arrays = leaf_arrays(call, leaves, structure)
    reduced = call.reduce(op, arrays, layout.replica_of(task), nests.signature(structure))
    return None if reduced is None else nests.unflatten(structure, reduced)


def _delivered(nest: Any, where: Place | None) -> Any:
    if where is None:
        return mirror(nest)
    device = Device(where.kind, where.index)
    return nests.map_nest(lambda leaf: _placed(leaf, device), nest)


def _placed(leaf: Any, device: Device) -> Any:
    # Replicas of the same rank that do not get the result have None.
    return leaf if leaf is None or isinstance(leaf, IndexedSlices) else place(leaf, device)


def _reduce_locally(kind: str, op: ReduceOp, value: Any, axis: Any) -> Any:
    """Reduce a value that is the same on all replicas, which gives the exact result."""
    array = as_array(kind, value)
    # Called for its error: a value that is not sent must raise like one that is.
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
        return IndexedSlices(
            host_result(value.values), host_result(value.indices), value.dense_shape
        )
    return value if isinstance(value, np.generic) else host_result(value)
