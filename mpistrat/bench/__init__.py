"""Benchmarks: this package and its peers, side by side in one run."""

from mpistrat.bench import agreement, allreduce, optimizers

__all__ = ["BENCHMARKS"]

BENCHMARKS = {
    each.name: each for each in (agreement.BENCHMARK, allreduce.BENCHMARK, optimizers.BENCHMARK)
}
