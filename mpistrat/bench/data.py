"""Benchmark of reading HDF5 files: shuffled batches, compared with a plain scan and other ways."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
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
from mpistrat.bench.data_layouts import LAYOUTS, measure_layouts, write_layouts
from mpistrat.bench.data_maps import MAPS, measure_maps, write_packed
from mpistrat.bench.data_peers import (
    BATCH_SIZE,
    NUM_FANCY,
    NUM_LOADED,
    loader_reads,
    read_by_index,
    read_in_order,
    read_mapped,
    record_reads,
)
from mpistrat.bench.data_windows import WINDOWS, WINDOWS_TABLE, measure_windows
from mpistrat.bench.measure import Timings, take_turns
from mpistrat.data import Dataset
from mpistrat.hdf5 import h5py, plugin_libraries
from mpistrat.strategies import MPIStrategy, Strategy

_RELATIVE = "rate, relative to a scan of the same file"
COMPRESSED: Mapping[str, Mapping[str, Any]] = {
    "gzip": {"compression": "gzip"},
    "lz4": {"compression": 32004},
}
FILES = (*COMPRESSED, "chunks", "contiguous")
_SIDE, _CHUNK = 32, 64
_NUM_DISTINCT = 320 * _CHUNK
"""Further images repeat the first ones, because generating them takes longer than reading."""


def known_files() -> tuple[str, ...]:
    """Return those of `FILES` that can be written here: lz4 takes hdf5plugin."""
    return tuple(name for name in FILES if name != "lz4" or "lz4" in plugin_libraries())


def write_files(folder: Path, num_examples: int) -> None:
    """Write the same images in compressed chunks, in other chunks, in one piece, and as .npy."""
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
    mapped = np.lib.format.open_memmap(folder / "image.npy", "w+", np.uint8, shape)
    with h5py().File(folder / "contiguous.h5") as file:
        for first in range(0, num_examples, _NUM_DISTINCT):
            mapped[first : first + _NUM_DISTINCT] = file["image"][first : first + _NUM_DISTINCT]
    np.save(folder / "label.npy", label)


def _waves(rng: np.random.Generator, count: int) -> np.ndarray:
    """Return images of waves of random length and direction in 32 steps of brightness."""
    # About as compressible as drawings: decompression takes most of the time of a scan.
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
_MAPPED = "NumPy, mapped .npy, sorted indices, contiguous"
_LOADER = "torch DataLoader, shuffled, 2 workers, gzip"
_STEPS, _STARTS = "steps", "first batches"
_NUM_STEPS, _WIDTH = 100, 512


def measure(choices: Choices) -> Findings:
    """Time passes of all ranks together over images. **Collective** over COMM_WORLD."""
    strategy = MPIStrategy(device=choices.device)
    collectives = strategy.extended._collectives
    with tempfile.TemporaryDirectory() as own:
        # Rank 0's folder; on several nodes TMPDIR must name a shared one.
        folder = Path(collectives.broadcast_json(own))
        with collectives.all_or_none("bench data"):
            if collectives.rank == 0:
                write_files(folder, choices.num_examples)
                write_layouts(folder, choices.num_examples)
                write_packed(folder, choices.num_examples)
        paths = {name: folder / f"{name}.h5" for name in known_files()}
        records: dict[str, Callable[[], object]] = {}
        with collectives.all_or_none("bench data"):
            if collectives.rank == 0:
                records.update(record_reads(folder))
        for name in collectives.broadcast_json(list(records)):
            records.setdefault(name, bool)
        calls, lengths = _candidates(strategy, paths, collectives.rank, choices.num_examples)
        calls |= records
        lengths |= dict.fromkeys(records, choices.num_examples)
        timings = take_turns(calls, collectives, choices.num_samples)
        waiting = _share_of_waiting(strategy, paths["gzip"])
        shares = collectives.gather_json(waiting)
        firsts: dict[str, Callable[[], object]] = {
            name: _first(strategy, path) for name, path in paths.items()
        }
        first = take_turns(firsts, collectives, choices.num_samples)
        num_samples = choices.num_samples
        windows = measure_windows(strategy, folder, choices.num_examples, num_samples)
        layouts = measure_layouts(strategy, folder, choices.num_examples, num_samples)
        maps = measure_maps(strategy, folder, choices.num_examples, num_samples)
    rows = [_row(name, lengths[name], choices.num_examples, timings) for name in calls]
    notes = [f"{each} is not installed, so it is left out." for each in _missing(calls)]
    starts: list[Row] = [{"what": name, **first.time("first_s", name)} for name in firsts]
    steps: list[Row] = [{"num_steps": _NUM_STEPS, "waiting": max(shares)}]
    results = {RESULTS: rows, LAYOUTS.key: layouts, _STARTS: starts, _STEPS: steps}
    return Findings(results | {WINDOWS: windows, MAPS.key: maps}, tuple(notes))


def _candidates(
    strategy: Strategy, paths: Mapping[str, Path], rank: int, num_examples: int
) -> tuple[dict[str, Callable[[], object]], dict[str, int]]:
    """Return the candidates, and how many examples each reads over all ranks."""
    calls: dict[str, Callable[[], object]] = {}
    lengths: dict[str, int] = {}

    def add(name: str, call: Callable[[], object], length: int = num_examples) -> None:
        calls[name], lengths[name] = call, length

    # The peers know nothing of ranks, so they run on rank 0 alone.
    def alone(call: Callable[[], object]) -> Callable[[], object]:
        return call if rank == 0 else bool

    for name, path in paths.items():
        add(_SCANS[name], alone(partial(read_in_order, path)))
        add(f"mpistrat, shuffled, {name}", _pass(strategy, path, is_shuffled=True))
        add(f"mpistrat, in order, {name}", _pass(strategy, path, is_shuffled=False))
    add(_MAPPED, alone(partial(read_mapped, paths["gzip"].parent)))
    add("h5py, sorted index arrays, gzip", alone(partial(read_by_index, paths["gzip"])), NUM_FANCY)
    loader = loader_reads(paths["gzip"])
    if loader is not None:
        add(_LOADER, alone(loader), NUM_LOADED)
    return calls, lengths


def _missing(calls: Mapping[str, object]) -> list[str]:
    """Return the packages whose candidates are not among `calls`."""
    packages = {"PyTorch": "torch", "hdf5plugin": "lz4", "lmdb": "LMDB", "array_record": "Array"}
    return [package for package, part in packages.items() if not any(part in c for c in calls)]


def _pass(strategy: Strategy, path: Path, *, is_shuffled: bool) -> Callable[[], object]:
    batches = strategy.experimental_distribute_dataset(_dataset(path, is_shuffled))

    def read() -> None:
        for _ in batches:
            pass

    return read


def _first(strategy: Strategy, path: Path) -> Callable[[], object]:
    batches = strategy.experimental_distribute_dataset(_dataset(path, is_shuffled=True))

    def read() -> None:
        iterator = iter(batches)
        next(iterator)
        iterator.close()

    return read


def _dataset(path: Path, is_shuffled: bool) -> Dataset:
    dataset = Dataset.from_hdf5(path, ("image", "label"))
    return (dataset.shuffle(0) if is_shuffled else dataset).batch(BATCH_SIZE)


def _share_of_waiting(strategy: Strategy, path: Path) -> float:
    """Return the share of its time that a rank waits for batches, once warm. **Collective**."""
    dataset = _dataset(path, is_shuffled=True).repeat().prefetch(2)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    weight = strategy.extended.xp.ones((32 * 32 * 3, _WIDTH), dtype=np.float32)

    # The forward and backward product of one layer of 512 units.
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
    "passes over HDF5 files of images, beside h5py and PyTorch",
    measure,
    (
        Table(
            (
                Column.text("read by", "what"),
                Column("examples / s", lambda row: f"{row['examples_per_s']:,.0f}"),
                Column.time("one pass", "pass_s"),
                Column.ratio("rate / scan of the same file", "rate_over_scan"),
            )
        ),
        LAYOUTS,
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
        WINDOWS_TABLE,
        MAPS,
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
