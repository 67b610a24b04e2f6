"""Benchmarks: this package and its peers, side by side in one run."""

from mpistrat.bench import (
    best_of_mpi,
    checkpoint,
    coordinator,
    data,
    optimizers,
    overlap,
    process_groups,
    reductions,
    replicas,
    step,
    storage,
)

__all__ = ["BENCHMARKS", "BEST"]

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        reductions.AGREEMENT,
        reductions.ALLREDUCE,
        checkpoint.BENCHMARK,
        coordinator.BENCHMARK,
        data.BENCHMARK,
        reductions.GRADIENTS,
        optimizers.BENCHMARK,
        overlap.BENCHMARK,
        replicas.BENCHMARK,
        step.BENCHMARK,
        storage.BENCHMARK,
        process_groups.BENCHMARK,
    )
}

BEST = {"allreduce": best_of_mpi.BENCHMARK}
"""Benchmarks that compare with the best settings of the peer, by name."""
