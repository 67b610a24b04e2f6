"""Reading HDF5 files: shuffled batches beside a plain scan and other ways."""

from __future__ import annotations

import tempfile
import time as clock
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.bench.benchmark import (
    RESULTS,
    Benchmark,
    Choices,
    Column,
    Findings,
    Row,
    Table,
    ratio,
    text,
    time,
)
from mpistrat.bench.data_files import BATCH_SIZE, FILES, write_files
from mpistrat.bench.data_peers import NUM_FANCY, NUM_LOADED, fancy_reads, loader_reads, scan
from mpistrat.bench.pictures import Bars
from mpistrat.bench.timing import Timings, take_turns
from mpistrat.data import Dataset
from mpistrat.strategies import MPIStrategy, Strategy

__all__ = ["BENCHMARK"]

_SCAN, _SLICES = "h5py, scan, gzip", "h5py, scan, contiguous"
_LOADER = "torch DataLoader, shuffled, 2 workers, gzip"
_STEPS = "steps"
_NUM_STEPS, _WIDTH = 100, 512


def measure(choices: Choices) -> Findings:
    """Time passes over images of all ranks together. **Collective** over COMM_WORLD.

    h5py by itself and the DataLoader run on rank 0 alone.
    """
    strategy = MPIStrategy(device="cpu")
    collectives = strategy.extended.collectives
    with tempfile.TemporaryDirectory() as own:
        # Rank 0's folder; on several nodes it has to be a shared one (TMPDIR).
        folder = Path(collectives.broadcast_json(own))
        with collectives.together("bench data"):
            if collectives.rank == 0:
                write_files(folder, choices.num_examples)
        paths = {name: folder / f"{name}.h5" for name in FILES}
        calls, lengths = _candidates(strategy, paths, collectives.rank, choices.num_examples)
        timings = take_turns(calls, collectives, choices.num_samples)
        waiting = _share_of_waiting(strategy, paths["gzip"])
        shares = collectives.gather_json(waiting)
    rows = [_row(name, lengths[name], choices.num_examples, timings) for name in calls]
    notes = [] if _LOADER in calls else ["PyTorch is not installed, so it is left out."]
    steps: list[Row] = [{"num_steps": _NUM_STEPS, "waiting": max(shares)}]
    return Findings({RESULTS: rows, _STEPS: steps}, tuple(notes))


def _candidates(
    strategy: Strategy, paths: Mapping[str, Path], rank: int, num_examples: int
) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """Return what takes turns, and how many examples each reads over all ranks."""
    calls: dict[str, Callable[[], object]] = {}
    lengths: dict[str, int] = {}

    def add(name: str, call: Callable[[], object], length: int = num_examples) -> None:
        calls[name], lengths[name] = call, length

    def alone(call: Callable[[], object]) -> Callable[[], object]:
        return call if rank == 0 else bool

    add(_SCAN, alone(partial(scan, paths["gzip"])))
    add("mpistrat, shuffled, gzip", _pass(strategy, paths["gzip"], is_shuffled=True))
    add("mpistrat, in order, gzip", _pass(strategy, paths["gzip"], is_shuffled=False))
    add("h5py, sorted index arrays, gzip", alone(partial(fancy_reads, paths["gzip"])), NUM_FANCY)
    loader = loader_reads(paths["gzip"])
    if loader is not None:
        add(_LOADER, alone(loader), NUM_LOADED)
    add(_SLICES, alone(partial(scan, paths["contiguous"])))
    add("mpistrat, shuffled, contiguous", _pass(strategy, paths["contiguous"], is_shuffled=True))
    add("mpistrat, in order, contiguous", _pass(strategy, paths["contiguous"], is_shuffled=False))
    return calls, lengths


def _pass(strategy: Strategy, path: Path, *, is_shuffled: bool) -> Callable[[], object]:
    batches = strategy.experimental_distribute_dataset(_dataset(path, is_shuffled))

    def read() -> None:
        for _ in batches:
            pass

    return read


def _dataset(path: Path, is_shuffled: bool) -> Dataset:
    dataset = Dataset.from_hdf5(path, ("image", "label"))
    return (dataset.shuffle(0) if is_shuffled else dataset).batch(BATCH_SIZE)


def _share_of_waiting(strategy: Strategy, path: Path) -> float:
    """Return which part of its time a rank waits for the next batch, once warm. **Collective**.

    A step is the forward and backward product of one layer of 512 units.
    """
    dataset = _dataset(path, is_shuffled=True).repeat().prefetch(2)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    weight = np.ones((32 * 32 * 3, _WIDTH), np.float32)

    def step(image: Any, label: Any) -> None:
        x = image.reshape(len(image), -1).astype(np.float32) / 255
        weight[...] += 1e-9 * (x.T @ np.tanh(x @ weight))

    waiting_s = began = 0.0
    for number in range(2 * _NUM_STEPS):
        if number == _NUM_STEPS:  # the first half warms up
            waiting_s, began = 0.0, clock.perf_counter()
        asked = clock.perf_counter()
        element = batches.get_next()
        waiting_s += clock.perf_counter() - asked
        strategy.run(step, args=element)
    share = waiting_s / (clock.perf_counter() - began)
    batches.close()
    return share


def _row(name: str, num_read: int, num_examples: int, timings: Timings) -> Row:
    base = _SLICES if "contiguous" in name else _SCAN
    return {
        "what": name,
        "examples_per_s": num_read / timings.median_s(name),
        "rate_over_scan": timings.median_ratio(base, name) * num_read / num_examples,
        "pass_s": timings.median_s(name) * num_examples / num_read,
    }


BENCHMARK = Benchmark(
    "data",
    "passes over HDF5 files of images, beside h5py and PyTorch",
    measure,
    (
        Table(
            (
                text("read by", "what"),
                Column("examples / s", lambda row: f"{row['examples_per_s']:,.0f}"),
                time("one pass", "pass_s"),
                ratio("rate / scan of the same file", "rate_over_scan"),
            )
        ),
        Table(
            (
                text("steps", "num_steps"),
                Column("waiting for data", lambda row: f"{100 * row['waiting']:.1f} %"),
            ),
            _STEPS,
            "Steps on the shuffled gzip file, prefetch(2), the rank that waits longest",
        ),
    ),
    (Bars(lambda row: row["what"], {"rate_over_scan": "rate / scan"}, "rate / scan", line_at=1.0),),
    num_examples=20_000,
)
