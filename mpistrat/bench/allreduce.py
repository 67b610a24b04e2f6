"""``all_reduce`` against raw ``MPI.Allreduce`` into a ready buffer."""

from __future__ import annotations

import numpy as np

from mpistrat.bench.benchmark import Benchmark, Choices, Column, Row, ratio, time
from mpistrat.bench.timing import median_times_s
from mpistrat.options import ReduceOp
from mpistrat.replica import ReplicaContext
from mpistrat.spelling import readable_size
from mpistrat.strategies import MPIStrategy, get_replica_context
from mpistrat.world import open_world

__all__ = ["BENCHMARK"]


def measure(choices: Choices) -> list[Row]:
    """Time all-reductions of one float32 array of each size. **Collective** over COMM_WORLD.

    Raw is ``COMM_WORLD.Allreduce`` by mpi4py into a ready buffer, ours `all_reduce` into a new
    array with all checks on, and the copy is what bandwidth alone would take.
    """
    strategy = MPIStrategy(device="cpu")
    comm = open_world(None).comm

    def measure_size(num_bytes: int) -> dict[str, float]:
        replica = get_replica_context()
        assert isinstance(replica, ReplicaContext)
        array = np.full(num_bytes // 4, strategy.cluster_resolver.task_id, np.float32)
        ready = np.empty_like(array)
        return median_times_s(
            {
                "raw": lambda: comm.Allreduce(array, ready),
                "ours": lambda: replica.all_reduce(ReduceOp.SUM, array),
                "copy": lambda: np.copyto(ready, array),
            },
            strategy.extended.collectives,
            choices.num_samples,
        )

    rows: list[Row] = []
    for size in (max(4, size // 4 * 4) for size in choices.sizes):
        medians = strategy.experimental_local_results(strategy.run(measure_size, args=(size,)))[0]
        row = {"num_bytes": size, "ratio": medians["raw"] / medians["ours"]}
        rows.append(row | {f"{name}_s": seconds for name, seconds in medians.items()})
    return rows


BENCHMARK = Benchmark(
    "allreduce",
    "all_reduce of one array, beside raw MPI",
    measure,
    (
        Column("array", lambda row: readable_size(row["num_bytes"])),
        time("raw Allreduce", "raw_s"),
        time("all_reduce", "ours_s"),
        ratio("times faster", "ratio"),
        time("one copy", "copy_s"),
    ),
)
