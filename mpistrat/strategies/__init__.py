"""Strategies, and the functions that ask which one is current."""

from __future__ import annotations

from mpistrat import context
from mpistrat.options import ReduceOp
from mpistrat.replica import ReplicaContext
from mpistrat.strategies.central import CentralStorageStrategy
from mpistrat.strategies.cluster_resolver import print_on_chief
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.strategies.extended_v1 import MultiStepContext, ParameterServerStrategyV1
from mpistrat.strategies.mpi import MPIStrategy
from mpistrat.strategies.one_replica import (
    OneDeviceStrategy,
    default_replica_context,
    default_strategy,
)
from mpistrat.strategies.strategy import Strategy

__all__ = [
    "CentralStorageStrategy",
    "MPIStrategy",
    "MultiStepContext",
    "OneDeviceStrategy",
    "ParameterServerStrategyV1",
    "Strategy",
    "StrategyExtended",
    "experimental_set_strategy",
    "get_loss_reduction",
    "get_replica_context",
    "get_strategy",
    "has_strategy",
    "in_cross_replica_context",
    "print_on_chief",
]


def get_strategy() -> Strategy:
    """Return the strategy of the innermost scope, or the default strategy. Local.

    Returns
    -------
    Strategy
        The current strategy.

    Examples
    --------
    >>> with strategy.scope():
    ...     ms.get_strategy() is strategy
    True
    """
    frame = context.current()
    if frame is None:
        return default_strategy()
    strategy: Strategy = frame.strategy
    return strategy


def has_strategy() -> bool:
    """Return whether a strategy other than the default one is current. Local.

    Returns
    -------
    bool
        True in a scope, in `Strategy.run`, and after `experimental_set_strategy`.

    Examples
    --------
    >>> ms.has_strategy()
    False
    """
    return not context.is_default(get_strategy())


def in_cross_replica_context() -> bool:
    """Return whether this code runs in cross-replica context. Local.

    Returns
    -------
    bool
        True in a scope, a ``merge_fn`` or an update, where all replicas act together. False in a
        replica function and outside every scope, unless `experimental_set_strategy` was called.

    Examples
    --------
    >>> with strategy.scope():
    ...     ms.in_cross_replica_context(), strategy.run(ms.in_cross_replica_context)
    (True, PerReplica(False))
    """
    frame = context.current()
    return frame is not None and frame.kind is not context.Kind.REPLICA


def get_replica_context() -> ReplicaContext | None:
    """Return the current replica context, ``None`` in cross-replica context. Local.

    Returns
    -------
    ReplicaContext or None
        In the default context, the replica context of the default strategy.

    Examples
    --------
    >>> strategy.run(lambda: ms.get_replica_context().all_reduce("mean", 2.0))
    PerReplica(np.float64(2.0))
    """
    frame = context.current()
    if frame is None:
        return default_replica_context()
    replica_context: ReplicaContext | None = frame.replica_context
    return replica_context


def experimental_set_strategy(strategy: Strategy | None) -> None:
    """Make `strategy` current in this thread from now on, without a ``with`` block. Local.

    Parameters
    ----------
    strategy : Strategy or None
        The new strategy. ``None`` restores the default strategy.

    Raises
    ------
    ContextError
        Inside a scope.

    Examples
    --------
    >>> ms.experimental_set_strategy(strategy)
    >>> ms.get_strategy() is strategy
    True
    >>> ms.experimental_set_strategy(None)
    """
    if strategy is not None and not isinstance(strategy, Strategy):
        raise TypeError(f"experimental_set_strategy takes a strategy or None, not {strategy!r}.")
    if strategy is None or context.is_default(strategy):
        context.set_base(None)
    else:
        context.set_base(context.Frame(context.Kind.CROSS_REPLICA, strategy))


def get_loss_reduction() -> ReduceOp:
    """Return how the losses of replicas are combined: always `ReduceOp.SUM`. Local.

    In tf.distribute, only one kind of estimator has a different value.

    Returns
    -------
    ReduceOp
        `ReduceOp.SUM`.

    Examples
    --------
    >>> ms.get_loss_reduction()
    <ReduceOp.SUM: 'SUM'>
    """
    return ReduceOp.SUM
