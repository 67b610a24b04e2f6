"""``all_reduce`` against raw ``MPI.Allreduce`` into a ready buffer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpistrat.bench.timing import median_times_s
from mpistrat.options import ReduceOp
from mpistrat.replica import ReplicaContext
from mpistrat.strategies import MPIStrategy, get_replica_context
from mpistrat.world import open_world

__all__ = ["AllReduceResult", "measure_allreduce"]


@dataclass(frozen=True)
class AllReduceResult:
    """Medians for one array size."""

    num_bytes: int
    raw_s: float
    """``COMM_WORLD.Allreduce`` of float32 into a ready buffer, by mpi4py."""
    ours_s: float
    """`ReplicaContext.all_reduce` of the same array, all checks on, into a new array."""
    copy_s: float
    """One copy of the array in memory by this rank: what bandwidth alone would take."""

    @property
    def ratio(self) -> float:
        """How many times faster than raw MPI; below 1 is slower."""
        return self.raw_s / self.ours_s


def measure_allreduce(sizes: Sequence[int], num_samples: int) -> list[AllReduceResult]:
    """Time all-reductions of arrays of `sizes` bytes. **Collective** over COMM_WORLD.

    Parameters
    ----------
    sizes : sequence of int
        Bytes, multiples of 4.
    num_samples : int
    """
    strategy = MPIStrategy(device="cpu")
    comm = open_world(None).comm

    def measure(num_bytes: int) -> AllReduceResult:
        replica = get_replica_context()
        assert isinstance(replica, ReplicaContext)
        array = np.full(num_bytes // 4, strategy.cluster_resolver.task_id, np.float32)
        ready = np.empty_like(array)
        medians = median_times_s(
            {
                "raw": lambda: comm.Allreduce(array, ready),
                "ours": lambda: replica.all_reduce(ReduceOp.SUM, array),
                "copy": lambda: np.copyto(ready, array),
            },
            strategy.extended.collectives,
            num_samples,
        )
        return AllReduceResult(num_bytes, medians["raw"], medians["ours"], medians["copy"])

    results = []
    for size in sizes:
        (result,) = strategy.experimental_local_results(strategy.run(measure, args=(size,)))
        results.append(result)
    return results
