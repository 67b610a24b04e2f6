"""Races of this package against its peers, which are no part of the installed package.

    mpirun -n 2 python -m benchmarks step

They measure PyTorch, LMDB and others where these are installed, and all that ``mpistrat bench``
measures.
"""

from benchmarks import (
    best_of_mpi,
    coordinator,
    data,
    optimizers,
    overlap,
    process_groups,
    replicas,
    state_dicts,
    step,
    storage,
)
from mpistrat.bench import BENCHMARKS as PLAIN

__all__ = ["BENCHMARKS", "BEST"]

BENCHMARKS = dict(
    sorted(
        (
            PLAIN
            | {
                benchmark.name: benchmark
                for benchmark in (
                    coordinator.BENCHMARK,
                    data.BENCHMARK,
                    optimizers.BENCHMARK,
                    overlap.BENCHMARK,
                    process_groups.BENCHMARK,
                    replicas.BENCHMARK,
                    state_dicts.BENCHMARK,
                    step.BENCHMARK,
                    storage.BENCHMARK,
                )
            }
        ).items()
    )
)

BEST = {"allreduce": best_of_mpi.BENCHMARK}
"""Benchmarks that compare with the best settings of the peer, by name."""
