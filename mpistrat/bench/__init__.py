"""Benchmarks: this package and its peers, side by side in one run."""

from mpistrat.bench import allreduce, optimizers

__all__ = ["BENCHMARKS"]

BENCHMARKS = {each.name: each for each in (allreduce.BENCHMARK, optimizers.BENCHMARK)}
