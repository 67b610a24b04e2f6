"""Benchmarks: this package beside plain mpi4py and h5py, side by side in one run."""

from mpistrat.bench import checkpoint, data, reductions

__all__ = ["BENCHMARKS"]

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        reductions.AGREEMENT,
        reductions.ALLREDUCE,
        checkpoint.BENCHMARK,
        data.BENCHMARK,
        reductions.GRADIENTS,
    )
}
