"""Benchmarks: this package and its peers, side by side in one run."""

from mpistrat.bench import (
    agreement,
    allreduce,
    checkpoint,
    data,
    gradients,
    optimizers,
    overlap,
    step,
)

__all__ = ["BENCHMARKS"]

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        agreement.AGREEMENT,
        allreduce.ALLREDUCE,
        checkpoint.BENCHMARK,
        data.BENCHMARK,
        gradients.GRADIENTS,
        optimizers.BENCHMARK,
        overlap.BENCHMARK,
        step.BENCHMARK,
    )
}
