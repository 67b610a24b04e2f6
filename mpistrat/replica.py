"""Replica context: the functions that a replica may call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, overload

import numpy as np

from mpistrat import context
from mpistrat.collectives.collectives import Collectives
from mpistrat.collectives.objects import barrier, broadcast_object, gather_objects
from mpistrat.collectives.replica_collectives import GroupCollectives
from mpistrat.errors import ContextError, warn_deprecated
from mpistrat.layout import Layout
from mpistrat.values import DistributedValues, T


class ReplicaContext(GroupCollectives):
    """The interface of one replica inside `Strategy.run`: its number and its collectives.

    Call `mpistrat.get_replica_context()` to get it. Used as a context manager, it becomes the
    current replica context.

    Parameters
    ----------
    strategy : Strategy
        Strategy that runs the replica.
    replica_id_in_sync_group : int, optional
        Number of this rank's replica, which is also the default.

    Raises
    ------
    ValueError
        If the number belongs to a replica of a different rank.

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
            own = context.layout_of(strategy).replica_id
            if replica_id_in_sync_group != own:
                raise ValueError(f"This rank owns replica {own}, not {replica_id_in_sync_group!r}.")

    def __enter__(self) -> ReplicaContext:
        current = context.current()
        if current is not None and not context.is_default(current.strategy):
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
        """Strategy that runs this replica. Local."""
        self._check()
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """Number of this replica; equal to the rank if each rank is one replica. Local."""
        self._check()
        return self._layout.replica_id

    def rng(self, *key: int) -> np.random.Generator:
        """Return a random generator that depends only on `key` and this replica. Local.

        There is no state to save: ``rng(seed, int(optimizer.iterations))`` returns the same numbers
        when a job resumes.

        Parameters
        ----------
        *key : int
            One or more integers, none negative. Different keys, and different replicas, have
            independent streams.

        Returns
        -------
        numpy.random.Generator
            A PCG64 whose seed sequence has the entropy `key` and the spawn key
            ``(2**32 - 2, replica_id)``; see "Parallel Random Number Generation" in NumPy's manual.

        Raises
        ------
        TypeError, ValueError
            If a part of the key is not an integer or negative, or if the key is empty.
        """
        self._check()
        from mpistrat.data.random import replica_rng

        return replica_rng(key, self._layout.replica_id)

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that reduce together. Local."""
        self._check()
        return self._layout.num_replicas

    @property
    def shards(self) -> ShardGroup:
        """Collectives of the ranks that compute this replica together. Local.

        There is one rank, unless the strategy was created with `ranks_per_replica`.
        """
        self._check()
        return ShardGroup(self)

    @property
    def devices(self) -> tuple[str, ...]:
        """Device string of this replica, in a tuple. Deprecated. Local."""
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
            Called with the strategy and the arguments, once for all replicas of the rank.
        args, kwargs : sequence, mapping
            Further arguments of `merge_fn`. Arrays and numbers, also in nests, are passed as
            `PerReplica`, anything else unchanged.

        Returns
        -------
        nest
            The result of `merge_fn`, with this replica's component of distributed values.

        Raises
        ------
        ContextError
            If this replica context is not the current one.
        """
        self._check()
        replicas = context.replica_set_of(self._strategy)
        return replicas.merge_call(self._strategy, merge_fn, args, kwargs or {})

    def barrier(self) -> None:
        """Return when every rank of every replica has made this call. **Collective**."""
        self._check("barrier")
        barrier(context.collectives_of(self._strategy))

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return a copy of the object of replica `root`. **Collective**.

        Parameters
        ----------
        obj : object
            The object to send, as pickle; the objects of replicas other than `root` are ignored.
        root : int
            Number of the replica that sends its object; the same on all replicas.

        Returns
        -------
        object
            A copy, on `root` as well.
        """
        self._check("broadcast_object")
        return broadcast_object(context.replicas_of(self._strategy), "broadcast_object", obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return copies of the objects of all replicas, in order. **Collective**.

        Parameters
        ----------
        obj : object
            The object of this replica, which is sent as pickle.

        Returns
        -------
        list
            One copy per replica.
        """
        self._check("gather_objects")
        return gather_objects(context.replicas_of(self._strategy), "all_gather_object", obj)

    def _group(self) -> Collectives:
        frame = context.current()
        if frame is None or frame.replica_context is not self:  # saves a call in the usual case
            self._check()
        return context.replicas_of(self._strategy)

    @property
    def _layout(self) -> Layout:
        layout: Layout = context.layout_of(self._strategy)
        return layout

    def _check(self, twin: str | None = None) -> None:
        # `twin` is the method of the strategy that does the same in cross-replica context.
        frame = context.current()
        if frame is not None and frame.replica_context is self:
            return
        if frame is None and context.is_default(self._strategy):
            return
        here = "the default context" if frame is None else f"the {frame.kind.value}"
        instead = "use the strategy that it is given" if twin is None else f"use strategy.{twin}"
        raise ContextError(
            f"This ReplicaContext belongs to a function given to run of {self._strategy!r}, but "
            f"it is used in {here}. Ask mpistrat.get_replica_context() for the current one inside "
            f"strategy.run; inside a merge_fn {instead}."
        )


