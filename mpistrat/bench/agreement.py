"""What the agreement of ranks costs: ``all_reduce`` with all checks, and with none."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from mpistrat.bench.benchmark import Benchmark, Choices, Column, Row, ratio, time
from mpistrat.bench.timing import median_times_s
from mpistrat.options import ReduceOp
from mpistrat.replica import ReplicaContext
from mpistrat.spelling import readable_size
from mpistrat.strategies import MPIStrategy, get_replica_context

__all__ = ["BENCHMARK"]

_SIZES = (8, 2**16, 2**20, 2**24)


def measure(choices: Choices) -> list[Row]:
    """Time all-reductions of a float32 array with and without checks. **Collective**."""
    strategy = MPIStrategy(device="cpu")
    collectives = strategy.extended.collectives
    channel = collectives.channel

    def measure_size(num_bytes: int) -> dict[str, float]:
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
        return median_times_s(candidates, collectives, choices.num_samples)

    rows: list[Row] = []
    for size in _SIZES:
        medians = strategy.experimental_local_results(strategy.run(measure_size, args=(size,)))[0]
        cost_s = medians["checked"] - medians["unchecked"]
        row = {"num_bytes": size, "cost_s": cost_s, "cost_ratio": cost_s / medians["unchecked"]}
        rows.append(row | {f"{name}_s": seconds for name, seconds in medians.items()})
    return rows


BENCHMARK = Benchmark(
    "agreement",
    "what the checks add to an all_reduce",
    measure,
    (
        Column("array", lambda row: readable_size(row["num_bytes"])),
        time("with checks", "checked_s"),
        time("without", "unchecked_s"),
        time("cost", "cost_s"),
        ratio("cost / without", "cost_ratio"),
    ),
)
