"""Layout of replicas on ranks: which replica a rank computes, and which shard of it.

Pure functions of integers: rank = replica x ranks_per_replica + shard, or several replicas on each
rank. Nothing else takes one rank for one replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpistrat.sharding import replicas_of_ranks


@dataclass(frozen=True)
class Layout:
    """Where this rank stands among the replicas, each of which spans consecutive ranks."""

    num_ranks: int = 1
    rank: int = 0
    ranks_per_replica: int = 1

    @classmethod
    def divided(cls, num_ranks: int, rank: int, ranks_per_replica: int) -> Layout:
        """Return the layout, or raise where the ranks cannot be divided into replicas."""
        if ranks_per_replica < 1:
            raise ValueError(f"ranks_per_replica must be at least 1, not {ranks_per_replica}.")
        if num_ranks % ranks_per_replica:
            raise ValueError(
                f"ranks_per_replica is {ranks_per_replica}, which does not divide the {num_ranks} "
                "ranks. Start a multiple of it, or choose a divisor of the number of ranks."
            )
        return cls(num_ranks, rank, ranks_per_replica)

    @property
    def difference(self) -> str | None:
        """What the arguments of all ranks must agree on, ``None`` where nothing was said."""
        num_ranks = self.ranks_per_replica
        return None if num_ranks == 1 else f"{num_ranks} ranks per replica"

    @property
    def part(self) -> str:
        """Which part of the replicas this rank has, as text; empty where it is one."""
        if self.ranks_per_replica == 1:
            return ""
        return (
            f"replica {self.replica_id} of {self.num_replicas}, shard {self.shard} of "
            f"{self.ranks_per_replica}"
        )

    @property
    def num_replicas(self) -> int:
        """How many replicas all ranks make up."""
        return self.num_ranks // self.ranks_per_replica

    @property
    def replica_id(self) -> int:
        """The replica of this rank."""
        return self.replica_of(self.rank)

    @property
    def shard(self) -> int:
        """Which of the ranks of its replica this one is."""
        return self.shard_of(self.rank)

    @property
    def local_replicas(self) -> range:
        """The replicas of this rank: one."""
        return range(self.replica_id, self.replica_id + 1)

    def replica_of(self, rank: int) -> int:
        """Return the replica of any rank."""
        return rank // self.ranks_per_replica

    def shard_of(self, rank: int) -> int:
        """Return which of the ranks of its replica a rank is."""
        return rank % self.ranks_per_replica

    @property
    def ranks_of_replica(self) -> Sequence[int]:
        """The ranks of this rank's replica, by shard."""
        first = self.rank - self.shard
        return range(first, first + self.ranks_per_replica)

    def ranks_of_shard(self, shard: int) -> Sequence[int]:
        """Return the ranks that are this shard of their replicas, by replica."""
        return range(shard, self.num_ranks, self.ranks_per_replica)


@dataclass(frozen=True)
class SharedLayout(Layout):
    """Where this rank stands where each has its share of `total` replicas."""

    total: int = 1
    running: int | None = None
    """The replica that runs, ``None`` where this is about the rank."""

    @classmethod
    def of(cls, num_replicas: int, num_ranks: int, rank: int) -> SharedLayout:
        """Return the layout, or raise where some ranks would have no replica."""
        if num_replicas < 1:
            raise ValueError(f"num_replicas must be at least 1, not {num_replicas}.")
        if num_replicas < num_ranks:
            raise ValueError(
                f"num_replicas={num_replicas} is less than the number of ranks, {num_ranks}, so "
                "some ranks would have no replica. Start fewer ranks, or ask for more replicas."
            )
        return cls(num_ranks, rank, total=num_replicas)

    @property
    def difference(self) -> str | None:
        """What the arguments of all ranks must agree on."""
        return f"{self.total} replicas"

    @property
    def part(self) -> str:
        """Which of the replicas this rank has, as text."""
        first, last = self.local_replicas[0], self.local_replicas[-1]
        own = f"replica {first}" if first == last else f"replicas {first}-{last}"
        return f"{own} of {self.total}"

    @property
    def num_replicas(self) -> int:
        """How many replicas there are."""
        return self.total

    @property
    def replica_id(self) -> int:
        """The replica that runs, or the first one of this rank."""
        return self.replica_of(self.rank) if self.running is None else self.running

    def replica_of(self, rank: int) -> int:
        """Return the first replica of any rank."""
        return replicas_of_ranks(self.total, self.num_ranks)[rank].start

    @property
    def local_replicas(self) -> range:
        """The replicas of this rank."""
        return replicas_of_ranks(self.total, self.num_ranks)[self.rank]

    def shard_of(self, rank: int) -> int:
        """Return 0: each replica is on one rank."""
        return 0
