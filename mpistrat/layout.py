"""Layout of replicas on ranks: the replicas that a rank computes, and its shard of them.

Pure functions of integers: rank = replica x ranks_per_replica + shard, or several replicas on each
rank. Only this file converts ranks to replicas.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

from mpistrat.sharding import replicas_of_ranks


@dataclass(frozen=True)
class Layout:
    """Position of this rank among the replicas.

    Either each replica spans consecutive ranks, or each rank has its share of `total` replicas.
    """

    num_ranks: int = 1
    rank: int = 0
    ranks_per_replica: int = 1
    total: int | None = None
    """Number of replicas that the ranks share, ``None`` if each rank has one or a shard of one."""
    running: int | None = None
    """Number of the running replica, ``None`` if this describes the whole rank."""

    @classmethod
    def divided(cls, num_ranks: int, rank: int, ranks_per_replica: int) -> Layout:
        """Return the layout, or raise if the ranks cannot be divided into replicas."""
        if ranks_per_replica < 1:
            raise ValueError(f"ranks_per_replica must be at least 1, not {ranks_per_replica}.")
        if num_ranks % ranks_per_replica:
            raise ValueError(
                f"ranks_per_replica is {ranks_per_replica}, which does not divide the {num_ranks} "
                "ranks. Start a multiple of it, or choose a divisor of the number of ranks."
            )
        return cls(num_ranks, rank, ranks_per_replica)

    @classmethod
    def shared(cls, num_replicas: int, num_ranks: int, rank: int) -> Layout:
        """Return the layout, or raise if some ranks would have no replica."""
        if num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, not {num_replicas}.")
        if num_replicas < num_ranks:
            raise ValueError(
                f"num_replicas={num_replicas} is less than the number of ranks, {num_ranks}, so "
                "some ranks would have no replica. Start fewer ranks, or ask for more replicas."
            )
        return cls(num_ranks, rank, total=num_replicas)

    @property
    def is_shared(self) -> bool:
        """Whether the program sets the number of replicas, and each rank has its share."""
        return self.total is not None

    @property
    def difference(self) -> str | None:
        """Text that must be equal on all ranks; ``None`` for the default layout."""
        if self.total is not None:
            return f"{self.total} replicas"
        num_ranks = self.ranks_per_replica
        return None if num_ranks == 1 else f"{num_ranks} ranks per replica"

    @property
    def part(self) -> str:
        """The part of the replicas on this rank, as text; empty if it is exactly one replica."""
        if self.total is not None:
            first, last = self.local_replicas[0], self.local_replicas[-1]
            own = f"replica {first}" if first == last else f"replicas {first}-{last}"
            return f"{own} of {self.total}"
        if self.ranks_per_replica == 1:
            return ""
        return (
            f"replica {self.replica_id} of {self.num_replicas}, shard {self.shard} of "
            f"{self.ranks_per_replica}"
        )

    @functools.cached_property
    def num_replicas(self) -> int:
        """Number of replicas on all ranks together."""
        return self.num_ranks // self.ranks_per_replica if self.total is None else self.total

    @property
    def replica_id(self) -> int:
        """Replica of this rank; if it has several, the running one or else the first."""
        return self.replica_of(self.rank) if self.running is None else self.running

    @property
    def shard(self) -> int:
        """Number of this rank within its replica."""
        return self.shard_of(self.rank)

    @property
    def local_replicas(self) -> range:
        """Replicas of this rank."""
        return self.replicas_of(self.rank)

    def replicas_of(self, rank: int) -> range:
        """Return the replicas of any rank."""
        if self.total is not None:
            return replicas_of_ranks(self.total, self.num_ranks)[rank]
        replica = self.replica_of(rank)
        return range(replica, replica + 1)

    def replica_of(self, rank: int) -> int:
        """Return the replica of any rank; if it has several, the first one."""
        return rank // self.ranks_per_replica if self.total is None else self.replicas_of(rank)[0]

    def shard_of(self, rank: int) -> int:
        """Return the number of a rank within its replica."""
        return rank % self.ranks_per_replica

    @property
    def ranks_of_replica(self) -> Sequence[int]:
        """Ranks of this rank's replica, by shard."""
        first = self.rank - self.shard
        return range(first, first + self.ranks_per_replica)

    def ranks_of_shard(self, shard: int) -> Sequence[int]:
        """Return the ranks that hold the given shard of their replicas, by replica."""
        return range(shard, self.num_ranks, self.ranks_per_replica)
