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
    module.BENCHMARK.name: module.BENCHMARK
    for module in (
        *(agreement, allreduce, checkpoint, data, gradients),
        *(optimizers, overlap, step),
    )
}
