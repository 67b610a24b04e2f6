"""Strategies whose replicas span ranks, for tests at any number of ranks."""

import mpistrat as ms
from mpistrat.testing.launch import rank_and_size

RANK, NUM_RANKS = rank_and_size() or (0, 1)
DIVISORS = [each for each in range(1, NUM_RANKS + 1) if NUM_RANKS % each == 0]
"""The possible numbers of ranks of a replica."""
NUM_REPLICAS = [4 if NUM_RANKS == 3 else 5, 12]
"""Numbers of replicas: of the first one, rank 0 has one more than the last rank."""


def opened(per_replica):
    """Yield a strategy, for a fixture."""
    strategy = ms.MPIStrategy(device="cpu", ranks_per_replica=per_replica)
    yield strategy
    strategy.close()


def shards_of():
    """Return the group of the ranks of this replica."""
    return ms.get_replica_context().shards


def replica_id():
    """Return the number of the replica that runs."""
    return ms.get_replica_context().replica_id_in_sync_group
