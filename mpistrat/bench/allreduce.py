"""``all_reduce`` against raw ``MPI.Allreduce`` into a ready buffer."""

from __future__ import annotations

import numpy as np

from mpistrat.bench.benchmark import (
    RESULTS,
    Benchmark,
    Choices,
    Findings,
    Row,
    Table,
    ratio,
    size,
    text,
    time,
)
from mpistrat.bench.observation import facts_of_last_collective
from mpistrat.bench.pictures import Lines
from mpistrat.bench.timing import take_turns
from mpistrat.options import ReduceOp
from mpistrat.replica import ReplicaContext
from mpistrat.strategies import MPIStrategy, get_replica_context
from mpistrat.world import open_world

__all__ = ["ALLREDUCE"]


def measure_allreduce(choices: Choices) -> Findings:
    """Time all-reductions of one float32 array of each size. **Collective** over COMM_WORLD.

    Raw is ``COMM_WORLD.Allreduce`` by mpi4py into a ready buffer, ours `all_reduce` into a new
    array with all checks on. The copy is from one ready array into another, on all ranks at the
    same time: it reads and writes each byte once, as fast as the memory lets it.
    """
    strategy = MPIStrategy(device="cpu")
    comm = open_world(None).comm
    rows: list[Row] = []

    def measure_size(num_bytes: int) -> None:
        replica = get_replica_context()
        assert isinstance(replica, ReplicaContext)
        array = np.full(num_bytes // 4, comm.rank, np.float32)
        ready = np.empty_like(array)
        timings = take_turns(
            {
                "raw": lambda: comm.Allreduce(array, ready),
                "ours": lambda: replica.all_reduce(ReduceOp.SUM, array),
                "copy": lambda: np.copyto(ready, array),
            },
            strategy.extended.collectives,
            choices.num_samples,
        )
        facts = facts_of_last_collective(lambda: replica.all_reduce(ReduceOp.SUM, array))
        row = {
            "num_bytes": num_bytes,
            "ratio": timings.median_ratio("raw", "ours"),
            "extra_s": timings.median_difference_s("ours", "raw"),
            "ours_over_copy": timings.median_ratio("ours", "copy"),
            "raw_over_copy": timings.median_ratio("raw", "copy"),
            "copy_bytes_per_s": 2 * num_bytes / timings.median_s("copy"),
        }
        rows.append(row | timings.medians() | facts)

    for num_bytes in choices.sizes:
        strategy.run(measure_size, args=(num_bytes,))
    return Findings({RESULTS: rows})


ALLREDUCE = Benchmark(
    "allreduce",
    "all_reduce of one array, beside raw MPI and a copy",
    measure_allreduce,
    (
        Table(
            (
                size("array", "num_bytes"),
                time("raw Allreduce", "raw_s"),
                time("all_reduce", "ours_s"),
                ratio("times faster", "ratio"),
                time("above raw", "extra_s"),
                time("one copy", "copy_s"),
                ratio("all_reduce / copy", "ours_over_copy"),
                text("moved by", "implementation"),
                text("why", "why"),
            )
        ),
    ),
    (
        Lines(
            "num_bytes",
            {"raw_s": "raw Allreduce", "ours_s": "all_reduce", "copy_s": "one copy"},
            "bytes of the array",
            "seconds",
        ),
    ),
    sizes=(8, 2**10, 2**16, 2**20, 2**22, 2**24, 2**26),
)