class ShardGroup(GroupCollectives):
    """The ranks that compute one replica together. `ReplicaContext.shards` returns it.

    It has the collectives of `ReplicaContext`, except `merge_call`, with the same rules. In their
    descriptions, read "rank of this replica" for "replica", and `index` for its number. The group
    has its own sequence of calls: their order relative to collectives of the replicas is not
    compared. The loss of the replica is the sum of the losses of its ranks, so divide a loss that
    all of them compute identically by `count`.

    Examples
    --------
    >>> def step(x):
    ...     shards = ms.get_replica_context().shards
    ...     mine = shards.scatter(x)  # 1 of count parts
    ...     whole = shards.all_gather(mine, axis=0)
    ...     return shards.index, shards.count, shards.all_reduce("mean", whole)
    >>> strategy.run(step, args=(np.ones(2),))
    (PerReplica(0), PerReplica(1), PerReplica(array([1., 1.])))
    """

    def __init__(self, replica: ReplicaContext) -> None:
        self._replica = replica

    @property
    def index(self) -> int:
        """Number of this rank within the replica, from 0. Local."""
        self._replica._check()
        return self._replica._layout.shard

    @property
    def count(self) -> int:
        """Number of ranks of the replica. Local."""
        self._replica._check()
        return self._replica._layout.ranks_per_replica

    def barrier(self) -> None:
        """Return when every rank of this replica has made this call. **Collective** over them."""
        barrier(self._group())

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return a copy of an object on every rank of this replica. **Collective** over them.

        Parameters
        ----------
        obj : object
            The object to send, as pickle; it is ignored on ranks other than `root`.
        root : int
            The `index` of the rank that sends its object; the same on all ranks of the replica.

        Returns
        -------
        object
            A copy, on `root` as well.

        Raises
        ------
        TypeError, ValueError
            If `root` is not an integer or out of range, or the object cannot be pickled.
        CollectiveError
            If the ranks disagree.
        """
        return broadcast_object(self._group(), "broadcast_object", obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return copies of the objects of all ranks of this replica, by `index`.

        **Collective** over them.

        Parameters
        ----------
        obj : object
            The object of this rank, which is sent as pickle.

        Returns
        -------
        list
            One copy per rank of the replica.

        Raises
        ------
        TypeError
            If the object cannot be pickled.
        CollectiveError
            If the ranks disagree.
        """
        return gather_objects(self._group(), "all_gather_object", obj)

    def _group(self) -> Collectives:
        self._replica._check()
        return context.shards_of(self._replica._strategy)

    def __repr__(self) -> str:
        layout = self._replica._layout
        return (
            f"<ShardGroup shard {layout.shard} of {layout.ranks_per_replica} of replica "
            f"{layout.replica_id}>"
        )
