"""Layout of replicas on ranks: which replica a rank computes, and which shard of it.

Pure functions of integers: rank = replica x ranks_per_replica + shard. Nothing else takes one rank
for one replica.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Layout"]


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
