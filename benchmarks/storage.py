"""Benchmark of where variables live: steps and memory, lookups, and saves of sharded tables."""

from __future__ import annotations

import gc
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
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
from mpistrat.bench.measure import NUM_PARAMETERS, SHAPES, random_arrays, take_turns
from mpistrat.checkpoint import Checkpoint
from mpistrat.collectives.collectives import Collectives
from mpistrat.mpi.world import open_world
from mpistrat.optimizers import Adam
from mpistrat.partitioners import FixedShardsPartitioner
from mpistrat.strategies import CentralStorageStrategy, MPIStrategy, Strategy
from mpistrat.variables import ShardedVariable, Variable

_LAYOUTS = {"one array": ((NUM_PARAMETERS,),), f"ResNet-50, {len(SHAPES)} arrays": SHAPES}
_WAYS = {
    "mirrored": "mirrored",
    "sharded_slots": "sharded slots",
    "central": "central",
    "buffers": "central, gradients in buffers",
}


def measure(choices: Choices) -> Findings:
    """Time steps and lookups, and measure memory. **Collective**."""
    mirrored, central = MPIStrategy(device="cpu"), CentralStorageStrategy(device="cpu")
    partitioner = FixedShardsPartitioner(2**30)
    cutting = MPIStrategy(device="cpu", variable_partitioner=partitioner)
    collectives = mirrored.extended._collectives
    steps = [
        _measure_steps(layout, shapes, mirrored, central, choices.num_samples)
        for layout, shapes in _LAYOUTS.items()
    ]
    lookups = [_measure_lookup(cutting, choices.num_samples)]
    saves = [_measure_save(cutting, num_bytes) for num_bytes in (2**26, 2**28)]
    for strategy in (cutting, central):
        strategy.close()
    notes = () if collectives.size > 1 else ("One rank has nothing to divide: start several.",)
    return Findings({RESULTS: steps, "lookups": lookups, "saves": saves}, notes)


# Steps


def _measure_steps(
    layout: str,
    shapes: Sequence[tuple[int, ...]],
    mirrored: Strategy,
    central: Strategy,
    num_samples: int,
) -> Row:
    """Time a step of Adam, and measure what weights and slots take on all ranks together."""
    collectives, gradients = mirrored.extended._collectives, random_arrays(shapes)
    owners = {"sharded_slots": mirrored, "mirrored": mirrored}
    steps, memory = {}, {}
    for way in _WAYS:
        before = _memory_of_ranks(collectives)
        step = _step(way, owners.get(way, central), gradients)
        for _ in range(2):
            step()
        memory[f"{way}_bytes"] = _memory_of_ranks(collectives) - before
        steps[way] = step
    timings = take_turns(steps, collectives, num_samples)
    row: dict[str, Any] = {"layout": layout, **timings.medians(), **memory}
    for way in _WAYS:
        if way != "mirrored":
            row |= timings.ratio(f"{way}_over_mirrored", way, "mirrored")
            row[f"{way}_memory"] = memory[f"{way}_bytes"] / max(memory["mirrored_bytes"], 1)
    return row


def _step(way: str, strategy: Strategy, gradients: Sequence[np.ndarray]) -> Callable[[], object]:
    with strategy.scope():
        variables = [Variable(np.zeros_like(g), name=str(i)) for i, g in enumerate(gradients)]
        adam = Adam(1e-4, sharded_slots=way == "sharded_slots")
    given = list(gradients)
    if way == "buffers":
        given = strategy.extended.gradient_buffers(variables)
        for buffer, gradient in zip(given, gradients, strict=True):
            buffer[...] = gradient
    pairs = list(zip(given, variables, strict=True))
    return lambda: strategy.run(adam.apply_gradients, args=(pairs,))


def _memory_of_ranks(collectives: Collectives) -> int:
    """Return the bytes of all ranks together; what they share counts once. **Collective**."""
    gc.collect()
    return sum(collectives.gather_json(_proportional_bytes()))


