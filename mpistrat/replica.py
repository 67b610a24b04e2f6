"""Replica context: what a replica may call."""

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
    """The view that one replica has of its strategy, inside `Strategy.run`.

    Got by `mpistrat.get_replica_context()`. As a context manager it makes itself current.

    Parameters
    ----------
    strategy : Strategy
    replica_id_in_sync_group : int, optional
        That of this rank's replica, which is also the default.

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
        """The strategy that runs this replica. Local."""
        self._check()
        return self._strategy

    @property
    def replica_id_in_sync_group(self) -> int:
        """Number of this replica: its rank, where a replica is one rank. Local."""
        self._check()
        return self._layout.replica_id

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

        return replica_rng(key, self._layout.replica_id)

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas that reduce together. Local."""
        self._check()
        return self._layout.num_replicas

    @property
    def shards(self) -> ShardGroup:
        """The ranks that compute this replica together, and their collectives. Local.

        One, unless the strategy was made with `ranks_per_replica`.
        """
        self._check()
        return ShardGroup(self)

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
        replicas = context.replica_set_of(self._strategy)
        return replicas.merge_call(self._strategy, merge_fn, args, kwargs or {})

    def barrier(self) -> None:
        """Return when every rank of every replica has made this call. **Collective**."""
        self._check("barrier")
        barrier(context.collectives_of(self._strategy))

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return a copy of the object of replica `root`, which all name. **Collective**."""
        self._check("broadcast_object")
        return broadcast_object(context.replicas_of(self._strategy), "broadcast_object", obj, root)

    def all_gather_object(self, obj: Any) -> list[Any]:
        """Return copies of the objects of all replicas, in order. **Collective**."""
        self._check("gather_objects")
        return gather_objects(context.replicas_of(self._strategy), "all_gather_object", obj)

    def _group(self) -> Collectives:
        frame = context.current()
        if frame is None or frame.replica_context is not self:  # the usual case costs no call
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
    """The ranks of one replica, as `ReplicaContext.shards`.

    It has the collectives of `ReplicaContext`, except `merge_call`, with the same rules; a
    "replica" is then a rank of this one, and its number `index`. The group has its own
    sequence: its order among collectives of the replicas is not compared. The loss is the sum of
    the losses of its ranks, so one that all of them compute alike is divided by `count`.

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
        """Which of the ranks of the replica this one is. Local."""
        self._replica._check()
        return self._replica._layout.shard

    @property
    def count(self) -> int:
        """How many ranks the replica has. Local."""
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
            The rank whose `index` is `root` sends its object, as pickle.
        root : int

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
