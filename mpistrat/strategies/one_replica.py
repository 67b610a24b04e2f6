"""Strategies of one replica without MPI: the default one and `OneDeviceStrategy`."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mpistrat import context, nests
from mpistrat.arguments import as_integer
from mpistrat.arrays import Device
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import ContextError, warn_deprecated
from mpistrat.layout import Layout
from mpistrat.mpi.launcher import find_launcher
from mpistrat.options import (
    CommunicationOptions,
    InputContext,
    InputOptions,
    ReduceOp,
    ReduceOpLike,
    ValueContext,
)
from mpistrat.replica import ReplicaContext, ShardGroup
from mpistrat.strategies.cluster_resolver import ClusterResolver
from mpistrat.strategies.destinations import parse_place
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.strategies.strategy import Strategy
from mpistrat.user_warnings import warn_once
from mpistrat.values import PerReplica, unwrap_mirrored
from mpistrat.variables import Variable

if TYPE_CHECKING:
    from mpistrat.data.dataset import Dataset


class DefaultReplicaContext(ReplicaContext):
    """The replica context outside every scope.

    Values of other strategies may get here by mistake, so its collectives warn if the program
    probably lacks a `strategy.run`.
    """

    # Only here, because looking into each value would slow down the calls inside `run`.

    def all_reduce(self, reduce_op: Any, value: Any, options: Any = None, out: Any = None) -> Any:
        """Reduce `value` over one replica."""
        _refuse_per_replica("all_reduce", value)
        return super().all_reduce(reduce_op, value, options, out)

    def start_all_reduce(self, reduce_op: Any, value: Any, options: Any = None) -> Any:
        """Begin `all_reduce`."""
        _refuse_per_replica("start_all_reduce", value)
        return super().start_all_reduce(reduce_op, value, options)

    def all_gather(self, value: Any, axis: int, options: Any = None) -> Any:
        """Concatenate `value` over one replica."""
        _refuse_per_replica("all_gather", value)
        return super().all_gather(value, axis, options)

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call `merge_fn` with the default strategy."""
        warn_of_one_replica()
        return super().merge_call(merge_fn, args, kwargs)

    def barrier(self) -> None:
        """Return at once."""
        warn_of_one_replica()
        super().barrier()

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return a copy of `obj`."""
        warn_of_one_replica()
        return super().broadcast_object(obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return a copy of `obj` in a list."""
        warn_of_one_replica()
        return super().all_gather_object(obj)

    def _group(self) -> Collectives:
        warn_of_one_replica()
        return super()._group()

    @property
    def shards(self) -> ShardGroup:
        """The one rank that computes this replica."""
        warn_of_one_replica()
        return super().shards


def warn_of_one_replica() -> None:
    """Warn of a collective of the default replica context if a strategy of several is open."""
    for strategy in context.open_strategies()[:1]:
        warn_once(
            "this collective of the default replica context has one replica, this process, while "
            f"{strategy!r} with its {strategy.num_replicas_in_sync} replicas is open: forgot "
            "strategy.run? Call it in a function given to strategy.run(fn, args=...), or outside "
            "of one use strategy.reduce(op, value) or strategy.gather(value, axis)."
        )


def _refuse_per_replica(kind: str, value: Any) -> None:
    for leaf in nests.flatten(value)[0]:
        if isinstance(leaf, PerReplica):
            raise TypeError(leaf._why_no_array(kind))


