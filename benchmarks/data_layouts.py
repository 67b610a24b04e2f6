"""Benchmark of other layouts of HDF5 files: a group for each example, and compound rows."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.bench.benchmark import Column, Row, Table
from mpistrat.bench.measure import take_turns
from mpistrat.data import Dataset, Field
from mpistrat.hdf5 import h5py
from mpistrat.strategies import Strategy

if TYPE_CHECKING:
    from mpistrat.collectives.collectives import Collectives

_BATCH_SIZE = 64
_LENGTH = 1024
"""Numbers in the data set of a group: 8 KiB."""
_ROWS_PER_EXAMPLE = 50
"""So many that the members do not stay in memory between epochs."""
_BLOCK = 4096
_MEMBERS = [(f"m{number}", "f8") for number in range(20)]

LAYOUTS = Table(
    (
        Column.text("read by", "what"),
        Column("examples / s", lambda row: f"{row['examples_per_s']:,.0f}"),
        Column.time("one pass", "pass_s"),
        Column.ratio("rate / h5py", "rate_over_h5py"),
    ),
    "layouts",
    "Other layouts: groups of an 8 KiB data set and an attribute; two of twenty members",
)


def write_layouts(folder: Path, num_examples: int) -> None:
    """Write a group for each example, and 50 compound rows for each in one piece and in chunks."""
    numbers = np.random.default_rng(0).random(_LENGTH)
    with h5py().File(folder / "groups.h5", "w") as file:
        for number in range(num_examples):
            group = file.create_group(f"data/demo_{number}")
            group["x"] = numbers
            group.attrs["label"] = number % 10
    rows = np.zeros(num_examples * _ROWS_PER_EXAMPLE, _MEMBERS)
    for name, _ in _MEMBERS:
        rows[name] = np.arange(len(rows)) % 1000
    with h5py().File(folder / "rows.h5", "w") as file:
        file["contiguous"] = rows
        file.create_dataset("gzip", data=rows, chunks=(1024,), compression="gzip", shuffle=True)


def measure_layouts(
    strategy: Strategy, folder: Path, num_examples: int, num_samples: int
) -> list[Row]:
    """Time passes of all ranks beside plain h5py on rank 0. **Collective**."""
    collectives: Collectives = strategy.extended._collectives
    calls: dict[str, Callable[[], object]] = {}
    bases: dict[str, str] = {}
    lengths: dict[str, int] = {}

    def add(name: str, call: Callable[[], object], base: str, length: int) -> None:
        calls[name], bases[name], lengths[name] = call, base, length

    def alone(call: Callable[[], object]) -> Callable[[], object]:
        return call if collectives.rank == 0 else bool

    groups, rows = folder / "groups.h5", folder / "rows.h5"
    base = "h5py, by name, shuffled, groups"
    add(base, alone(partial(_read_by_name, groups, num_examples)), base, num_examples)
    fields = ("data/demo_*/x", Field("data/demo_*", attribute="label"))
    batches = Dataset.from_hdf5(groups, fields).shuffle(0).batch(_BATCH_SIZE)
    add("mpistrat, shuffled, groups", _pass(strategy, batches), base, num_examples)
    first = partial(_first_epoch, strategy, groups, fields)
    add("mpistrat, listing and first epoch, groups", first, base, num_examples)
    base = "h5py, visititems, groups"
    add(base, alone(partial(_visit, groups)), base, num_examples)
    add("mpistrat, listing, groups", alone(partial(_list, groups, fields)), base, num_examples)
    for name in ("contiguous", "gzip"):
        base = f"h5py, whole rows, {name}"
        count = num_examples * _ROWS_PER_EXAMPLE
        add(base, alone(partial(_read_whole_rows, rows, name)), base, count)
        source = Dataset.from_hdf5(rows, (f"{name}/m3", f"{name}/m11"))
        what = f"mpistrat, two members, {name}"
        add(what, _pass(strategy, source.batch(_BLOCK)), base, count)
    timings = take_turns(calls, collectives, num_samples)
    return [
        {
            "what": name,
            "examples_per_s": lengths[name] / timings.median_s(name),
            "pass_s": timings.median_s(name),
            **timings.ratio("rate_over_h5py", bases[name], name),
        }
        for name in calls
    ]


def _pass(strategy: Strategy, dataset: Dataset) -> Callable[[], object]:
    batches = strategy.experimental_distribute_dataset(dataset)

    def read() -> None:
        for _ in batches:
            pass

    return read


def _first_epoch(strategy: Strategy, path: Path, fields: Any) -> None:
    _pass(strategy, Dataset.from_hdf5(path, fields).shuffle(0).batch(_BATCH_SIZE))()


def _read_by_name(path: Path, num_examples: int) -> None:
    """Read batches as programs do that open the file once."""
    order = np.random.default_rng(0).permutation(num_examples)
    with h5py().File(path) as file:
        data = file["data"]
        for first in range(0, num_examples, _BATCH_SIZE):
            numbers = order[first : first + _BATCH_SIZE]
            chosen: list[Any] = [data[f"demo_{number}"] for number in numbers]
            x = np.stack([group["x"][()] for group in chosen])
            _batch = x, np.array([group.attrs["label"] for group in chosen])


def _visit(path: Path) -> None:
    names: list[str] = []
    with h5py().File(path) as file:
        file.visititems(lambda name, _: names.append(name))


def _list(path: Path, fields: Any) -> None:
    Dataset.from_hdf5(path, fields).cardinality()


def _read_whole_rows(path: Path, name: str) -> None:
    """Read whole rows in blocks, and take two members."""
    with h5py().File(path) as file:
        dataset = file[name]
        for first in range(0, len(dataset), _BLOCK):
            rows = dataset[first : first + _BLOCK]
            _batch = rows["m3"].copy(), rows["m11"].copy()
