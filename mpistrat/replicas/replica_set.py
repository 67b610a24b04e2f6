"""Replicas of this rank, as a component of its strategy.

`OneReplica` is the usual case: the rank has one replica, or a part of one, so there is no other
replica to wait for, and no results to join. `ReplicaSet` has the replicas of a rank under
``num_replicas=``. They run one at a time, in order, and wait at each collective until all have
reached it.
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
from mpistrat.system.text import counted
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
"""Takes the collectives and the layout of the running replica, or of the rank."""


Make = Callable[[Sequence[int]], Sequence[Any]]
"""Takes replica numbers, and creates a nest for each."""


class OneReplica:
    """The only replica of this rank, or this rank's part of it."""

    is_one: Literal[True] = True
    turn: int | None = None

    def __init__(self, ranks: Collectives, show: Show) -> None:
        self.ranks = ranks
        layout = ranks.layout
        self.ids, self.num_replicas = layout.local_replicas, layout.num_replicas
        show(ranks, layout)

    def each(self, function: Callable[[], Any]) -> list[Any]:
        """Return the result of `function`, in a list."""
        return [function()]

    def once(self, function: Callable[[], Any]) -> Any:
        """Return the result of `function`."""
        return function()

    def own(self, items: Sequence[Any]) -> Any:
        """Return the only item."""
        return items[0]

    def running(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return `items`, which has one item."""
        return items

    def with_components(self, kind: str, value: Any, function: Callable[[Any], Any]) -> list[Any]:
        """Return the result of `function` for the whole `value`, in a list."""
        return [function(value)]

    def make_together(self, strategy: Any, make: Callable[[], Any], what: str) -> Any:
        """Return the result of `make`."""
        return make()

    def joined(self, results: Sequence[Any]) -> Any:
        """Return the only result."""
        return results[0]

    def joined_datasets(self, of_replicas: Sequence[DistributedDataset]) -> DistributedDataset:
        """Return the only dataset."""
        return of_replicas[0]

    def values_from(self, make: Make) -> Any:
        """Return the nest that `make` creates, with each leaf, of any kind, as a `PerReplica`."""

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
        """Do nothing, because there are no threads."""


class ReplicaSet:
    """Several replicas of this rank, according to the layout of the `ranks`.

    Whenever the running replica changes, `show` is called with its collectives and layout, so that
    a strategy can keep them in an attribute.
    """

    is_one: Literal[False] = False

    def __init__(self, ranks: Collectives, show: Show) -> None:
        self.ranks = ranks
        self._show = show
        self._turn: int | None = None
        self._threads: list[ReplicaThreads] = []
        self._running: list[ReplicaThreads] = []
        """Runs in progress, each within the common work of the one before."""
        self.reform()

    def reform(self) -> None:
        """Take the replicas of this rank from the current layout."""
        ranks = self.ranks
        of_rank = ranks.layout
        self.num_replicas = of_rank.num_replicas
        self.ids = of_rank.local_replicas
        self._layouts = [dataclasses.replace(of_rank, running=each) for each in self.ids]
        self._layouts.append(of_rank)
        self._links = ReplicaLinks(self.meet, self.run_on_main)
        # If each rank has exactly one replica, it uses the collectives of the rank.
        self._members: list[Collectives] = (
            [ranks]
            if self.num_replicas == ranks.size
            else [self._member(each) for each in self.ids]
        )
        self._members.append(ranks)
        # This shows the collectives of the rank again, because no replica runs.
        self.turn = None

    def _member(self, replica_id: int) -> Collectives:
        ranks = self.ranks
        channel = ReplicaChannel(ranks.channel, self._links, replica_id, self.num_replicas)
        made = ranks.again(channel, Layout(self.num_replicas, replica_id))
        made.number = ranks.number
        return made

    @property
    def turn(self) -> int | None:
        """Position of the running replica, or ``None`` if none runs."""
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
        """Return the position of the running replica, or ``None`` if none runs."""
        return self._turn

    def joined_datasets(self, of_replicas: Sequence[DistributedDataset]) -> DistributedDataset:
        """Return one distributed dataset with the parts of all replicas of this rank."""
        parts = [part for each in of_replicas for part in each._parts]
        return self._dataset_class(parts, self.ranks, self)

    @property
    def _dataset_class(self) -> type[DistributedDataset]:
        from mpistrat.data.distributed_dataset import DistributedDataset  # few programs need it

        return DistributedDataset

    def per_replica(self, components: Sequence[Any]) -> PerReplica[Any]:
        """Return the distributed value with these components of the replicas."""
        return join_components(components, self.turn_now)

    # Calls

    def run(self, functions: Sequence[Callable[[], Any]]) -> list[Any]:
        """Run `functions`, one for each replica of this rank, and return their results."""
        # The common work of a run, such as a merge function, may start another run. The threads of
        # the outer run are parked then, so the inner one needs its own.
        threads = next((each for each in self._threads if not each.is_busy), None)
        if threads is None:
            threads = ReplicaThreads(self, self._disagreement)
            self._threads.append(threads)
        # An outer run, in whose common work this one may run, has its own turn.
        before = self._turn
        self._running.append(threads)
        self.ranks.channel.running = self._whose_turn
        try:
            return threads.run(functions)
        finally:
            self._running.pop()
            self.turn = before

    def _whose_turn(self) -> tuple[int, str] | None:
        """Return thread and name of the running replica. May be called from any thread."""
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
        """Call `fn` for each replica here, with its components, and return the joined results."""
        count, device = len(self.ids), self.ranks.device
        is_host = device.kind != "gpu"
        rows = [self._components(each) for each in args]
        named = {name: self._components(each) for name, each in kwargs.items()}

        def as_replica(position: int) -> Any:
            own_args = [row[position] for row in rows]
            own_kwargs = {name: row[position] for name, row in named.items()} if named else named
            # The context was copied for this replica, so the value need not be reset.
            PerReplica._num_here.set(count)
            # A thread has no current device yet.
            on_device = contextlib.nullcontext() if is_host else device.current()
            with context.entered(new_frame()), on_device:
                try:
                    return fn(*own_args, **own_kwargs)
                except BaseException as error:
                    # Otherwise it ends because a different replica has failed.
                    if not self._running[-1].has_failed:
                        self._note_failure(error, self.ids[position])
                    raise

        with span("run", "run"):
            functions = [functools.partial(as_replica, each) for each in range(count)]
            return self.joined(self.run(functions))

    def _note_failure(self, error: BaseException, replica_id: int) -> None:
        """Report that a replica has failed, and add its number to tracebacks of `error`."""
        site = f"{failure_site(error.__traceback__)} in replica {replica_id}"
        self.ranks.channel.note_failure(error, site)
        note = f"in replica {replica_id} of {self.num_replicas}"
        notes = getattr(error, "__notes__", [])
        # A `CollectiveError` names the replicas itself.
        if not isinstance(error, CollectiveError) and note not in notes:
            vars(error)["__notes__"] = [*notes, note]  # Python 3.10 has no add_note

    def each(self, function: Callable[[], Any]) -> list[Any]:
        """Call `function` as each replica, in the current context, and return the results."""
        frame, device = context.current(), self.ranks.capabilities.device
        if self._turn is not None:
            return [function()]  # only for the running replica

        def as_replica() -> Any:
            entered = contextlib.nullcontext() if frame is None else context.entered(frame)
            with device.current(), entered:
                return function()

        return self.run([as_replica] * len(self.ids))

    def once(self, function: Callable[[], Any]) -> Any:
        """Call `function` once for all replicas of this rank, and return its result."""
        if self._turn is None:
            return function()
        return self.meet("a common step", function, _call_first)

    def own(self, items: Sequence[Any]) -> Any:
        """Return the item of the running replica; `items` has one per replica of this rank."""
        return items[self._turn or 0]

    def running(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return `items`, one per replica here. If a replica runs, return only its own."""
        return items if self._turn is None else [items[self._turn]]

    def make_together(self, strategy: Any, make: Callable[[], Any], what: str) -> Any:
        """Create one object for all replicas of this rank by `make`; messages call it `what`."""
        frame = context.Frame(context.Kind.CROSS_REPLICA, strategy)

        def made_once(makers: Sequence[Callable[[], Any]]) -> list[Any]:
            with context.entered(frame):
                return _call_first(makers)

        return self.meet(what, make, made_once)

    def meet(self, what: str, given: Any, act: Callable[[list[Any]], Sequence[Any]]) -> Any:
        """Wait for the other replicas of this rank: see `ReplicaThreads.meet`."""
        return self._running[-1].meet(what, given, act)

    def run_on_main(self, do: Callable[[], object]) -> None:
        """Call `do` on the main thread: see `ReplicaThreads.run_on_main`."""
        self._running[-1].run_on_main(do)

    def close(self) -> None:
        """End the threads."""
        for each in self._threads:
            each.close()
        self._threads.clear()

    # Components

    def _component(self, kind: str, position: int, leaf: Any) -> Any:
        """Return the component of a leaf that belongs to one replica of this rank."""
        if not isinstance(leaf, DistributedValues):
            return leaf
        if not isinstance(leaf, PerReplica):
            return leaf.values[0]
        components, expected = leaf.values, len(self.ids)
        if len(components) != expected:
            raise ValueError(
                f"{kind}: {leaf!r} holds {counted(len(components), 'component')}, but this rank "
                f"has {expected} of the {self.num_replicas} replicas. Use a value that "
                "strategy.run or distribute_values_from_function returns."
            )
        return components[position]

    def _components(self, nest: Any) -> Sequence[Any]:
        """Return an argument of `run` once per replica of this rank, with its components."""
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
        """Call `function` with the component of each replica here, and return the results.

        **Collective**: if the arguments are wrong on one rank, the other ranks raise an error too.
        """
        with self.ranks.call(kind) as call:
            leaves = nests.flatten(value)[0]
            for leaf in leaves:
                if is_value(leaf):
                    raise ValueError(
                        f"{kind} got a plain array or number. With num_replicas=, a rank can run "
                        "several replicas, so it is unclear which one it belongs to. Pass the "
                        "PerReplica that strategy.run or "
                        "distribute_values_from_function returns."
                    )
                self._component(kind, 0, leaf)
            # The ranks agree here only on the check. It ends before the functions run, because
            # their collectives need the channel.
            call.agree("components")

        def own(leaf: Any) -> Any:
            is_mirrored = isinstance(leaf, Mirrored)
            return leaf if is_mirrored else self._component(kind, self._turn or 0, leaf)

        return self.each(lambda: function(nests.map_nest(own, value)))

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of the replicas of this rank, or one item if all share a value."""
        kind = "local_results"
        if not any(isinstance(leaf, DistributedValues) for leaf in nests.flatten(value)[0]):
            return (value,)
        return tuple(
            nests.map_nest(functools.partial(self._component, kind, position), value)
            for position in range(len(self.ids))
        )

    def joined(self, results: Sequence[Any]) -> Any:
        """Return the results of the replicas of this rank as one nest."""
        return self._join(results, self._joined_leaf)

    def values_from(self, make: Make) -> Any:
        """Return the nests that `make` creates as one nest, which joins leaves of any kind."""
        return self._join(make(self.ids), self._joined_value)

    def _join(
        self,
        results: Sequence[Any],
        join: Callable[[Sequence[Any]], Any],
        differ: Callable[[Sequence[Any]], BaseException] | None = None,
    ) -> Any:
        # `differ` returns the error for different structures.
        if all(each is None for each in results):  # most steps return None
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
        """Call the function that all replicas pass, and return the component of each."""
        channel = self.ranks.channel
        channel.ledger.merge_calls += 1
        merge_fn = given[0][0]
        # Compare the code, because each replica may create its own lambda or partial.
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
    """Return whether `leaf` is a variable. This layer cannot import the class."""
    return hasattr(type(leaf), "synchronization")


Replicas: TypeAlias = OneReplica | ReplicaSet
"""Replicas of a rank."""


def _call_first(functions: Sequence[Callable[[], Any]]) -> list[Any]:
    return [functions[0]()] * len(functions)


def _call_merged(
    channel: Channel,
    strategy: Any,
    merge_fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> Any:
    """Call `merge_fn` in cross-replica context, and return its result."""
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
    """Return the code object that `function` runs, or the callable itself if it has none."""
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None)
    return code or getattr(type(function).__call__, "__code__", function)


def _code_text(code: Any) -> str:
    line = getattr(code, "co_firstlineno", None)
    return repr(code) if line is None else f"{code.co_name}, line {line}"


def _part(position: int, leaf: Any) -> Any:
    """Return one replica's part of a leaf that `merge_fn` has returned."""
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
        return leaf.copy()  # the program may write to each copy
    return leaf
