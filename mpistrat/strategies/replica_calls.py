"""Calls of replicas: their arguments, taken apart and joined, and what they merge."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from mpistrat import context, nests
from mpistrat.arrays import is_array
from mpistrat.replica import ReplicaContext
from mpistrat.strategies.replica_group import ReplicaGroup
from mpistrat.system.callsite import failure_site
from mpistrat.tracing.spans import span
from mpistrat.values import DistributedValues, LocalReplicas, Mirrored, PerReplica, is_value
from mpistrat.variables import SyncOnReadVariable, Variable


def component_of(group: ReplicaGroup, kind: str) -> Callable[..., Any]:
    """Return ``pick(position, leaf)``: the component that a replica of this rank has of a leaf."""

    def pick(position: int, leaf: Any, keeps_mirrored: bool = False) -> Any:
        if not isinstance(leaf, DistributedValues) or (
            keeps_mirrored and isinstance(leaf, Mirrored)
        ):
            return leaf
        if not isinstance(leaf, PerReplica):
            return leaf.values[0]
        components, expected = leaf.values, len(group.ids)
        if len(components) != expected:
            raise ValueError(
                f"{kind}: {leaf!r} holds {len(components)} component(s), but this rank has "
                f"{expected} of the {group.num_replicas} replicas. Let strategy.run or "
                "experimental_distribute_values_from_function make it."
            )
        return components[position]

    return pick


def merged_results(
    group: ReplicaGroup,
    results: Sequence[Any],
    merge: Callable[[ReplicaGroup, Sequence[Any]], Any] | None = None,
    differ: Callable[[Sequence[Any]], BaseException] | None = None,
) -> Any:
    """Return what the replicas of this rank have returned as one nest of distributed values."""
    # `merge` joins the leaves in another way than that of `run`; `differ` returns the error for
    # nests of these structures.
    if all(each is None for each in results):  # as of most steps
        return None
    flat = [nests.flatten(each) for each in results]
    structures = [structure for _, structure in flat]
    for position, structure in enumerate(structures):
        if structure != structures[0]:
            if differ is not None:
                raise differ(structures)
            raise ValueError(
                "The replicas have returned nests of different structure: replica "
                f"{group.ids[0]} {nests.signature(structures[0])}, replica {group.ids[position]} "
                f"{nests.signature(structure)}."
            )
    rows = zip(*(leaves for leaves, _ in flat), strict=True)
    return nests.unflatten(structures[0], [(merge or _merged)(group, row) for row in rows])


def _merged(group: ReplicaGroup, leaves: Sequence[Any]) -> Any:
    first = leaves[0]
    if not any(map(is_value, leaves)) and all(_is_same(first, each) for each in leaves):
        return first
    return group.per_replica(leaves)


def _merged_argument(group: ReplicaGroup, leaves: Sequence[Any]) -> Any:
    if isinstance(leaves[0], bool) and all(each is leaves[0] for each in leaves):
        return leaves[0]
    return _merged(group, leaves)


def merged_values(group: ReplicaGroup, leaves: Sequence[Any]) -> Any:
    """Return leaves of any kind as a `PerReplica`, but what is one thing for all replicas."""
    first = leaves[0]
    if isinstance(first, DistributedValues) or (
        isinstance(first, Variable) and first.strategy is not None
    ):
        return first
    return None if all(each is None for each in leaves) else group.per_replica(leaves)


def _is_same(first: Any, other: Any) -> bool:
    return first is other or (
        isinstance(first, str) and type(first) is type(other) and first == other
    )


class MeetingContext(ReplicaContext):
    """The context of a replica that may share its rank with others."""

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `merge_fn` once on this rank: see `ReplicaContext.merge_call`. **Collective**."""
        self._check()
        group: ReplicaGroup = self._strategy.extended._group
        given = (merge_fn, list(args), dict(kwargs or {}))
        merge = functools.partial(_merge, group, self._strategy)
        return group.meet("merge_call", given, merge)


def _merge(group: ReplicaGroup, strategy: Any, given: Sequence[tuple[Any, Any, Any]]) -> list[Any]:
    """Call the function that all have given, and return the component of each replica."""
    channel = group.ranks.channel
    channel.ledger.merge_calls += 1
    merge_fn = given[0][0]
    codes = [_code_of(each) for each, _, _ in given]
    if any(code is not codes[0] for code in codes):
        raise group.apart([f"merge_call of {_code_text(each)}" for each in codes])
    given_args = [(args, kwargs) for _, args, kwargs in given]
    args, kwargs = merged_results(
        group,
        given_args,
        _merged_argument,
        lambda them: group.apart([f"merge_call with {nests.signature(each)}" for each in them]),
    )
    frame = context.Frame(context.Kind.CROSS_REPLICA, strategy)
    with context.entered(frame), span("merge_call", "merge_call"):
        try:
            result = merge_fn(strategy, *args, **kwargs)
        except BaseException as error:
            channel.note_failure(error, failure_site(error.__traceback__))
            raise
    positions = range(len(group.ids))
    return [nests.map_nest(functools.partial(_part, group, each), result) for each in positions]


def _code_of(function: Any) -> Any:
    """Return the code that runs where `function` is called, or what is called if that has none."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return code or getattr(type(function).__call__, "__code__", function)


def _code_text(code: Any) -> str:
    line = getattr(code, "co_firstlineno", None)
    return repr(code) if line is None else f"{code.co_name}, line {line}"


def _part(group: ReplicaGroup, position: int, leaf: Any) -> Any:
    """Return what one replica gets of a leaf that `merge_fn` returns."""
    if isinstance(leaf, LocalReplicas):
        return leaf.values[position]
    if isinstance(leaf, SyncOnReadVariable):
        return leaf.values[position]
    if isinstance(leaf, DistributedValues):
        leaf = leaf.values[0]
    if position and is_array(leaf) and not isinstance(leaf, np.generic):
        return leaf.copy()  # the program may write to each
    return leaf
