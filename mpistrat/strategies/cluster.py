"""Cluster: this rank's place in it, barriers and objects between its ranks."""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from typing import Any

from mpistrat import context
from mpistrat.collectives import objects
from mpistrat.collectives.collectives import Collectives
from mpistrat.layout import Layout
from mpistrat.mpi.world import world_rank
from mpistrat.strategies.extended import StrategyExtended


@dataclass(frozen=True)
class ClusterResolver:
    """Facts about the job and this rank's place in it."""

    task_id: int
    """The rank; of a parameter-server job the number among those of its `task_type`."""
    num_workers: int
    """The number of ranks; of a parameter-server job that of its workers."""
    local_rank: int
    """Number of this rank among those of its node."""
    hosts: tuple[str, ...]
    """One name per node."""
    launcher: str
    """``"slurm"``, ``"openmpi"``, ``"mpich"``, ``"intel"``, ``"flux"``, ``"pals"``, ``"lsf"`` (for
    jsrun), or ``"none"``."""
    task_type: str = "worker"
    """``"worker"``: every rank computes. `ParameterServerStrategy` has a ``"chief"`` and servers,
    ``"ps"``, too."""


class ClusterMember:
    """The methods of a strategy that say which rank this is, and reach the others."""

    _extended: StrategyExtended

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """Where this rank stands in the cluster; ``None`` where there is none. Local."""
        return None

    @property
    def rank(self) -> int:
        """Number of this rank: short for ``cluster_resolver.task_id``. Local."""
        return self._layout.rank

    @property
    def size(self) -> int:
        """Number of ranks: short for ``cluster_resolver.num_workers``. Local."""
        return self._layout.num_ranks

    @property
    def local_rank(self) -> int:
        """Number of this rank on its node: short for ``cluster_resolver.local_rank``. Local."""
        resolver = self.cluster_resolver
        return 0 if resolver is None else resolver.local_rank

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0: short for ``extended.should_save_summary``. Local."""
        return self._layout.rank == 0

    def barrier(self) -> None:
        """Return when every rank has made this call. **Collective**.

        Raises
        ------
        ContextError
            Inside a replica function: use `ReplicaContext.barrier` there.
        """
        context.require_cross_replica(self, "barrier")
        self._collectives.as_unit("barrier", lambda: objects.barrier(self._collectives))

    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return a copy of the object of rank `root`.

        **Collective**: every rank makes the call, with the same `root`. The object travels as
        pickle, from one rank of the job to the others: for arrays, `reduce` and `gather` are
        faster.

        Parameters
        ----------
        obj : object
            What the other ranks pass does not matter.
        root : int

        Returns
        -------
        object
            A copy, on `root` too.

        Raises
        ------
        TypeError
            If `root` is no integer; and on `root`, if the object cannot be pickled. The others
            then get a `CollectiveMismatchError` that names it.
        ValueError
            If there is no rank `root`.
        ContextError
            Inside a replica function: use `ReplicaContext.broadcast_object` there.
        """
        context.require_cross_replica(self, "broadcast_object")
        what, ranks = "broadcast_object", self._collectives
        return ranks.as_unit(what, lambda: objects.broadcast_object(ranks, what, obj, root))

    def gather_objects(self, obj: Any) -> list[Any]:
        """Return copies of the objects of all ranks, in rank order, on every rank.

        **Collective**: every rank makes the call. Objects travel as pickle, from one rank of the
        job to the others: for arrays, `gather` is faster.

        Raises
        ------
        TypeError
            On a rank whose object cannot be pickled. The others then get a
            `CollectiveMismatchError` that names it.
        ContextError
            Inside a replica function: use `ReplicaContext.all_gather_object` there.
        """
        context.require_cross_replica(self, "gather_objects")
        what, ranks = "gather_objects", self._collectives
        found: list[Any] = ranks.as_unit(what, lambda: objects.gather_objects(ranks, what, obj))
        return found

    @property
    def _collectives(self) -> Collectives:
        return self._extended._collectives

    @property
    def _layout(self) -> Layout:
        """Where this rank is among all, whichever of its replicas runs."""
        return self._extended._layout


def print_on_chief(
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: Any = None,
    flush: bool = True,
) -> None:
    """Print on rank 0 alone, as the builtin ``print`` does. Local.

    Rank 0 is that of the strategy in scope, and outside every scope that of the job. The other
    ranks do nothing. `flush` is true by default, because launchers read through pipes.

    Examples
    --------
    >>> ms.print("epoch", 1)
    epoch 1
    """
    frame = context.current()
    collectives = None if frame is None else frame.collectives
    # A strategy of one rank exists on each rank of the job.
    is_alone = collectives is None or collectives.size == 1
    if (world_rank() if is_alone or collectives is None else collectives.rank) == 0:
        builtins.print(*values, sep=sep, end=end, file=file, flush=flush)
