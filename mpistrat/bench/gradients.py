"""Many arrays in one ``all_reduce``, against one raw ``MPI.Allreduce`` for each of them."""

from __future__ import annotations

import resource
import sys
from collections.abc import Callable, Sequence

import numpy as np

from mpistrat.bench.benchmark import (
    RESULTS,
    Benchmark,
    Choices,
    Findings,
    Row,
    Table,
    ratio,
    size,
    text,
    time,
)
from mpistrat.bench.pictures import Bars
from mpistrat.bench.resnet50 import SHAPES, random_arrays
from mpistrat.bench.timing import take_turns
from mpistrat.collectives import Collectives
from mpistrat.options import ReduceOp
from mpistrat.replica import ReplicaContext
from mpistrat.strategies import MPIStrategy, get_replica_context
from mpistrat.world import open_world

__all__ = ["GRADIENTS"]

# The small ones first: a peak of memory is that of the process, and does not go down again.
_CASES: dict[str, Sequence[tuple[int, ...]]] = {
    "1,000 arrays of 100 floats": ((100,),) * 1000,
    f"ResNet-50, {len(SHAPES)} arrays": SHAPES,
}


def measure_gradients(choices: Choices) -> Findings:
    """Time the reduction of the float32 gradients of networks. **Collective** over COMM_WORLD.

    Ours is one `all_reduce` of all arrays into new ones, raw one ``Allreduce`` by mpi4py for each
    array into a ready buffer. The bound is one raw ``Allreduce`` of all numbers in one ready
    buffer: what packing could reach if it cost nothing and the library did the rest.
    """
    strategy = MPIStrategy(device="cpu")
    collectives = strategy.extended.collectives
    comm = open_world(None).comm
    rows: list[Row] = []

    def measure_case(case: str) -> None:
        replica = get_replica_context()
        assert isinstance(replica, ReplicaContext)
        arrays = random_arrays(_CASES[case])
        num_bytes = sum(array.nbytes for array in arrays)
        grown = _peak_growth(lambda: replica.all_reduce(ReduceOp.SUM, arrays), collectives)
        ready = [np.empty_like(array) for array in arrays]
        joined = np.concatenate([array.reshape(-1) for array in arrays])
        joined_ready = np.empty_like(joined)

        def raw() -> None:
            for array, result in zip(arrays, ready, strict=True):
                comm.Allreduce(array, result)

        candidates: dict[str, Callable[[], object]] = {
            "raw": raw,
            "ours": lambda: replica.all_reduce(ReduceOp.SUM, arrays),
            "joined": lambda: comm.Allreduce(joined, joined_ready),
        }
        timings = take_turns(candidates, collectives, choices.num_samples)
        row = {
            "gradients": case,
            "num_arrays": len(arrays),
            "num_bytes": num_bytes,
            "ratio": timings.median_ratio("raw", "ours"),
            "ours_over_joined": timings.median_ratio("ours", "joined"),
            "joined_ratio": timings.median_ratio("joined", "ours"),
            "extra_bytes": max(grown - num_bytes, 0),
        }
        rows.append(row | timings.medians())

    for case in _CASES:
        strategy.run(measure_case, args=(case,))
    return Findings({RESULTS: rows})


def _peak_growth(call: Callable[[], object], collectives: Collectives) -> int:
    """Return by how many bytes two calls raise the peak of a rank's memory. **Collective**.

    The result of the first is dropped before the second, as a training loop does.
    """
    before = _peak_bytes()
    call()
    call()
    return int(max(collectives.gather_json(_peak_bytes() - before)))


def _peak_bytes() -> int:
    """Return the largest resident memory that this process has had, shared pages included."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


GRADIENTS = Benchmark(
    "gradients",
    "the gradients of a network in one all_reduce, beside a loop of raw MPI",
    measure_gradients,
    (
        Table(
            (
                text("gradients", "gradients"),
                size("together", "num_bytes"),
                time("loop of raw Allreduce", "raw_s"),
                time("one all_reduce", "ours_s"),
                ratio("times faster", "ratio"),
                time("one raw, joined", "joined_s"),
                ratio("all_reduce / joined", "ours_over_joined"),
                size("memory besides the results", "extra_bytes"),
            )
        ),
    ),
    (
        Bars(
            lambda row: str(row["gradients"]),
            {"ratio": "loop of raw Allreduce", "joined_ratio": "one raw Allreduce, joined"},
            "times one all_reduce",
            line_at=1.0,
        ),
    ),
)