class DefaultExtended(StrategyExtended):
    """Leaves values, variables and datasets unchanged."""

    _is_default = True
    _distributes_variables = False
    _context_class = DefaultReplicaContext

    def __init__(self) -> None:
        super().__init__(Collectives.solo(Device("cpu")))

    def _merge(self, result: Any) -> Any:
        return result

    @context.collective("reduce")
    def _reduce(
        self, reduce_op: ReduceOpLike, value: Any, axis: Any = None, is_own: bool = False
    ) -> Any:
        """Return `value` unchanged; reduce it along `axis` if that is given."""
        if axis is None:
            ReduceOp.parse(reduce_op)
            return value
        return super()._reduce(reduce_op, value, axis)

    def _reduce_pairs(
        self,
        kind: str,
        reduce_op: ReduceOpLike,
        pairs: Iterable[tuple[Any, Any]],
        options: CommunicationOptions | None,
        is_own: bool = False,
    ) -> list[Any]:
        """Check the operation and destinations, and return the values without a wrapper."""
        reduced = super()._reduce_pairs(kind, reduce_op, pairs, options)
        return [unwrap_mirrored(each) for each in reduced]

    def broadcast_to(self, array: Any, destinations: Any) -> Any:
        """Check `destinations`, and return `array` without a wrapper."""
        return unwrap_mirrored(super().broadcast_to(array, destinations))

    def _require_scope(self, what: str) -> None:
        """Check that `what` is called outside the scopes of other strategies."""
        context.mode_for(self._container, what)

    def non_slot_devices(self, var_list: Sequence[Variable]) -> Any:
        """Return the variable of `var_list` that comes first by name. Deprecated."""
        warn_deprecated("non_slot_devices", "Every variable lives on every replica.")
        return min(var_list, key=lambda variable: variable.name)

    def value_container(self, value: Any) -> Any:
        """Return `value` itself: nothing is wrapped."""
        return value

    @context.collective("distribute_dataset")
    def _distribute_dataset(self, dataset: Dataset, options: InputOptions | None) -> Any:
        """Return `dataset` unchanged."""
        return dataset

    @context.collective("distribute_datasets_from_function")
    def _distribute_from_function(
        self, dataset_fn: Callable[[InputContext], Dataset], options: InputOptions | None
    ) -> Any:
        """Return ``dataset_fn(InputContext())`` unchanged."""
        return dataset_fn(InputContext())

    def _values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return ``value_fn(ValueContext())`` unchanged."""
        return value_fn(ValueContext())

    def variable_created_in_scope(self, v: Variable) -> bool:
        """Return whether the variable `v` is a plain one."""
        return v.strategy is None

    def _local_results(self, value: Any) -> tuple[Any, ...]:
        """Return a tuple with `value`."""
        return (value,)

    @property
    def worker_devices(self) -> tuple[str, ...]:
        """Raise an error: the default strategy does not know its devices."""
        raise ContextError(
            "The default strategy has no worker devices. Enter the scope of an MPIStrategy or a "
            "OneDeviceStrategy first."
        )


class DefaultStrategy(Strategy):
    """The strategy outside every scope. `mpistrat.get_strategy()` returns the only instance."""

    def __init__(self) -> None:
        # The cache of `default_strategy` is empty only while it creates the single instance.
        if default_strategy.cache_info().currsize:
            raise RuntimeError(
                "There is one default strategy: ask mpistrat.get_strategy() for it outside every "
                "scope."
            )
        super().__init__(DefaultExtended())

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        raise RuntimeError("The default strategy cannot be copied: there is only one.")

    def __repr__(self) -> str:
        return "<the default strategy>"


@functools.lru_cache(maxsize=1)
def default_strategy() -> DefaultStrategy:
    """Return the default strategy."""
    return DefaultStrategy()


@functools.lru_cache(maxsize=1)
def default_replica_context() -> ReplicaContext:
    """Return the replica context outside every scope."""
    return DefaultReplicaContext(default_strategy())


class OneDeviceStrategy(Strategy):
    """One replica in this process. Otherwise like `MPIStrategy` on one rank.

    Parameters
    ----------
    device : str
        Device of the replica: ``"cpu:0"``, ``"gpu:K"``, or a longer form such as
        ``"/device:CPU:0"``.
    num_replicas : int, optional
        Number of replicas to run, one after the other. Results then have the same bits as under an
        `MPIStrategy` with as many replicas.

    Raises
    ------
    TypeError, ValueError
        For an unknown device.
    LaunchError
        If the requested GPU does not exist.

    Examples
    --------
    >>> strategy = ms.OneDeviceStrategy("cpu:0")
    >>> strategy.num_replicas_in_sync
    1
    """

    def __init__(self, device: str = "cpu:0", *, num_replicas: int | None = None) -> None:
        if not isinstance(device, str):
            raise TypeError(f'device must be a string such as "cpu:0", not {device!r}.')
        place = parse_place(device, num_tasks=1)
        own_device = Device.resolve(f"{place.kind}:{place.index}", local_rank=0)
        ranks = Collectives.solo(own_device)
        if num_replicas is None:
            super().__init__(StrategyExtended(ranks))
            return
        layout = Layout.shared(as_integer("num_replicas", num_replicas), 1, 0)
        ordered = Collectives(
            ranks.channel, ranks.capabilities, ranks.options, layout, is_deterministic=True
        )
        super().__init__(StrategyExtended(ordered))

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """Facts about a job with one rank. Local."""
        launcher = find_launcher()
        host = launcher.node_name or platform.node()
        return ClusterResolver(0, 1, 0, (host,), launcher.name)

    def __repr__(self) -> str:
        part = context.layout_of(self).part
        return f"<OneDeviceStrategy{f' {part}' if part else ''} on {self.extended.device}>"
