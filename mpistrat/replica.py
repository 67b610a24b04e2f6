"""Replica context: what a replica may call."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, overload

import numpy as np

from mpistrat import context
from mpistrat.arrays import Array
from mpistrat.collectives.all_reduce import all_reduce
from mpistrat.collectives.collectives import Collectives
from mpistrat.collectives.nested import PendingReduction, start_all_reduce_nest
from mpistrat.collectives.objects import barrier, broadcast_object, gather_objects
from mpistrat.collectives.replica_moves import ReplicaMoves
from mpistrat.errors import ContextError, warn_deprecated
from mpistrat.options import CommunicationOptions, ReduceOp, ReduceOpLike
from mpistrat.system.callsite import call_site, failure_site
from mpistrat.tracing.spans import span
from mpistrat.values import DistributedValues, Number, T, localize, per_replica

__all__ = ["ReplicaContext"]


class ReplicaContext(ReplicaMoves):
    """The view that one replica has of its strategy, inside `Strategy.run`.

    Got by `mpistrat.get_replica_context()`. As a context manager it makes itself current.

    Parameters
    ----------
    strategy : Strategy
    replica_id_in_sync_group : int, optional
        The rank, which is also the default.

    Raises
    ------
    ValueError
        If the number is not that of this rank's replica.

    Examples
    --------
    >>> def step():
    ...     replica = ms.get_replica_context()
    ...     noise = replica.rng(7).normal(size=2)  # another one on each replica
    ...     pending = replica.start_all_reduce("mean", noise)
    ...     rows = replica.all_gather(replica.all_reduce("sum", np.ones((2, 3))), axis=0)
    ...     names = replica.all_gather_object("any"), replica.broadcast_object("object")
    ...     replica.barrier()
    ...     mean = replica.merge_call(lambda strategy, x: strategy.reduce("mean", x), (2.0,))
    ...     return mean, pending.wait().shape
    >>> strategy.run(step)
    (PerReplica(np.float64(2.0)), (PerReplica(2),))
    >>> def move():
    ...     replica, own = ms.get_replica_context(), np.arange(4.0)
    ...     part = replica.reduce_scatter("sum", own), replica.scatter(own)
    ...     turned = replica.all_to_all(own), replica.broadcast(own), replica.scan("sum", own)
    ...     return replica.shift(own, fill=-1)  # of the replica before, which one replica lacks
    >>> strategy.run(move)
    PerReplica(array([-1., -1., -1., -1.]))
    """

    def __init__(self, strategy: Any, replica_id_in_sync_group: int | None = None) -> None:
        self._strategy = strategy
        self._entered: list[AbstractContextManager[None]] = []
        if replica_id_in_sync_group is not None:
            rank = self._collectives.rank
            if replica_id_in_sync_group != rank:
                raise ValueError(
                    f"This rank owns replica {rank}, not {replica_id_in_sync_group!r}."
                )

    def __enter__(self) -> ReplicaContext:
        current = context.current()
        if current is not None and not current.strategy.extended._is_default:
            context.mode_for(self._strategy, "This ReplicaContext")
        frame = context.Frame(context.Kind.REPLICA, self._strategy, self)
        self._entered.append(context.entered(frame))
        self._entered[-1].__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._entered.pop().__exit__(*exc_info)

    def __repr__(self) -> str:
        return f"<ReplicaContext of {self._strategy!r}>"

    @property
    def strategy(self) -> Any:
        """The strategy that runs this replica. Local."""
        self._check()
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """Number of this replica: its rank. Local."""
        self._check()
        return self._collectives.rank

    def rng(self, *key: int) -> np.random.Generator:
        """Return a generator of random numbers that depend on `key` and this replica alone. Local.

        There is no state to save: ``rng(seed, int(optimizer.iterations))`` gives the same numbers
        when a job resumes.

        Parameters
        ----------
        *key : int
            At least one, none negative. Each key gives an independent stream for each replica.

        Returns
        -------
        numpy.random.Generator
            A PCG64 whose seed sequence has the entropy `key` and the spawn key
            ``(2**32 - 2, replica_id)``; see "Parallel Random Number Generation" in NumPy's manual.

        Raises
        ------
        TypeError, ValueError
            If a part of the key is no integer or negative, or if there is none.
        """
        self._check()
        from mpistrat.data.random import replica_rng

        return replica_rng(key, self._collectives.rank)

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that reduce together: the number of ranks. Local."""
        self._check()
        return self._collectives.size

    @property
    def devices(self) -> tuple[str, ...]:
        """The device string of this replica, in a tuple. Deprecated. Local."""
        self._check()
        warn_deprecated("ReplicaContext.devices", "Use strategy.extended.device.")
        return (str(self._strategy.extended.device),)

    @overload
    def merge_call(
        self,
        merge_fn: Callable[..., DistributedValues[T]],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> T: ...

    @overload
    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any: ...

    def merge_call(
        self,
        merge_fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Call ``merge_fn(strategy, *args, **kwargs)`` in cross-replica context.

        **Collective**: every replica makes the call.

        Parameters
        ----------
        merge_fn : callable
        args, kwargs : sequence, mapping
            Arrays and numbers, also in nests, arrive as `PerReplica`, anything else as it is.

        Returns
        -------
        nest
            What `merge_fn` returns, with this replica's component of distributed values.

        Raises
        ------
        ContextError
            If this replica context is not the current one.
        """
        self._check()
        channel = self._collectives.channel
        channel.ledger.merge_calls += 1
        wrap = per_replica if self._strategy.extended._distributes_variables else _unchanged
        args = [wrap(each) for each in args]
        kwargs = {name: wrap(each) for name, each in (kwargs or {}).items()}
        frame = context.Frame(context.Kind.CROSS_REPLICA, self._strategy)
        with context.entered(frame), span("merge_call", "merge_call"):
            try:
                result = merge_fn(self._strategy, *args, **kwargs)
            except BaseException as error:
                channel.note_failure(error, failure_site(error.__traceback__))
                raise
        return localize(result)

    @overload
    def all_reduce(
        self,
        reduce_op: ReduceOpLike,
        value: Number,
        options: CommunicationOptions | None = None,
        out: None = None,
    ) -> np.number[Any]: ...

    @overload
    def all_reduce(
        self,
        reduce_op: ReduceOpLike,
        value: Array,
        options: CommunicationOptions | None = None,
        out: Array | None = None,
    ) -> Array: ...

    @overload
    def all_reduce(
        self,
        reduce_op: ReduceOpLike,
        value: T,
        options: CommunicationOptions | None = None,
        out: T | None = None,
    ) -> T: ...

    def all_reduce(
        self,
        reduce_op: ReduceOpLike,
        value: Any,
        options: CommunicationOptions | None = None,
        out: Any = None,
    ) -> Any:
        """Reduce `value` over replicas; every replica gets the result.

        **Collective**, with the same reduction, structure, shapes and dtypes on every replica.

        Parameters
        ----------
        reduce_op : ReduceOp or str
        value : nest of arrays, numbers, IndexedSlices and PyTorch tensors
            Small arrays travel together. `IndexedSlices` are concatenated in rank order. Tensors
            come back attached to the graph, which can be differentiated once. The backward pass
            is collective too: every replica runs it, through the same calls in the same order.
        options : CommunicationOptions, optional
        out : nest of arrays, optional
            Where the results go: arrays of their shapes and dtypes, or `value` itself, which is
            fastest for large arrays. Ranks may differ in it. Not for tensors and IndexedSlices.

        Returns
        -------
        nest
            `out`, or as `value`, on the same device. MEAN of integers is float64.

        Raises
        ------
        ContextError
            If this replica context is not the current one.
        ValueError, TypeError
            For a bad argument, such as an `out` that the result does not fit.
        EpochError
            If the replicas disagree.
        """
        self._check()
        return all_reduce(self._collectives, reduce_op, value, options, out)

    @overload
    def start_all_reduce(
        self, reduce_op: ReduceOpLike, value: Number, options: CommunicationOptions | None = None
    ) -> PendingReduction[np.number[Any]]: ...

    @overload
    def start_all_reduce(
        self, reduce_op: ReduceOpLike, value: Array, options: CommunicationOptions | None = None
    ) -> PendingReduction[Array]: ...

    @overload
    def start_all_reduce(
        self, reduce_op: ReduceOpLike, value: T, options: CommunicationOptions | None = None
    ) -> PendingReduction[T]: ...

    def start_all_reduce(
        self,
        reduce_op: ReduceOpLike,
        value: Any,
        options: CommunicationOptions | None = None,
    ) -> PendingReduction[Any]:
        """Begin `all_reduce`, and return at once.

        **Collective**: every replica makes the call. Several reductions may be under way, other
        collectives may come between, and handles may be waited for in any order.

        Parameters
        ----------
        reduce_op, value, options
            As for `all_reduce`. Arrays are copied, so they may be written to at once. PyTorch
            tensors, such as the ``.grad`` of a parameter, are reduced in place: ``wait()`` writes
            to them and returns them. They must have no ``requires_grad``. `IndexedSlices` are
            reduced before this returns, and with the options `deterministic` and `wire_dtype`
            everything is.

        Returns
        -------
        PendingReduction
            Its ``wait()`` gives the result. To drop it without is an error, which the next
            collective of this rank raises.

        Raises
        ------
        ContextError, ValueError, TypeError, EpochError, NotImplementedError
            As `all_reduce`, the last for tensors with ``requires_grad``.
        """
        self._check()
        with self._collectives.call("start_all_reduce", options=options) as call:
            op, nest = ReduceOp.parse(reduce_op), localize(value)
            end = start_all_reduce_nest(call, op, nest)
            when_dropped = functools.partial(call.channel.close_for_dropped, call_site())
        return PendingReduction(end, when_dropped)

    def barrier(self) -> None:
        """Return when every replica has made this call. **Collective**."""
        self._check("barrier")
        barrier(self._collectives)

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return a copy of the object of replica `root`, which all name. **Collective**."""
        self._check("broadcast_object")
        return broadcast_object(self._collectives, "broadcast_object", obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return copies of the objects of all replicas, in order. **Collective**."""
        self._check("gather_objects")
        return gather_objects(self._collectives, "all_gather_object", obj)

    def _group(self) -> Collectives:
        self._check()
        return self._collectives

    @property
    def _collectives(self) -> Collectives:
        collectives: Collectives = self._strategy.extended._collectives
        return collectives

    def _check(self, twin: str | None = None) -> None:
        # `twin` is the method of the strategy that does the same in cross-replica context.
        frame = context.current()
        if frame is not None and frame.replica_context is self:
            return
        if frame is None and self._strategy.extended._is_default:
            return
        here = "the default context" if frame is None else f"the {frame.kind.value}"
        instead = "use the strategy that it is given" if twin is None else f"use strategy.{twin}"
        raise ContextError(
            f"This ReplicaContext belongs to a function given to run of {self._strategy!r}, but "
            f"it is used in {here}. Ask mpistrat.get_replica_context() for the current one inside "
            f"strategy.run; inside a merge_fn {instead}."
        )


def _unchanged(value: Any) -> Any:
    return value
