"""Probes of the cost model: timed operations that together determine its constants."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.bench.measure import take_turns
from mpistrat.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from mpistrat.replica import ReplicaContext
from mpistrat.strategies import MPIStrategy, get_replica_context
from tools.scaling.work import Work, all_reduce

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Sample", "measure_samples"]

Sample = tuple[str, int, Work, float]
"""Operation, bytes, work and seconds."""

_BY_MPI = CommunicationOptions(implementation=CommunicationImplementation.MPI)
"""Reductions in shared memory send no messages, so they say nothing about their price."""

_SMALLEST_SUM_BYTES = 2**12
"""The time of a shorter sum is the overhead of NumPy, not arithmetic."""


def measure_samples(comm: MPI.Intracomm, sizes: Sequence[int], num_samples: int) -> list[Sample]:
    """Time messages, all-reductions and sums on two or more ranks. **Collective**."""
    from tools.scaling.counting import MpiCall, counted, total_work

    calls: list[MpiCall] = []
    strategy = MPIStrategy(counted(comm, calls), device="cpu", communication_options=_BY_MPI)
    samples: list[Sample] = []

    def measure_size(num_bytes: int) -> None:
        replica = get_replica_context()
        assert isinstance(replica, ReplicaContext)
        array = np.ones(num_bytes // 4, np.float32)
        other, result = np.ones_like(array), np.empty_like(array)
        replica.all_reduce(ReduceOp.SUM, array)  # the first call may set up what later ones use
        calls.clear()
        replica.all_reduce(ReduceOp.SUM, array)
        works = {
            "message": Work(messages=2, bytes_sent=2 * num_bytes),
            "raw Allreduce": all_reduce(comm.size, num_bytes),
            "all_reduce": Work(calls=1) + total_work(calls),
        }
        candidates: dict[str, Callable[[], object]] = {
            "message": lambda: _ping_pong(comm, array, result),
            "raw Allreduce": lambda: comm.Allreduce(array, result),
            "all_reduce": lambda: replica.all_reduce(ReduceOp.SUM, array),
        }
        if num_bytes >= _SMALLEST_SUM_BYTES:
            works["sum"] = Work(bytes_reduced=num_bytes)
            candidates["sum"] = lambda: np.add(array, other, out=result)
        timings = take_turns(candidates, strategy.extended._collectives, num_samples)
        for name, work in works.items():
            samples.append((name, num_bytes, work, timings.median_s(name)))

    for num_bytes in sizes:
        strategy.run(measure_size, args=(num_bytes,))
    return samples


def _ping_pong(comm: MPI.Intracomm, array: np.ndarray, ready: np.ndarray) -> None:
    """Send a message from the first rank to the second, and back."""
    if comm.rank == 0:
        comm.Send(array, 1)
        comm.Recv(ready, 1)
    elif comm.rank == 1:
        comm.Recv(ready, 0)
        comm.Send(array, 0)
