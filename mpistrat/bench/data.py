"""Benchmark of reading HDF5 files in shuffled batches, compared with plain h5py."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat import context
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
from mpistrat.data import Dataset
from mpistrat.hdf5 import h5py, plugin_libraries
from mpistrat.strategies import MPIStrategy, Strategy

COMPRESSED: Mapping[str, Mapping[str, Any]] = {
    "gzip": {"compression": "gzip"},
    "lz4": {"compression": 32004},
}
FILES = (*COMPRESSED, "chunks", "contiguous")
BATCH_SIZE = 256
_NUM_BY_INDEX = 2 * BATCH_SIZE
"""Number of examples to read by index arrays. Reading all would take 15 seconds."""
_SIDE, _CHUNK = 32, 64
_NUM_DISTINCT = 320 * _CHUNK
"""Further images repeat the first ones, because generating them takes longer than reading."""


def known_files() -> tuple[str, ...]:
    """Return the `FILES` that can be written here. lz4 needs hdf5plugin."""
    return tuple(name for name in FILES if name != "lz4" or "lz4" in plugin_libraries())


def write_files(folder: Path, num_examples: int) -> None:
    """Write the same images in compressed chunks, in plain chunks and contiguously."""
    rng = np.random.default_rng(0)
    images = _waves(rng, min(num_examples, _NUM_DISTINCT))
    label = rng.integers(0, 10, num_examples)
    shape = (num_examples, *images.shape[1:])
    for name in known_files():
        with h5py().File(folder / f"{name}.h5", "w") as file:
            options = dict(COMPRESSED.get(name, {}))
            if name != "contiguous":
                options["chunks"] = (_CHUNK, *shape[1:])
            dataset = file.create_dataset("image", shape, np.uint8, **options)
            dataset[: len(images)] = images
            for first in range(len(images), num_examples, _CHUNK):
                count = min(_CHUNK, num_examples - first)
                if name in COMPRESSED:
                    source = (first % _NUM_DISTINCT, 0, 0, 0)
                    mask, content = dataset.id.read_direct_chunk(source)
                    dataset.id.write_direct_chunk((first, 0, 0, 0), content, mask)
                else:
                    dataset[first : first + count] = images[first % _NUM_DISTINCT :][:count]
            file.create_dataset("label", data=label)


def _waves(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return images of waves of random length and direction in 32 steps of brightness."""
    # They are about as compressible as drawings, so a scan spends most of its time decompressing.
    y, x = np.mgrid[:_SIDE, :_SIDE]
    images = np.empty((count, _SIDE, _SIDE, 3), np.uint8)
    for first in range(0, count, 1000):
        part = images[first : first + 1000]
        a, b = rng.random((2, len(part), 1, 1)) / 2
        color = rng.random((len(part), 1, 1, 3))
        waves = 128 + 60 * np.sin(a * x + b * y)[..., None] * color
        part[...] = waves.astype(np.uint8) // 8 * 8
    return images


_SCANS = {name: f"h5py, scan, {name}" for name in FILES}
_STEPS, _STARTS = "steps", "first batches"
_NUM_STEPS, _WIDTH = 100, 512


@dataclass(frozen=True)
class Peer:
    """A different way to read the images. It does not know about ranks, so only rank 0 runs it."""

    read: Callable[[], object]
    num_examples: int
    """Number of examples that it reads."""


Peers = Callable[[Path, int], Mapping[str, Peer]]
"""Prepares further peers. Takes the folder of the files and their number of examples."""

More = Callable[[Strategy, Path, Choices], Mapping[str, Sequence[Row]]]
"""Measures further tables. **Collective**."""


def measure(choices: Choices) -> Findings:
    """Time epochs of all ranks together over images. **Collective** over COMM_WORLD."""
    return measure_beside(choices, lambda *_: {}, lambda *_: {})


def measure_beside(choices: Choices, peers: Peers, more: More) -> Findings:
    """Do `measure`, with further `peers` and the tables of `more`. **Collective**."""
    strategy = MPIStrategy(device=choices.device)
    collectives = context.collectives_of(strategy)
    with tempfile.TemporaryDirectory() as own:
        # Use rank 0's folder. On several nodes TMPDIR must name a shared folder.
        folder = Path(collectives.broadcast_json(own))
        found: dict[str, Peer] = {}
        with collectives.all_or_none("bench data"):
            if collectives.rank == 0:
                write_files(folder, choices.num_examples)
                found.update(_h5py_reads(folder, choices.num_examples))
                found.update(peers(folder, choices.num_examples))
        lengths = collectives.broadcast_json({name: p.num_examples for name, p in found.items()})
        calls = {name: found[name].read if name in found else bool for name in lengths}
        for name in known_files():
            path = folder / f"{name}.h5"
            for order, is_shuffled in (("shuffled", True), ("in order", False)):
                calls[f"mpistrat, {order}, {name}"] = _pass(strategy, path, is_shuffled=is_shuffled)
        timings = take_turns(calls, collectives, choices.num_samples)
        shares = collectives.gather_json(_share_of_waiting(strategy, folder / "gzip.h5"))
        firsts = {name: _first(strategy, folder / f"{name}.h5") for name in known_files()}
        first = take_turns(firsts, collectives, choices.num_samples)
        tables = more(strategy, folder, choices)
    # Keep rows of the same file together.
    names = sorted(calls, key=lambda name: FILES.index(name.rsplit(", ", 1)[-1]))
    length = choices.num_examples
    rows = [_row(name, lengths.get(name, length), length, timings) for name in names]
    starts: list[Row] = [{"what": name, **first.time("first_s", name)} for name in firsts]
    steps: list[Row] = [{"num_steps": _NUM_STEPS, "waiting": max(shares)}]
    notes = () if "lz4" in known_files() else ("hdf5plugin is not installed: lz4 is left out.",)
    return Findings({RESULTS: rows, _STARTS: starts, _STEPS: steps, **tables}, notes)


