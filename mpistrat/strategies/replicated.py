"""Extended interface of a strategy with ``num_replicas=``: several replicas on each rank."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import context, nests
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CollectiveError
from mpistrat.layout import Layout
from mpistrat.options import (
    CommunicationOptions,
    InputContext,
    InputOptions,
    ReduceOpLike,
    ValueContext,
)
from mpistrat.strategies.arithmetic import compare_arithmetic
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.strategies.groups import RankGroups
from mpistrat.strategies.replica_calls import (
    MeetingContext,
    component_of,
    merged_results,
    merged_values,
)
from mpistrat.strategies.replica_group import ReplicaGroup
from mpistrat.system.callsite import failure_site
from mpistrat.tracing.spans import span
from mpistrat.values import DistributedValues, LocalReplicas, PerReplica, is_value
from mpistrat.variables import SyncOnReadVariable, Variable

if TYPE_CHECKING:
    from mpistrat.data import Dataset, DistributedDataset


class ReplicatedExtended(StrategyExtended):
    """`StrategyExtended` of a rank with its share of the replicas.

    In replica context `_collectives` are those of the replica that runs, else those of the ranks.
    """

    def _set_ranks(self, collectives: Collectives, groups: RankGroups) -> None:
        self._groups, self._shards = groups, groups.shards
        self._group = ReplicaGroup(collectives)
        collectives.arithmetic = compare_arithmetic(collectives)

    @property
    def _collectives(self) -> Collectives:  # type: ignore[override]
        return self._group.collectives

    @property
    def _layout(self) -> Layout:
        return self._group.layout

    @property
    def _replicas(self) -> Collectives:  # type: ignore[override]
        return self._group.collectives

    def _close(self) -> None:
        super()._close()
        self._group.close()

    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        group = self._group
        ids, pick = group.ids, component_of(group, "run")
        rows = [_components(pick, len(ids), each) for each in args]
        named = {name: _components(pick, len(ids), each) for name, each in kwargs.items()}
        functions = [
            functools.partial(
                self._run_one,
                fn,
                [row[position] for row in rows],
                {name: row[position] for name, row in named.items()} if named else named,
                replica_id,
            )
            for position, replica_id in enumerate(ids)
        ]
        with span("run", "run"):
            return merged_results(group, group.run(functions))

    def _run_one(
        self, fn: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], replica_id: int
    ) -> Any:
        """Return what `fn` returns in the context of one replica."""
        PerReplica._num_here.set(len(self._group.ids))
        replica = MeetingContext(self._container)
        frame = context.Frame(context.Kind.REPLICA, self._container, replica)
        with context.entered(frame), self.device.current():
            try:
                return fn(*args, **kwargs)
            except BaseException as error:
                if not self._group.is_unwinding:  # how many there are depends on the rank
                    site = f"{failure_site(error.__traceback__)} in replica {replica_id}"
                    self._group.ranks.channel.note_failure(error, site)
                    _note_replica(error, f"in replica {replica_id} of {self._group.num_replicas}")
                raise

    def _on_replicas(self, function: Callable[[], Any]) -> Any:
        return self._group.each(function)[0]

    def _once(self, function: Callable[[], Any]) -> Any:
        return self._group.once(function)

    def _make_together(self, make: Callable[[], Any], name: str | None, modes: str) -> Any:
        frame = context.Frame(context.Kind.CROSS_REPLICA, self._container)

        def made_once(makers: Sequence[Callable[[], Any]]) -> list[Any]:
            with context.entered(frame):
                return [makers[0]()] * len(makers)

        return self._group.meet(f"Variable of {name!r}{modes}", make, made_once)

    def _own_of(self, of_replicas: Sequence[Any]) -> Any:
        return of_replicas[self._group.turn or 0]

    def _running_of(self, of_replicas: Sequence[Any]) -> Sequence[Any]:
        return of_replicas if self._group.turn is None else [self._own_of(of_replicas)]

    def _each_own(self, make: Callable[[], Any]) -> list[Any]:
        return [make() for _ in self._group.ids]

    def _as_components(self, kind: str, value: Any) -> Any:
        """Return what picks this replica's component of each leaf of `value`."""
        pick = component_of(self._group, kind)

        def check(leaf: Any) -> None:
            if is_value(leaf):
                raise ValueError(
                    f"{kind}: a plain array or number is the component of one replica, but which "
                    "one's depends on the number of ranks, with num_replicas. Give what "
                    "strategy.run or experimental_distribute_values_from_function returns."
                )
            pick(0, leaf)

        for leaf in nests.flatten(value)[0]:
            check(leaf)
        return lambda leaf: pick(self._group.turn or 0, leaf, keeps_mirrored=True)

    def _reduce(self, reduce_op: ReduceOpLike, value: Any, axis: Any = None) -> Any:
        context.require_cross_replica(self._container, "reduce")
        own = self._checked("reduce", value)
        return self._on_replicas(
            lambda: super(ReplicatedExtended, self)._reduce(
                reduce_op, nests.map_nest(own, value), axis
            )
        )

    def _checked(self, kind: str, value: Any) -> Any:
        """Do `_as_components`, where an error of this rank reaches the others. **Collective**."""
        with self._collectives.call(kind) as call:
            own = self._as_components(kind, value)
            call.agree("components")
        return own

    def _with_components(self, kind: str, value: Any, function: Callable[[Any], Any]) -> list[Any]:
        own = self._checked(kind, value)
        return self._group.each(lambda: function(nests.map_nest(own, value)))

    def _joined(self, of_replicas: Sequence[Any]) -> Any:
        return merged_results(self._group, of_replicas)

    def _gather(self, value: Any, axis: int) -> Any:
        context.require_cross_replica(self._container, "gather")
        own = self._checked("gather", value)
        return self._on_replicas(
            lambda: super(ReplicatedExtended, self)._gather(nests.map_nest(own, value), axis)
        )

    def _reduce_pairs(
        self,
        kind: str,
        reduce_op: ReduceOpLike,
        pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None,
    ) -> list[Any]:
        context.require_cross_replica(self._container, kind)
        given = list(pairs)
        own = self._checked(kind, [value for value, _ in given])
        results: list[Any] = self._on_replicas(
            lambda: super(ReplicatedExtended, self)._reduce_pairs(
                kind,
                reduce_op,
                [(nests.map_nest(own, value), where) for value, where in given],
                options,
            )
        )
        return results

    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(var, *args, **kwargs)`` in update context: see `StrategyExtended.update`.

        For a SyncOnRead variable once for each replica of this rank.
        """
        if not isinstance(var, SyncOnReadVariable):
            return super().update(var, fn, args, kwargs, group)
        context.require_cross_replica(self._container, "update")
        self._check_is_ours("update", var)
        self._group.ranks.channel.ledger.updates += 1
        what = f"update of variable {var.name!r}"
        results = self._group.each(
            lambda: context.result_in_update_context(
                self._container, what, fn, (var,), args, kwargs or {}
            )
        )
        return merged_results(self._group, results) if group else tuple(results)

    def _local_results(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, Variable):
            return value.values
        own = component_of(self._group, "experimental_local_results")
        if not any(isinstance(leaf, DistributedValues) for leaf in nests.flatten(value)[0]):
            return (value,)
        return tuple(
            nests.map_nest(functools.partial(own, position), value)
            for position in range(len(self._group.ids))
        )

    def _values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        made = [value_fn(ValueContext(each, self._group.num_replicas)) for each in self._group.ids]
        return merged_results(self._group, made, merged_values)

    def _distribute_dataset(
        self, dataset: Dataset, options: InputOptions | None
    ) -> DistributedDataset:
        context.require_cross_replica(self._container, "experimental_distribute_dataset")
        make = super()._distribute_dataset
        return self._joined_datasets(self._group.each(lambda: make(dataset, options)))

    def _distribute_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None
    ) -> DistributedDataset:
        context.require_cross_replica(self._container, "distribute_datasets_from_function")
        make = super()._distribute_from_function
        return self._joined_datasets(self._group.each(lambda: make(dataset_fn, options)))

    def _joined_datasets(self, datasets: Sequence[DistributedDataset]) -> DistributedDataset:
        from mpistrat.data.distributed_dataset import ReplicatedDataset

        group = self._group
        return self._owned(
            ReplicatedDataset(datasets, group.each, group.per_replica, self._own_of, group.ranks)
        )


def _note_replica(error: BaseException, note: str) -> None:
    """Have tracebacks of `error` end with a `note`, if it does not name the replicas itself."""
    notes = getattr(error, "__notes__", [])
    if not isinstance(error, CollectiveError) and note not in notes:
        vars(error)["__notes__"] = [*notes, note]  # Python 3.10 has no add_note


def _components(pick: Callable[..., Any], count: int, nest: Any) -> Sequence[Any]:
    """Return `nest` as each replica of this rank gets it."""
    if isinstance(nest, LocalReplicas):
        components = nest.values
        if len(components) == count:
            return components
    elif type(nest) is np.ndarray:
        return (nest,) * count
    leaves, structure = nests.flatten(nest)
    return [
        nests.unflatten(structure, [pick(position, leaf) for leaf in leaves])
        for position in range(count)
    ]
