"""Benchmark of windows: shuffled windows of a long series, beside h5py by index."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.bench.benchmark import Column, Row, Table
from mpistrat.bench.measure import take_turns
from mpistrat.collectives.collectives import Collectives
from mpistrat.data import Dataset
from mpistrat.hdf5 import h5py
from mpistrat.strategies import Strategy

WINDOWS = "windows"
_SIZE, _WIDTH, _CHUNK, _BATCH_SIZE = 32, 16, 1000, 256
_ROWS_PER_EXAMPLE = 50
"""Rows of the series for each image of the other files: a million by default."""

_NUM_INDEXED = 2000
_FILES: dict[str, dict[str, Any]] = {"contiguous": {}, "chunks": {"chunks": (_CHUNK, _WIDTH)}}
_GZIP: dict[str, dict[str, Any]] = {
    "gzip": {"chunks": (_CHUNK, _WIDTH), "compression": "gzip", "compression_opts": 1}
}

WINDOWS_TABLE = Table(
    (
        Column.text("read by", "what"),
        Column("windows / s", lambda row: f"{row['windows_per_s']:,.0f}"),
        Column.ratio("rate / h5py by index", "rate_over_index"),
    ),
    WINDOWS,
    f"Shuffled windows of {_SIZE} rows of {_WIDTH} float32, all ranks together",
)


def measure_windows(
    strategy: Strategy, folder: Path, num_examples: int, num_samples: int
) -> list[Row]:
    """Return the rates of passes over all windows, of each kind of file. **Collective**."""
    collectives: Collectives = strategy.extended._collectives
    num_rows = max(_ROWS_PER_EXAMPLE * num_examples, 4 * _CHUNK)
    with collectives.all_or_none("bench data"):
        if collectives.rank == 0:
            _write_series(folder, num_rows)
    calls: dict[str, Callable[[], object]] = {}
    numbers: dict[str, int] = {}
    for name in (*_FILES, *_GZIP):
        path = folder / f"series-{name}.h5"
        indexed = _NUM_INDEXED if name in _FILES else _NUM_INDEXED // 10
        alone = partial(_read_by_index, path, indexed)
        calls[f"h5py, by index, {name}"] = alone if collectives.rank == 0 else bool
        numbers[f"h5py, by index, {name}"] = indexed
        dataset = Dataset.from_hdf5(path, "x").window(_SIZE).shuffle(seed=0).batch(_BATCH_SIZE)
        batches = strategy.experimental_distribute_dataset(dataset)
        calls[f"mpistrat, shuffled, {name}"] = partial(_exhaust, batches)
        numbers[f"mpistrat, shuffled, {name}"] = num_rows - _SIZE + 1
    timings = take_turns(calls, collectives, num_samples)
    rows: list[Row] = []
    for what in calls:
        base = f"h5py, by index, {what.rsplit(', ', 1)[-1]}"
        factor = numbers[what] / numbers[base]
        ratio = timings.ratio("rate_over_index", base, what, factor=factor)
        rate = numbers[what] / timings.median_s(what)
        rows.append({"what": what, "windows_per_s": rate, **ratio})
    return rows


def _write_series(folder: Path, num_rows: int) -> None:
    rows = np.random.default_rng(0).random((num_rows, _WIDTH), np.float32)
    for name, options in (_FILES | _GZIP).items():
        with h5py().File(folder / f"series-{name}.h5", "w") as file:
            file.create_dataset("x", data=rows, **options)


def _read_by_index(path: Path, count: int) -> None:
    with h5py().File(path) as file:
        series = file["x"]
        firsts = np.random.default_rng(1).integers(0, len(series) - _SIZE, count)
        for first in firsts.tolist():
            _ = series[first : first + _SIZE]


def _exhaust(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass
