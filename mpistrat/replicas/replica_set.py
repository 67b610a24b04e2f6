"""Replica sets: the replicas of this rank, as a component of its strategy.

`OneReplica` is the usual case, a rank with one replica or with a part of one: nothing has to wait
for another replica or to be joined. `ReplicaSet` is the share of a rank under ``num_replicas=``:
its replicas run one at a time, in order, and stop at each collective until all of them are there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import numpy as np

from mpistrat import context, nests
from mpistrat.agreement.channel import Channel
from mpistrat.arrays import is_array
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CollectiveError
from mpistrat.layout import Layout
from mpistrat.options import VariableSynchronization
from mpistrat.replicas.replica_channel import ReplicaChannel, replicas_disagree
from mpistrat.replicas.replica_reducer import ReplicaLinks
from mpistrat.replicas.replica_threads import ReplicaCall, ReplicaThreads
from mpistrat.system.callsite import failure_site, site_of_thread
from mpistrat.tracing.spans import span
from mpistrat.values import (
    DistributedValues,
    Mirrored,
    PerReplica,
    is_value,
    join_components,
    localize,
    per_replica,
)

if TYPE_CHECKING:
    from mpistrat.data.distributed_dataset import DistributedDataset

Show = Callable[[Collectives, Layout], object]
"""Receives the collectives and the layout of the replica that runs, or of the rank."""


Make = Callable[[Sequence[int]], Sequence[Any]]
"""Creates a nest for each of some replicas."""


class OneReplica:
    """The only replica of this rank, or its part of one."""

    is_one: Literal[True] = True
    turn: int | None = None

    def __init__(self, ranks: Collectives, show: Show) -> None:
        self.ranks = ranks
        layout = ranks.layout
        self.ids, self.num_replicas = layout.local_replicas, layout.num_replicas
        show(ranks, layout)

    def each(self, function: Callable[[], Any]) -> list[Any]:
        """Return what `function` returns, in a list."""
        return [function()]

    def once(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns."""
        return function()

    def own(self, items: Sequence[Any]) -> Any:
        """Return the only item."""
        return items[0]

    def running(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return `items`, of which there is one."""
        return items

    def with_components(self, kind: str, value: Any, function: Callable[[Any], Any]) -> list[Any]:
        """Return what `function` returns of the whole `value`, in a list."""
        return [function(value)]

    def make_together(self, strategy: Any, make: Callable[[], Any], what: str) -> Any:
        """Return what `make` returns."""
        return make()

    def joined(self, results: Sequence[Any]) -> Any:
        """Return the only result."""
        return results[0]

    def joined_datasets(self, of_replicas: Sequence[DistributedDataset]) -> DistributedDataset:
        """Return the only one."""
        return of_replicas[0]

    def values_from(self, make: Make) -> Any:
        """Return what `make` creates with each leaf, of any kind, as a `PerReplica`."""

        def joined(leaf: Any) -> Any:
            is_whole = leaf is None or isinstance(leaf, DistributedValues) or _is_variable(leaf)
            return leaf if is_whole else PerReplica(leaf)

        return nests.map_nest(joined, make(self.ids)[0])

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the component of this replica, in a tuple."""
        return (localize(value),)

    def merge_call(
        self,
        strategy: Any,
        merge_fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call `merge_fn`: see `ReplicaContext.merge_call`."""
        channel = self.ranks.channel
        channel.ledger.merge_calls += 1
        if context.distributes_variables(strategy):
            args = [per_replica(each) for each in args]
            kwargs = {name: per_replica(each) for name, each in kwargs.items()}
        return localize(_call_merged(channel, strategy, merge_fn, args, kwargs))

    def close(self) -> None:
        """Do nothing: there are no threads."""


class ReplicaSet:
    """The replicas that the layout of the `ranks` gives to this rank.

    Whenever the running replica changes, `show` receives its collectives, so that a strategy can
    keep them in an attribute.
    """

    is_one: Literal[False] = False

    def __init__(self, ranks: Collectives, show: Show) -> None:
        self.ranks = ranks
        self._show = show
        self._turn: int | None = None
        self._threads: list[ReplicaThreads] = []
        self._running: list[ReplicaThreads] = []
        """Those that run, each within the common work of the one before."""
        self.reform()

    def reform(self) -> None:
        """Take the replicas that the layout of the ranks says now."""
        ranks = self.ranks
        of_rank = ranks.layout
        self.num_replicas = of_rank.num_replicas
        self.ids = of_rank.local_replicas
        self._layouts = [dataclasses.replace(of_rank, running=each) for each in self.ids]
        self._layouts.append(of_rank)
        self._links = ReplicaLinks(self.meet, self.run_on_main)
        # A replica that has a rank for itself communicates as the rank does.
        self._members: list[Collectives] = (
            [ranks]
            if self.num_replicas == ranks.size
            else [self._member(each) for each in self.ids]
        )
        self._members.append(ranks)
        # Shows the collectives of the rank again, which belong to no replica.
        self.turn = None

    def _member(self, replica_id: int) -> Collectives:
        ranks = self.ranks
        channel = ReplicaChannel(ranks.channel, self._links, replica_id, self.num_replicas)
        made = ranks.again(channel, Layout(self.num_replicas, replica_id))
        made.number = ranks.number
        return made

    @property
    def turn(self) -> int | None:
        """The position of the replica that runs, ``None`` outside of all."""
        return self._turn

    @turn.setter
    def turn(self, turn: int | None) -> None:
        self._turn = turn
        position = -1 if turn is None else turn
        self._show(self._members[position], self._layouts[position])

    def member(self, replica_id: int) -> Collectives:
        """Return the collectives of a replica of this rank."""
        return self._members[replica_id - self.ids[0]]

    def turn_now(self) -> int | None:
        """Return the position of the replica that runs, ``None`` outside of all."""
        return self._turn

    def joined_datasets(self, of_replicas: Sequence[DistributedDataset]) -> DistributedDataset:
        """Return the distributed dataset of the parts that the replicas of this rank have."""
        parts = [part for each in of_replicas for part in each._parts]
        return self._dataset_class(parts, self.ranks, self)

    @property
    def _dataset_class(self) -> type[DistributedDataset]:
        from mpistrat.data.distributed_dataset import DistributedDataset  # few programs need it

        return DistributedDataset

    def per_replica(self, components: Sequence[Any]) -> PerReplica[Any]:
        """Return the distributed value of the replicas' components."""
        return join_components(components, self.turn_now)

    # Calls

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Return what `functions`, one for each replica of this rank, return."""
        # The common work of a run, such as a merge function, may start another run. The
        # threads of the outer one are parked in it, so it needs others.
        threads = next((each for each in self._threads if not each.is_busy), None)
        if threads is None:
            threads = ReplicaThreads(self, self._disagreement)
            self._threads.append(threads)
        # This may be a run within the common work of an outer one, which has its own turn.
        before = self._turn
        self._running.append(threads)
        self.ranks.channel.running = self._whose_turn
        try:
            return threads.run(functions)
        finally:
            self._running.pop()
            self.turn = before

    def _whose_turn(self) -> tuple[int, str] | None:
        """Return the thread of the replica that runs, and its name, from any thread."""
        turn, running = self._turn, self._running[-1:]
        thread = running[0].thread_of(turn) if turn is not None and running else 0
        return (thread, f"replica {self.ids[turn or 0]}") if thread else None

    def call(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        new_frame: Callable[[], context.Frame],
    ) -> Any:
        """Return what `fn` returns of the components of each replica here, joined."""
        count, device = len(self.ids), self.ranks.device
        is_host = device.kind != "gpu"
        rows = [self._components(each) for each in args]
        named = {name: self._components(each) for name, each in kwargs.items()}

        def as_replica(position: int) -> Any:
            own_args = [row[position] for row in rows]
            own_kwargs = {name: row[position] for name, row in named.items()} if named else named
            # In the context that was copied for this replica, so nobody has to set it back.
            PerReplica._num_here.set(count)
            # A thread has no current device yet.
            on_device = contextlib.nullcontext() if is_host else device.current()
            with context.entered(new_frame()), on_device:
                try:
                    return fn(*own_args, **own_kwargs)
                except BaseException as error:
                    if not self._running[-1].has_failed:  # else it ends because another one has
                        self._note_failure(error, self.ids[position])
                    raise

        with span("run", "run"):
            functions = [functools.partial(as_replica, each) for each in range(count)]
            return self.joined(self.run(functions))

    def _note_failure(self, error: BaseException, replica_id: int) -> None:
        """Report that a replica has failed, and end tracebacks of `error` with its number."""
        site = f"{failure_site(error.__traceback__)} in replica {replica_id}"
        self.ranks.channel.note_failure(error, site)
        note = f"in replica {replica_id} of {self.num_replicas}"
        notes = getattr(error, "__notes__", [])
        # A `CollectiveError` names the replicas itself.
        if not isinstance(error, CollectiveError) and note not in notes:
            vars(error)["__notes__"] = [*notes, note]  # Python 3.10 has no add_note

    def each(self, function: Callable[[], Any]) -> list[Any]:
        """Return what `function` returns as each replica of this rank, in the current context."""
        frame, device = context.current(), self.ranks.capabilities.device
        if self._turn is not None:
            return [function()]  # that of the replica that runs

        def as_replica() -> Any:
            entered = contextlib.nullcontext() if frame is None else context.entered(frame)
            with device.current(), entered:
                return function()

        return self.run([as_replica] * len(self.ids))

    def once(self, function: Callable[[], Any]) -> Any:
        """Return what `function` returns, called once for this rank by all of its replicas."""
        if self._turn is None:
            return function()
        return self.meet("a common step", function, _call_first)

    def own(self, items: Sequence[Any]) -> Any:
        """Return the item of the replica that runs, of one for each replica of this rank."""
        return items[self._turn or 0]

    def running(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return `items`, one for each replica here; while one of them runs, its own alone."""
        return items if self._turn is None else [items[self._turn]]

    def make_together(self, strategy: Any, make: Callable[[], Any], what: str) -> Any:
        """Return the object that the replicas of this rank make, called `what`."""
        frame = context.Frame(context.Kind.CROSS_REPLICA, strategy)

        def made_once(makers: Sequence[Callable[[], Any]]) -> list[Any]:
            with context.entered(frame):
                return _call_first(makers)

        return self.meet(what, make, made_once)

    def meet(self, what: str, given: Any, act: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Wait for the other replicas of this rank: see `ReplicaThreads.meet`."""
        return self._running[-1].meet(what, given, act)

    def run_on_main(self, do: Callable[[], object]) -> None:
        """Have the main thread call `do`: see `ReplicaThreads.run_on_main`."""
        self._running[-1].run_on_main(do)

    def close(self) -> None:
        """End the threads."""
        for each in self._threads:
            each.close()
        self._threads.clear()

    # Components

    def _component(self, kind: str, position: int, leaf: Any) -> Any:
        """Return the component that a replica of this rank has of a leaf."""
        if not isinstance(leaf, DistributedValues):
            return leaf
        if not isinstance(leaf, PerReplica):
            return leaf.values[0]
        components, expected = leaf.values, len(self.ids)
        if len(components) != expected:
            raise ValueError(
                f"{kind}: {leaf!r} holds {len(components)} component(s), but this rank has "
                f"{expected} of the {self.num_replicas} replicas. Let strategy.run or "
                "experimental_distribute_values_from_function make it."
            )
        return components[position]

    def _components(self, nest: Any) -> Sequence[Any]:
        """Return an argument of `run` as each replica of this rank gets it."""
        count = len(self.ids)
        if isinstance(nest, PerReplica):
            components = nest.values
            if len(components) == count:
                return components
        elif type(nest) is np.ndarray:
            return (nest,) * count
        leaves, structure = nests.flatten(nest)
        return [
            nests.unflatten(structure, [self._component("run", position, leaf) for leaf in leaves])
            for position in range(count)
        ]

    def with_components(self, kind: str, value: Any, function: Callable[[Any], Any]) -> list[Any]:
        """Return what `function` returns of the component of each replica of this rank.

        **Collective**: an error of the arguments on one rank reaches the others.
        """
        with self.ranks.call(kind) as call:
            leaves = nests.flatten(value)[0]
            for leaf in leaves:
                if is_value(leaf):
                    raise ValueError(
                        f"{kind}: a plain array or number is the component of one replica, but "
                        "which one's depends on the number of ranks, with num_replicas. Give what "
                        "strategy.run or experimental_distribute_values_from_function returns."
                    )
                self._component(kind, 0, leaf)
            # Only the check is agreed on here. It ends before the functions run, whose collectives
            # need the channel.
            call.agree("components")

        def own(leaf: Any) -> Any:
            is_mirrored = isinstance(leaf, Mirrored)
            return leaf if is_mirrored else self._component(kind, self._turn or 0, leaf)

        return self.each(lambda: function(nests.map_nest(own, value)))

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of the replicas of this rank; what all share, once."""
        kind = "experimental_local_results"
        if not any(isinstance(leaf, DistributedValues) for leaf in nests.flatten(value)[0]):
            return (value,)
        return tuple(
            nests.map_nest(functools.partial(self._component, kind, position), value)
            for position in range(len(self.ids))
        )

    def joined(self, results: Sequence[Any]) -> Any:
        """Return what the replicas of this rank have returned as one nest."""
        return self._join(results, self._joined_leaf)

    def values_from(self, make: Make) -> Any:
        """Return what `make` creates with the leaves, of any kind, of all replicas joined."""
        return self._join(make(self.ids), self._joined_value)

    def _join(
        self,
        results: Sequence[Any],
        join: Callable[[Sequence[Any]], Any],
        differ: Callable[[Sequence[Any]], BaseException] | None = None,
    ) -> Any:
        # `differ` returns the error for nests of these structures.
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
                    f"{self.ids[0]} {nests.signature(structures[0])}, replica "
                    f"{self.ids[position]} {nests.signature(structure)}."
                )
        rows = zip(*(leaves for leaves, _ in flat), strict=True)
        return nests.unflatten(structures[0], list(map(join, rows)))

    def _joined_leaf(self, leaves: Sequence[Any]) -> Any:
        first = leaves[0]
        if not any(map(is_value, leaves)) and all(_is_same(first, each) for each in leaves):
            return first
        return self.per_replica(leaves)

    def _joined_argument(self, leaves: Sequence[Any]) -> Any:
        if isinstance(leaves[0], bool) and all(each is leaves[0] for each in leaves):
            return leaves[0]
        return self._joined_leaf(leaves)

    def _joined_value(self, leaves: Sequence[Any]) -> Any:
        first = leaves[0]
        is_owned = _is_variable(first) and first.strategy is not None
        if is_owned or isinstance(first, DistributedValues):
            return first
        return None if all(each is None for each in leaves) else self.per_replica(leaves)

    # Merge calls

    def merge_call(
        self,
        strategy: Any,
        merge_fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
    ) -> Any:
        """Call `merge_fn` once on this rank: see `ReplicaContext.merge_call`. **Collective**."""
        given = (merge_fn, list(args), dict(kwargs))
        return self.meet("merge_call", given, functools.partial(self._merge, strategy))

    def _merge(self, strategy: Any, given: Sequence[tuple[Any, Any, Any]]) -> list[Any]:
        """Call the function that all have given, and return the component of each replica."""
        channel = self.ranks.channel
        channel.ledger.merge_calls += 1
        merge_fn = given[0][0]
        # By code, because each replica may create its own lambda or partial.
        codes = [_code_of(each) for each, _, _ in given]
        if any(code is not codes[0] for code in codes):
            raise self._different([f"merge_call of {_code_text(each)}" for each in codes])
        args, kwargs = self._join(
            [(args, kwargs) for _, args, kwargs in given],
            self._joined_argument,
            lambda them: self._different(
                [f"merge_call with {nests.signature(each)}" for each in them]
            ),
        )
        result = _call_merged(channel, strategy, merge_fn, args, kwargs)
        positions = range(len(self.ids))
        return [nests.map_nest(functools.partial(_part, each), result) for each in positions]

    # Disagreements

    def _different(self, calls: Sequence[str]) -> BaseException:
        """Return the error for replicas that make different `calls`. **Collective**."""
        sites = map(site_of_thread, map(self._running[-1].thread_of, range(len(calls))))
        waiting = list(zip(self.ids, calls, calls, sites, strict=True))
        return replicas_disagree(self.ranks.channel, [], waiting)

    def _disagreement(self, calls: Sequence[ReplicaCall]) -> BaseException:
        """Return the error for replicas of this rank that wait for different things.

        **Collective**.
        """
        returned, waiting = [], []
        for replica, call in zip(self.ids, calls, strict=True):
            if call.request is None:
                returned.append(replica)
            else:
                what, given, _ = call.request
                waiting.append((replica, what, given, site_of_thread(call.thread)))
        return replicas_disagree(self.ranks.channel, returned, waiting)


def _is_variable(leaf: Any) -> bool:
    """Return whether `leaf` is a variable, whose class is in a layer above."""
    return hasattr(type(leaf), "synchronization")


Replicas: TypeAlias = OneReplica | ReplicaSet
"""The replicas of a rank."""


def _call_first(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    return [functions[0]()] * len(functions)


def _call_merged(
    channel: Channel,
    strategy: Any,
    merge_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Return what `merge_fn` returns in cross-replica context."""
    frame = context.Frame(context.Kind.CROSS_REPLICA, strategy)
    with context.entered(frame), span("merge_call", "merge_call"):
        try:
            return merge_fn(strategy, *args, **kwargs)
        except BaseException as error:
            channel.note_failure(error, failure_site(error.__traceback__))
            raise


def _is_same(first: Any, other: Any) -> bool:
    return first is other or (
        isinstance(first, str) and type(first) is type(other) and first == other
    )


def _code_of(function: Any) -> Any:
    """Return the code that runs where `function` is called, or what is called if that has none."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return code or getattr(type(function).__call__, "__code__", function)


def _code_text(code: Any) -> str:
    line = getattr(code, "co_firstlineno", None)
    return repr(code) if line is None else f"{code.co_name}, line {line}"


def _part(position: int, leaf: Any) -> Any:
    """Return what one replica gets of a leaf that `merge_fn` returns."""
    has_components = isinstance(leaf, PerReplica) or (
        _is_variable(leaf)
        and leaf.strategy is not None
        and leaf.synchronization is VariableSynchronization.ON_READ
    )
    if has_components and position < len(leaf.values):
        return leaf.values[position]
    if isinstance(leaf, DistributedValues):
        leaf = leaf.values[0]
    if position and is_array(leaf) and not isinstance(leaf, np.generic):
        return leaf.copy()  # the program may write to each
    return leaf
