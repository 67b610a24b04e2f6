"""Benchmarks: this package and its peers, side by side in one run."""

from mpistrat.bench import (
    best_of_mpi,
    checkpoint,
    data,
    optimizers,
    overlap,
    process_groups,
    reductions,
    step,
)

__all__ = ["BENCHMARKS"]

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        reductions.AGREEMENT,
        reductions.ALLREDUCE,
        best_of_mpi.BENCHMARK,
        checkpoint.BENCHMARK,
        data.BENCHMARK,
        reductions.GRADIENTS,
        optimizers.BENCHMARK,
        overlap.BENCHMARK,
        step.BENCHMARK,
        process_groups.BENCHMARK,
    )
}