def _h5py_reads(folder: Path, num_examples: int) -> dict[str, Peer]:
    peers = {
        _SCANS[name]: Peer(partial(_read_in_order, folder / f"{name}.h5"), num_examples)
        for name in known_files()
    }
    by_index = partial(_read_by_index, folder / "gzip.h5")
    num_read = min(_NUM_BY_INDEX, num_examples)
    return peers | {"h5py, sorted index arrays, gzip": Peer(by_index, num_read)}


def _read_in_order(path: Path) -> None:
    """Read all batches in the order of the file, by plain slices of h5py."""
    with h5py().File(path, "r") as file:
        image, label = file["image"], file["label"]
        for first in range(0, len(image), BATCH_SIZE):
            # Keep the batch until the next one is read, as in any program that uses it.
            _batch = image[first : first + BATCH_SIZE], label[first : first + BATCH_SIZE]


def _read_by_index(path: Path) -> None:
    """Read random batches by index arrays, sorted as h5py requires."""
    with h5py().File(path, "r") as file:
        image, label = file["image"], file["label"]
        order = np.random.default_rng(0).permutation(len(image))[:_NUM_BY_INDEX]
        for first in range(0, _NUM_BY_INDEX, BATCH_SIZE):
            rows = np.sort(order[first : first + BATCH_SIZE])
            image[rows]
            label[rows]


def _pass(strategy: Strategy, path: Path, *, is_shuffled: bool) -> Callable[[], object]:
    batches = strategy.distribute_dataset(_dataset(path, is_shuffled))

    def read() -> None:
        for _ in batches:
            pass

    return read


def _first(strategy: Strategy, path: Path) -> Callable[[], object]:
    batches = strategy.distribute_dataset(_dataset(path, is_shuffled=True))

    def read() -> None:
        iterator = iter(batches)
        next(iterator)
        iterator.close()

    return read


def _dataset(path: Path, is_shuffled: bool) -> Dataset:
    dataset = Dataset.from_hdf5(path, ("image", "label"))
    return (dataset.shuffle(0) if is_shuffled else dataset).batch(BATCH_SIZE)


def _share_of_waiting(strategy: Strategy, path: Path) -> float:
    """Return the share of time for which a rank waits for batches. **Collective**."""
    dataset = _dataset(path, is_shuffled=True).repeat().prefetch(2)
    batches = iter(strategy.distribute_dataset(dataset))
    weight = strategy.extended.xp.ones((32 * 32 * 3, _WIDTH), dtype=np.float32)

    # A step does the forward and backward product of one layer of 512 units.
    def step(image: Any, label: Any) -> None:
        x = image.reshape(len(image), -1).astype(np.float32) / 255
        weight[...] += 1e-9 * (x.T @ np.tanh(x @ weight))

    waiting_s = began = 0.0
    for number in range(2 * _NUM_STEPS):
        if number == _NUM_STEPS:  # the first half warms up
            waiting_s, began = 0.0, time.perf_counter()
        asked = time.perf_counter()
        element = batches.get_next()
        waiting_s += time.perf_counter() - asked
        strategy.run(step, args=element)
    strategy.extended.device.synchronize()
    share = waiting_s / (time.perf_counter() - began)
    batches.close()
    return share


def _row(name: str, num_read: int, num_examples: int, timings: Timings) -> Row:
    base = _SCANS[name.rsplit(", ", 1)[-1]]
    return {
        "what": name,
        "examples_per_s": num_read / timings.median_s(name),
        **timings.ratio("rate_over_scan", base, name, factor=num_read / num_examples),
        "pass_s": timings.median_s(name) * num_examples / num_read,
    }


BENCHMARK = Benchmark(
    "data",
    "epochs of HDF5 files of images, compared with h5py",
    measure,
    (
        Table(
            (
                Column.text("read by", "what"),
                Column("examples / s", lambda row: f"{row['examples_per_s']:,.0f}"),
                Column.time("one epoch", "pass_s"),
                Column.ratio("rate / scan of the same file", "rate_over_scan"),
            )
        ),
        Table(
            (Column.text("file", "what"), Column.time("first batch after", "first_s")),
            _STARTS,
            "Start of a shuffled epoch, whose iterator is closed after the first batch",
        ),
        Table(
            (
                Column.text("steps", "num_steps"),
                Column("waiting for data", lambda row: f"{100 * row['waiting']:.1f} %"),
            ),
            _STEPS,
            "Steps on the shuffled gzip file, prefetch(2), the rank that waits longest",
        ),
    ),
    (
        Bars(
            lambda row: row["what"],
            {"rate_over_scan": "rate"},
            "rate, relative to a scan of the same file",
            line_at=1.0,
        ),
    ),
    num_examples=20_000,
    runs_on_devices=True,
)
