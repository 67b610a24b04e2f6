"""Benchmarks: this package compared with plain mpi4py and h5py, in one run."""

from mpistrat.bench import checkpointing, communication, data, hdf5_output

__all__ = ["BENCHMARKS"]

BENCHMARKS = {
    benchmark.name: benchmark
    for benchmark in (
        communication.AGREEMENT,
        communication.ALLREDUCE,
        checkpointing.BENCHMARK,
        data.BENCHMARK,
        communication.GRADIENTS,
        hdf5_output.BENCHMARK,
    )
}