def _proportional_bytes() -> int:
    """Return this process's share of the memory in use, 0 where the system does not tell."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


# Lookups


_NUM_ROWS, _WIDTH, _NUM_IDS = 1_000_000, 64, 4096


def _measure_lookup(strategy: Strategy, num_samples: int) -> Row:
    """Time a lookup, and `Alltoallv` of mpi4py on the same rows."""

    def rows(partition_shape: Sequence[int], partition_offset: Sequence[int]) -> np.ndarray:
        return np.full(partition_shape, partition_offset[0], np.float32)

    collectives = strategy.extended._collectives
    with strategy.scope():
        table = Variable(rows, shape=(_NUM_ROWS, _WIDTH), dtype=np.float32, name="table")
    ids = np.random.default_rng(collectives.rank).integers(0, _NUM_ROWS, _NUM_IDS)
    bounds = [0]
    if isinstance(table, ShardedVariable):
        bounds = [each.start for each in table.row_ranges]
    own = np.array(table.part)
    by_hand = _raw_lookup(own, np.array(bounds), ids)
    candidates = {"ours": lambda: table.lookup(ids), "raw": by_hand}
    if not np.array_equal(table.lookup(ids), by_hand()):
        raise AssertionError("both must bring the same rows")
    timings = take_turns(candidates, collectives, num_samples)
    row = {"num_ids": _NUM_IDS, "table": f"{_NUM_ROWS} x {_WIDTH}", **timings.medians()}
    return row | timings.ratio("ours_over_raw", "ours", "raw")


def _raw_lookup(own: np.ndarray, starts: np.ndarray, ids: np.ndarray) -> Callable[[], np.ndarray]:
    """Return what a program of mpi4py does, with nothing checked."""
    comm = open_world(None).comm
    size, width = comm.size, own.shape[1]

    def look_up() -> np.ndarray:
        owners = np.searchsorted(starts, ids, side="right") - 1
        order = np.argsort(owners, kind="stable")
        counts = np.bincount(owners, minlength=size)
        incoming = np.empty(size, counts.dtype)
        comm.Alltoall(counts, incoming)
        asked = np.empty(int(incoming.sum()), ids.dtype)
        comm.Alltoallv([ids[order], counts], [asked, incoming])
        answers = own[asked - starts[comm.rank]]
        sorted_rows = np.empty((ids.size, width), own.dtype)
        comm.Alltoallv([answers, incoming * width], [sorted_rows, counts * width])
        found = np.empty_like(sorted_rows)
        found[order] = sorted_rows
        return found

    return look_up


# Saves


def _measure_save(strategy: Strategy, num_bytes: int) -> Row:
    """Measure how much more memory rank 0 takes while a sharded table is saved."""

    def rows(partition_shape: Sequence[int], partition_offset: Sequence[int]) -> np.ndarray:
        return np.ones(partition_shape, np.float32)

    collectives = strategy.extended._collectives
    with strategy.scope():
        table = Variable(rows, shape=(num_bytes // 256, 64), dtype=np.float32, name="table")
    row: dict[str, Any] = {"num_bytes": num_bytes}
    with tempfile.TemporaryDirectory() as folder:
        path = collectives.broadcast_json(str(Path(folder) / "table.h5"))
        checkpoint = Checkpoint(table=table)
        for way in ("first", "serial", "parallel"):  # the first one loads the HDF5 library
            _forget_peak()
            before = _peak_bytes()
            checkpoint.write(path, parallel=way == "parallel")
            row[f"{way}_bytes"] = collectives.broadcast_json(max(0, _peak_bytes() - before))
        collectives.gather_json(None)  # the folder goes with this rank
    return row


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _peak_bytes() -> int:
    """Return the largest memory of this process since `_forget_peak`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


BENCHMARK = Benchmark(
    "storage",
    "where variables live: a step of Adam on 25.6 million float32 parameters, and sharded tables",
    measure,
    (
        Table(
            (
                Column.text("parameters", "layout"),
                *(Column.time(title, f"{way}_s") for way, title in _WAYS.items()),
                Column.speed_up("speed-up of sharded slots", "sharded_slots_over_mirrored"),
                Column.speed_up("of central", "central_over_mirrored"),
                Column.speed_up("of buffers", "buffers_over_mirrored"),
            ),
            title="One step",
        ),
        Table(
            (
                Column.text("parameters", "layout"),
                Column.size("mirrored", "mirrored_bytes"),
                Column.ratio("sharded slots / mirrored", "sharded_slots_memory"),
                Column.ratio("central / mirrored", "central_memory"),
                Column.ratio("buffers / mirrored", "buffers_memory"),
            ),
            title="Memory that weights, slots and their steps take, all ranks together",
        ),
        Table(
            (
                Column.text("rows", "num_ids"),
                Column.text("of", "table"),
                Column.time("lookup", "ours_s"),
                Column.time("raw Alltoallv", "raw_s"),
                Column.speed_up("speed-up", "ours_over_raw"),
            ),
            "lookups",
            "Rows of a sharded table",
        ),
        Table(
            (
                Column.size("table", "num_bytes"),
                Column.size("serial", "serial_bytes"),
                Column.size("parallel", "parallel_bytes"),
            ),
            "saves",
            "Memory that rank 0 takes in addition while it saves",
        ),
    ),
    (
        Bars(
            lambda row: row["layout"],
            {f"{way}_s": title for way, title in _WAYS.items()},
            "seconds",
        ),
    ),
)
