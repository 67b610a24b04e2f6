"""Benchmark of overlap: how much of a reduction hides behind a computation."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from mpistrat.bench.benchmark import (
    RESULTS,
    Bars,
    Benchmark,
    Choices,
    Column,
    Findings,
    Row,
    Table,
)
from mpistrat.bench.measure import Timings, take_turns
from mpistrat.collectives.collectives import Collectives
from mpistrat.mpi.world import open_world
from mpistrat.options import ReduceOp
from mpistrat.replica import ReplicaContext
from mpistrat.strategies import MPIStrategy, get_replica_context

_Call = Callable[[], object]
_Start = Callable[[], _Call]

_OURS, _RAW = "start_all_reduce", "raw Iallreduce"
_IDLE, _BUSY = "a wait that leaves the core idle", "a matrix product"

_CALIBRATION_ROUNDS = 3
_MATRIX_LENGTH = 256
"""A product takes about a millisecond; there are as many as fill the time of the reduction."""


def measure(choices: Choices) -> Findings:
    """Time reductions alone, work alone, and both at once. **Collective** over COMM_WORLD."""
    strategy = MPIStrategy(device="cpu")
    rows: list[Row] = []

    def measure_size(num_bytes: int) -> None:
        starts = _starts(num_bytes)
        collectives = strategy.extended._collectives
        works = _works(starts, collectives)
        timings = take_turns(_candidates(starts, works), collectives, choices.num_samples)
        for library, beside in works:
            rows.append({"num_bytes": num_bytes, **_row(timings, library, beside)})

    for num_bytes in choices.sizes:
        strategy.run(measure_size, args=(num_bytes,))
    return Findings({RESULTS: rows})


def _starts(num_bytes: int) -> dict[str, _Start]:
    """Return by library a function that starts a reduction and returns its wait function."""
    replica = get_replica_context()
    assert isinstance(replica, ReplicaContext)
    comm = open_world(None).comm
    array = np.full(num_bytes // 4, comm.rank, np.float32)
    ready = np.empty_like(array)
    return {
        _OURS: lambda: replica.start_all_reduce(ReduceOp.SUM, array).wait,
        _RAW: lambda: comm.Iallreduce(array, ready).Wait,
    }


def _works(starts: Mapping[str, _Start], collectives: Collectives) -> dict[tuple[str, str], _Call]:
    """Return work that takes as long as each reduction alone. **Collective**."""
    matrix = np.full((_MATRIX_LENGTH, _MATRIX_LENGTH), 0.5, np.float32)
    product = np.empty_like(matrix)
    one_product = partial(np.matmul, matrix, matrix, product)
    alone: dict[str, _Call] = {name: partial(_both, start, bool) for name, start in starts.items()}
    timings = take_turns({**alone, _BUSY: one_product}, collectives, _CALIBRATION_ROUNDS)
    # A sleep leaves the core idle, as a kernel on a GPU does; products of matrices in the cache
    # use every core that BLAS may use.
    works: dict[tuple[str, str], _Call] = {}
    for name in starts:
        length_s = timings.median_s(name)
        num_products = max(1, round(length_s / timings.median_s(_BUSY)))
        works[name, _IDLE] = partial(time.sleep, length_s)
        works[name, _BUSY] = partial(_repeat, one_product, num_products)
    return works


def _both(start: _Start, work: _Call) -> None:
    end = start()
    work()
    end()


def _repeat(call: _Call, times: int) -> None:
    for _ in range(times):
        call()


def _candidates(
    starts: Mapping[str, _Start], works: Mapping[tuple[str, str], _Call]
) -> dict[str, _Call]:
    candidates: dict[str, _Call] = {}
    for name, start in starts.items():
        candidates[name] = partial(_both, start, bool)
    for (name, beside), work in works.items():
        candidates[f"{name}: {beside} alone"] = work
        candidates[f"{name}: {beside}"] = partial(_both, starts[name], work)
    return candidates


def _row(timings: Timings, library: str, beside: str) -> dict[str, Any]:
    together, work = f"{library}: {beside}", f"{library}: {beside} alone"
    reduction_s, work_s = timings.median_s(library), timings.median_s(work)
    row = {
        "library": library,
        "beside": beside,
        "reduction_s": reduction_s,
        "work_s": work_s,
        "together_s": timings.median_s(together),
        **timings.ratio("together_over_sum", together, library, work),
    }
    if beside == _IDLE:  # busy cores leave nothing to overlap with
        row["best_over_sum"] = max(reduction_s, work_s) / (reduction_s + work_s)
    return row


BENCHMARK = Benchmark(
    "overlap",
    "a reduction beside computation, as long as it takes alone",
    measure,
    (
        Table(
            (
                Column.size("array", "num_bytes"),
                Column.text("reduction", "library"),
                Column.text("beside", "beside"),
                Column.time("reduction alone", "reduction_s"),
                Column.time("work alone", "work_s"),
                Column.time("together", "together_s"),
                Column.speed_up("speed-up over one after the other", "together_over_sum"),
                Column.speed_up("at best", "best_over_sum"),
            )
        ),
    ),
    (
        Bars(
            lambda row: f"{row['library']}\n{row['beside']}",
            {"together_over_sum": "measured", "best_over_sum": "at best"},
            "together / sum of both alone",
            line_at=1.0,
        ),
    ),
    sizes=(2**26,),
)
