"""StrategyExtended, the interface for libraries: reduce to a device, update, broadcast."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import context, nests
from mpistrat.arrays import host_result
from mpistrat.collectives.collectives import Collectives
from mpistrat.collectives.operations.all_gather import AllGather
from mpistrat.collectives.replica_collectives import apply_to_nest
from mpistrat.context import call_in_update_context
from mpistrat.errors import ContextError
from mpistrat.failures import flight_dumps, logs
from mpistrat.layout import Layout
from mpistrat.options import (
    CommunicationOptions,
    InputContext,
    InputOptions,
    ReduceOp,
    ReduceOpLike,
    ValueContext,
)
from mpistrat.replica import ReplicaContext
from mpistrat.replicas.arithmetic import compare_arithmetic
from mpistrat.replicas.replica_set import OneReplica, Replicas, ReplicaSet
from mpistrat.strategies.destinations import (
    Destination,
    local_components,
    reduce_pairs,
    reduce_to_host,
    with_whole_values,
)
from mpistrat.strategies.extended_v1 import ExtendedV1
from mpistrat.strategies.rank_groups import RankGroups
from mpistrat.system.callsite import failure_site
from mpistrat.tracing.spans import span
from mpistrat.values import (
    PerReplica,
    batches_of,
    container_of,
    localize,
    per_replica,
)
from mpistrat.variables import (
    MirroredVariable,
    ShardedVariable,
    SyncOnReadVariable,
    Variable,
    check_replicas_agree,
    variables_to_compare,
)
from mpistrat.variables.placement import Axis, Flat, Rows, Whole

if TYPE_CHECKING:
    from mpistrat.data import Dataset, DistributedDataset

_PLAIN = (bool, int, float, complex, np.generic, np.ndarray)


class StrategyExtended(ExtendedV1):
    """The part of a strategy for libraries: optimizers, metrics, layers, checkpoints.

    Parameters
    ----------
    collectives : Collectives
        The collectives of all ranks, or of a world with one rank.
    groups : RankGroups, optional
        The collectives among replicas and within one. By default each rank is a replica.

    Examples
    --------
    >>> extended = strategy.extended
    >>> with strategy.scope():
    ...     weight = ms.Variable(np.zeros(2))
    >>> with strategy.scope(), extended.colocate_vars_with(weight):
    ...     bias = ms.Variable(0.0)
    >>> ones = extended.call_for_each_replica(lambda: np.ones(2))
    >>> mean = extended.reduce_to("mean", ones, weight)
    >>> [mean] = extended.batch_reduce_to("mean", [(ones, weight)])  # many values in one message
    >>> extended.update(weight, lambda variable, value: variable.assign(value), (mean,))
    Mirrored(array([1., 1.]))
    >>> [gradient] = extended.gradient_buffers([weight])
    >>> extended.assert_replicas_agree([weight])
    >>> extended.variable_created_in_scope(weight)
    True
    >>> extended.value_container(weight.value()) is weight
    True
    >>> strategy.rank in extended.local_replica_ids
    True
    >>> path = extended.dump_flight_record("flight.{rank}.json")
    """

    _is_default = False
    _distributes_variables = True
    _context_class: type[ReplicaContext] = ReplicaContext

    def __init__(self, collectives: Collectives, groups: RankGroups | None = None) -> None:
        self._set_ranks(collectives, groups or RankGroups.of_one_rank(collectives))

    def _set_ranks(self, collectives: Collectives, groups: RankGroups) -> None:
        self._groups, self._shards = groups, groups.shards
        self._replica_set: Replicas
        if collectives.layout.is_shared:
            self._replica_set = (collectives.replica_set or ReplicaSet)(collectives, self._show)
            collectives.arithmetic = compare_arithmetic(collectives)
        else:
            self._replica_set = OneReplica(collectives, self._show)
            self._replicas = groups.replicas

    def _take_over(self, other: StrategyExtended) -> None:
        """Take over the ranks of `other`: the survivors of an elastic job."""
        replicas: Any = self._replica_set
        ranks = replicas.ranks
        ranks.take_over(other._replica_set.ranks)
        replicas.reform()
        self._groups = RankGroups.of_one_rank(ranks)
        self._shards = self._groups.shards

    def _show(self, collectives: Collectives, layout: Layout) -> None:
        """Store the collectives and the layout of the replica that runs, or of the rank."""
        # Plain attributes, because every step of a program reads them.
        self._collectives = self._replicas = collectives
        self._layout = layout

    def _copied_for(self, container: Any) -> StrategyExtended:
        """Return a copy for another strategy on the same ranks."""
        old = self._collectives
        old.check_can_copy("A strategy with elastic=True")
        twin = copy.copy(self)
        twin._container = container
        if not old.is_closed:
            ranks = old.again()
            twin._set_ranks(ranks, self._groups.copied(ranks))
        return twin

    def _close(self) -> None:
        """Free what no other strategy uses: see `Strategy.close`. **Collective**."""
        if self._is_default or self._collectives.is_closed:
            return
        context.require_cross_replica(self._container, "close")
        logs.flush()  # while rank 0 can still print for all
        error = RuntimeError(
            f"{self._container!r} was closed by close() and cannot be used any more. Close a "
            "strategy after its last use, or create a new one."
        )
        self._groups.close(error)
        self._collectives.close(error)
        self._replica_set.close()

    def _require_scope(self, what: str) -> None:
        """Check that `what` is called within `Strategy.scope` or `Strategy.run`."""
        frame = context.current()
        if frame is None or context.is_default(frame.strategy):
            raise ContextError(
                f"{what} needs the scope of {self._container!r}, but it was called outside of it. "
                f'Call it inside "with strategy.scope():".'
            )
        context.mode_for(self._container, what)

    def call_for_each_replica(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `fn` once on each replica, in replica context: see `Strategy.run`.

        **Collective**: every rank makes the call, but it sends nothing.

        Parameters
        ----------
        fn : callable
            Called with this replica's component of every distributed value.
        args, kwargs : sequence, mapping
            Positional and keyword arguments of `fn`.

        Returns
        -------
        nest
            The result of `fn`, with a `PerReplica` for each array or number.
        """
        # Does the work of `context.collective` inline, because programs run many short steps.
        context.require_cross_replica(self._container, "run")
        ranks = self._collectives
        if ranks.is_elastic and ranks.needs_unit:
            return self._run_in_unit(fn, args, kwargs)
        ledger = ranks.channel.ledger
        # Runs are counted but not compared, because `run` sends nothing. If a later collective
        # differs, the report shows how many runs each rank is ahead.
        ledger.runs += 1
        for each in (*args, *kwargs.values()) if kwargs else args:
            for batch in batches_of(each):
                ledger.note_batch(batch)
        return self._run(fn, args, kwargs or {})

    @context.collective("run", writes=True)
    def _run_in_unit(
        self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any] | None
    ) -> Any:
        return self.call_for_each_replica(fn, args, kwargs)

    def _run(self, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of `call_for_each_replica`, which has checked the call."""
        if not self._replica_set.is_one:
            return self._replica_set.call(fn, args, kwargs, self._new_frame)
        local_args = [localize(each) for each in args]
        local_kwargs = {name: localize(kwargs[name]) for name in kwargs}
        # Not `with ReplicaContext(...)`, which would repeat the checks.
        replica = self._context_class(self._container)
        frame = context.Frame(context.Kind.REPLICA, self._container, replica)
        with context.entered(frame), span("run", "run"):
            try:
                result = fn(*local_args, **local_kwargs)
            except BaseException as error:
                channel = self._collectives.channel
                # The other ranks will soon wait for this one in a collective. This tells them why
                # it does not arrive.
                channel.note_failure(error, failure_site(error.__traceback__))
                raise
        return self._merge(result)

    def _new_frame(self) -> context.Frame:
        """Return a replica context to enter."""
        replica = self._context_class(self._container)
        return context.Frame(context.Kind.REPLICA, self._container, replica)

    def _merge(self, result: Any) -> Any:
        return None if result is None else per_replica(result)

    # If this rank has several replicas, each of these calls itself once per replica, with `is_own`.

    @context.collective("reduce")
    def _reduce(
        self, reduce_op: ReduceOpLike, value: Any, axis: Any = None, is_own: bool = False
    ) -> Any:
        """Reduce `value` to host memory: see `Strategy.reduce`. **Collective**."""
        if not (is_own or self._replica_set.is_one):
            return self._replica_set.with_components(
                "reduce", value, lambda own: self._reduce(reduce_op, own, axis, is_own=True)
            )[0]
        # Before the call: reading the rows is a separate collective, which would raise inside it.
        value = with_whole_values(reduce_op, value) if self._variable_partitioner else value
        with self._replicas.call("reduce") as call:
            return reduce_to_host(call, ReduceOp.parse(reduce_op), value, axis)

    @context.collective("gather")
    def _gather(self, value: Any, axis: int, is_own: bool = False) -> Any:
        """Concatenate `value` in host memory: see `Strategy.gather`. **Collective**."""
        if not (is_own or self._replica_set.is_one):
            return self._replica_set.with_components(
                "gather", value, lambda own: self._gather(own, axis, is_own=True)
            )[0]
        with self._replicas.call("gather") as call:
            components = local_components(value)
            gathered = apply_to_nest(call, AllGather.parse(call.kind, axis), components)
        return nests.map_nest(host_result, gathered)

    @context.collective("reduce_to")
    def reduce_to(
        self,
        reduce_op: ReduceOpLike,
        value: Any,
        destinations: Destination,
        options: CommunicationOptions | None = None,
    ) -> Any:
        """Reduce `value` over replicas and place the result on the devices of `destinations`.

        **Collective**: every rank makes the call.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            The reduction, such as ``"sum"`` or ``"mean"``; the same on all ranks.
        value : PerReplica, Mirrored, array, number or IndexedSlices
            The value to reduce. A plain array or number is this rank's component; with
            ``num_replicas=`` it raises ValueError.
        destinations : Variable, distributed value, array or device string
            Place of the result. If a device string names a task, only that rank gets the result;
            the others get ``None``.
        options : CommunicationOptions, optional
            Options for this call. Default: those of the strategy.

        Returns
        -------
        Mirrored or array
            An array if `destinations` is a device string.
        """
        return self._reduce_pairs("reduce_to", reduce_op, [(value, destinations)], options)[0]

    @context.collective("batch_reduce_to")
    def batch_reduce_to(
        self,
        reduce_op: ReduceOpLike,
        value_destination_pairs: Iterable[tuple[Any, Destination]],
        options: CommunicationOptions | None = None,
    ) -> list[Any]:
        """Call `reduce_to` for each pair, with small values in one message. **Collective**.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            The reduction, such as ``"sum"`` or ``"mean"``; the same on all ranks.
        value_destination_pairs : iterable of tuple
            Pairs (value, destinations) as for `reduce_to`; equally many on all ranks.
        options : CommunicationOptions, optional
            Options for this call. Default: those of the strategy.

        Returns
        -------
        list
            The result of each pair, as from `reduce_to`.
        """
        return self._reduce_pairs("batch_reduce_to", reduce_op, value_destination_pairs, options)

    def _reduce_pairs(
        self,
        kind: str,
        reduce_op: ReduceOpLike,
        pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None,
        is_own: bool = False,
    ) -> list[Any]:
        """Reduce each value of `pairs` to its destination; `kind` names the public method."""
        if not (is_own or self._replica_set.is_one):
            given = list(pairs)
            values, places = [value for value, _ in given], [where for _, where in given]

            def reduced(own: Sequence[Any]) -> list[Any]:
                own_pairs = zip(own, places, strict=True)
                return self._reduce_pairs(kind, reduce_op, own_pairs, options, is_own=True)

            results: list[Any] = self._replica_set.with_components(kind, values, reduced)[0]
            return results
        if self._variable_partitioner is not None:
            pairs = [(with_whole_values(reduce_op, value), where) for value, where in pairs]
        with self._replicas.call(kind, options=options) as call:
            return reduce_pairs(call, ReduceOp.parse(reduce_op), list(pairs), self._container)

    @context.collective("update", writes=True)
    def update(
        self,
        var: Variable,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        group: bool = True,
    ) -> Any:
        """Call ``fn(var, *args, **kwargs)`` in update context, where writes are local.

        **Collective**: every rank makes the call. For a mirrored variable, the ranks compare the
        numbers and NumPy arrays among the arguments. They do not compare device arrays, nor values
        that `fn` gets from elsewhere: `assert_replicas_agree` shows whether those were equal.

        Parameters
        ----------
        var : Variable
            A variable of this strategy.
        fn : callable
            Called on each rank with `var` and the arguments.
        args, kwargs : sequence, mapping
            Further arguments of `fn`. A `Mirrored` value is passed as this rank's component.
            Numbers and arrays must be the same on every rank.
        group : bool
            Whether to return the result merged, or a tuple with this rank's.

        Returns
        -------
        nest or tuple
            The result of `fn`, with arrays and numbers as distributed values; this rank's results
            in a tuple if `group` is false.

        Raises
        ------
        ValueError
            If an argument holds a `PerReplica`.
        TypeError
            If `var` is not a variable.
        CollectiveMismatchError
            If numbers or arrays differ between ranks: reduce or broadcast them first.
        ContextError
            Inside a replica function, or for a variable of another strategy.
        """
        if not isinstance(var, Variable):
            raise TypeError(f"update: var must be a mpistrat.Variable, not {var!r}.")
        self._check_is_ours("update", var)
        # The ranks of a replica pass different values for their parts of a split variable.
        if isinstance(var, MirroredVariable) and var.split_axis is None:
            self._compare_arguments(var, args, kwargs)
        what = f"update of variable {var.name!r}"
        if isinstance(var, SyncOnReadVariable) and not self._replica_set.is_one:
            self._collectives.channel.ledger.updates += 1
            results = self._replica_set.each(
                lambda: context.result_in_update_context(
                    self._container, what, fn, (var,), args, kwargs or {}
                )
            )
            return self._replica_set.joined(results) if group else tuple(results)
        return call_in_update_context(self._container, what, fn, (var,), args, kwargs, group)

    def _compare_arguments(self, var: Variable, args: Any, kwargs: Any) -> None:
        """Raise on all ranks if plain values for `var` differ between them. **Collective**."""
        if self._collectives.size == 1:
            return
        leaves, _ = nests.flatten((args, kwargs))
        if any(isinstance(leaf, PerReplica) for leaf in leaves):
            return  # `update` raises for it later
        plain = [np.asarray(leaf) for leaf in leaves if isinstance(leaf, _PLAIN)]
        plain = [each for each in plain if not each.dtype.hasobject]
        if plain:
            with self._collectives.call("update", var.name) as call:
                call.include_values(plain)
                call.agree("plain values, which are the same on every rank")

    def gradient_buffers(self, variables: Sequence[Variable]) -> list[np.ndarray]:
        """Return memory for the gradients of this replica, one array for each of `variables`.

        Under `CentralStorageStrategy`, `apply_gradients` does not copy a gradient that is in its
        buffer, and later calls with these variables return the same buffers. Other strategies
        return plain arrays. **Collective** the first time, then **Local**.

        Parameters
        ----------
        variables : sequence of Variable
            Variables of this strategy; the same on all ranks.

        Returns
        -------
        list of array
            Writable host arrays with the shapes and dtypes of the variables. Their contents are
            undefined after a step of an optimizer.

        Raises
        ------
        ContextError
            For a variable of another strategy.
        """
        for variable in variables:
            self._check_is_ours("gradient_buffers", variable)
        return [np.zeros(each.shape, each.dtype) for each in variables]

    @context.collective("assert_replicas_agree")
    def assert_replicas_agree(self, variables: object) -> None:
        """Check that mirrored variables still hold the same bytes on every rank.

        **Collective**: every rank passes the same variables. The ranks compare one digest per
        variable, all in one message of 16 bytes per variable. Values on a GPU are copied to the
        host for that.

        Parameters
        ----------
        variables : Variable, model, optimizer, Checkpoint, or dicts, lists and tuples of them
            Objects are searched for variables: the children of optimizers, metrics and
            checkpoints, and the attributes of others. SyncOnRead variables in them are skipped.

        Raises
        ------
        ReplicaDriftError
            On every rank, if a variable differs. It names the first one and the groups of ranks
            whose values are equal. The strategy stays usable.
        ValueError
            For a SyncOnRead or sharded variable that is passed directly or in a dict, list or
            tuple, or if there is no variable.
        TypeError
            For an object that cannot hold variables.
        ContextError
            Inside a replica function, or for a variable of another strategy.
        """
        what = "assert_replicas_agree"
        with self._collectives.call(what) as call:
            found = variables_to_compare(what, variables)
            for variable in found.values():
                self._check_is_ours(what, variable)
            check_replicas_agree(call, found)

    def dump_flight_record(self, path: str | os.PathLike[str]) -> str:
        """Write the last collectives of this rank, as JSON for ``mpistrat explain``. Local.

        Parameters
        ----------
        path : path
            A folder, which is created if missing, for a file ``flight.rank<R>.json``; or a file
            name with ``{rank}`` in it.

        Returns
        -------
        str
            Name of the file that this rank has written, complete and on disk.

        Raises
        ------
        ValueError
            If `path` names a single file: the ranks would overwrite each other's.
        TypeError
            If `path` is not a path.
        OSError
            If the file cannot be written.
        """
        return str(flight_dumps.dump(path, self._collectives.channel))

    def _check_is_ours(self, what: str, variable: Variable) -> None:
        if variable.strategy not in (None, self._container):
            raise ContextError(
                f"{what}: the variable {variable.name!r} belongs to {variable.strategy!r}, not to "
                f"{self._container!r}. Different strategies cannot be mixed."
            )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {self._container!r}>"

    def colocate_vars_with(
        self, colocate_with_variable: Variable | tuple[str, ...]
    ) -> AbstractContextManager[None]:
        """Place new variables on the devices of another one, in the ``with`` block. Local.

        Every variable of a strategy is on every replica anyway, so this only checks its argument.

        Parameters
        ----------
        colocate_with_variable : Variable or tuple of str
            A variable of this strategy, or the result of `non_slot_devices`.

        Returns
        -------
        context manager
            It has no effect.

        Raises
        ------
        ValueError
            If it is neither.
        ContextError
            Outside the scope of this strategy.
        """
        self._require_scope("colocate_vars_with")
        self._check_locality("colocate_vars_with", colocate_with_variable)
        return contextlib.nullcontext()

    def _check_locality(self, what: str, place: Any) -> None:
        """Check that `place` is a variable of this strategy or its non-slot devices."""
        if isinstance(place, Variable):
            is_ours = self.variable_created_in_scope(place)
        else:
            is_ours = isinstance(place, tuple) and place == self.parameter_devices
        if not is_ours:
            raise ValueError(
                f"{what} takes a variable created in the scope of this strategy, or the result of "
                f"non_slot_devices, not {place!r}."
            )

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Return whether the variable `v` belongs to this strategy. Local.

        Parameters
        ----------
        v : Variable
            Any variable.

        Returns
        -------
        bool
            True if it was created in the scope of this strategy.
        """
        return v.strategy is self._container

    def value_container(self, value: Any) -> Any:
        """Return the variable or distributed value that `value` is a component of. Local.

        Parameters
        ----------
        value : object
            A component, or any other object.

        Returns
        -------
        Variable, DistributedValues or object
            `value` itself if its container no longer exists.
        """
        return container_of(value)

    # Variables: which kinds a strategy creates, and in which contexts they may be used

    _is_remote = False
    """Whether other ranks store the variables, which this rank reaches by messages."""
    _placement: type[Whole] = Whole
    """Placement of mirrored variables that are neither cut nor counters."""
    _variable_partitioner: Callable[..., Any] | None = None
    """Function that says into how many parts a variable is cut."""

    def _kind_of_variable(self, initial: Any, on_read: bool) -> tuple[type[Variable], type[Whole]]:
        """Return the class and the placement of a new variable."""
        if on_read:
            return SyncOnReadVariable, Axis if initial.is_split else Whole
        if initial.is_flat:
            return ShardedVariable, Flat
        if initial.is_cut_by(self._variable_partitioner):
            return ShardedVariable, Rows
        if initial.is_replicated:  # every rank changes it in the same way, without a message
            return MirroredVariable, Whole
        is_split = initial.is_split and self._placement is Whole
        return MirroredVariable, Axis if is_split else self._placement

    def _note_variable(self, variable: Variable) -> None:
        """Register a variable that was created or copied."""
        self._collectives.note_variable(variable)

    def _note_optimizer(self, optimizer: Any) -> None:
        """Register a new optimizer, which all ranks create."""
        self._collectives.note_optimizer(optimizer)

    def _check_may_save(self, what: str) -> None:
        """Raise an error on a rank that cannot save or restore."""

    # Replicas of this rank: see `ReplicaSet`

    @property
    def local_replica_ids(self) -> range:
        """Numbers of the replicas of this rank. Local."""
        return self._layout.local_replicas

    def _make_together(self, make: Callable[[], Any], name: str | None, modes: str) -> Any:
        """Return the variable called `name` that the replicas of this rank create together."""
        what = f"Variable of {name!r}{modes}"
        return self._replica_set.make_together(self._container, make, what)

    # Implementation of the methods of `Strategy` that distribute datasets

    @context.collective("distribute_dataset")
    def _distribute_dataset(
        self, dataset: Dataset, options: InputOptions | None
    ) -> DistributedDataset:
        """Split each global batch over replicas. **Collective**."""
        from mpistrat.data.distribute import distribute  # programs without data need none of it

        return self._distributed(
            lambda: distribute(dataset, options, self._collectives, self._collectives.device)
        )

    @context.collective("distribute_datasets_from_function")
    def _distribute_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None
    ) -> DistributedDataset:
        """Join the datasets of the ranks to one distributed dataset. **Collective**."""
        from mpistrat.data.distribute import distribute_from_function

        return self._distributed(
            lambda: distribute_from_function(
                dataset_fn, options, self._collectives, self._collectives.device
            )
        )

    def _distributed(self, distribute: Callable[[], DistributedDataset]) -> DistributedDataset:
        """Return the joined results of `distribute` for the replicas of this rank."""
        replicas = self._replica_set
        return self._owned(replicas.joined_datasets(replicas.each(distribute)))

    def _owned(self, dataset: DistributedDataset) -> DistributedDataset:
        dataset.strategy = self._container
        check, owner = context.require_cross_replica, self._container
        dataset._check_context = functools.partial(check, owner, "next(iterator)")
        return dataset

    def _local_results(self, value: Any) -> tuple[Any, ...]:
        """Return a tuple with this rank's component of `value`."""
        is_variable = isinstance(value, Variable)
        return value.values if is_variable else self._replica_set.local_results(value)

    def _values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return ``value_fn(context)`` with each leaf as a `PerReplica`."""
        num_replicas = self._layout.num_replicas
        return self._replica_set.values_from(
            lambda ids: [value_fn(ValueContext(each, num_replicas)) for each in ids]
        )
