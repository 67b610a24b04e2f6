"""What the agreement of ranks costs: ``all_reduce`` with all checks, and with none."""

from __future__ import annotations

from collections.abc import Callable

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
    time,
)
from mpistrat.bench.pictures import Lines
from mpistrat.bench.timing import take_turns
from mpistrat.options import ReduceOp
from mpistrat.replica import ReplicaContext
from mpistrat.strategies import MPIStrategy, get_replica_context

__all__ = ["AGREEMENT"]


def measure_agreement(choices: Choices) -> Findings:
    """Time all-reductions of a float32 array with and without checks. **Collective**."""
    strategy = MPIStrategy(device="cpu")
    collectives = strategy.extended.collectives
    channel = collectives.channel
    rows: list[Row] = []

    def measure_size(num_bytes: int) -> None:
        replica = get_replica_context()
        assert isinstance(replica, ReplicaContext)
        array = np.ones(num_bytes // 4, np.float32)

        def reduced(checks: bool) -> Callable[[], object]:
            def reduce() -> None:
                channel.checks = checks
                replica.all_reduce(ReduceOp.SUM, array)
                channel.checks = True

            return reduce

        candidates = {"checked": reduced(True), "unchecked": reduced(False)}
        timings = take_turns(candidates, collectives, choices.num_samples)
        cost_s = timings.median_difference_s("checked", "unchecked")
        row = {"num_bytes": num_bytes, "cost_s": cost_s}
        row |= {"cost_ratio": cost_s / timings.median_s("unchecked")}
        rows.append(row | timings.medians())

    for num_bytes in choices.sizes:
        strategy.run(measure_size, args=(num_bytes,))
    return Findings({RESULTS: rows})


AGREEMENT = Benchmark(
    "agreement",
    "what the checks add to an all_reduce",
    measure_agreement,
    (
        Table(
            (
                size("array", "num_bytes"),
                time("with checks", "checked_s"),
                time("without", "unchecked_s"),
                time("cost", "cost_s"),
                ratio("cost / without", "cost_ratio"),
            )
        ),
    ),
    (
        Lines(
            "num_bytes",
            {"checked_s": "with checks", "unchecked_s": "without"},
            "bytes of the array",
            "seconds",
        ),
    ),
    sizes=(8, 2**16, 2**20, 2**24),
)
