"""Benchmark of maps in threads and of caches, beside loops and thread pools of Python."""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.bench.benchmark import Column, Row, Table
from mpistrat.bench.measure import take_turns
from mpistrat.data import Dataset
from mpistrat.hdf5 import h5py
from mpistrat.strategies import Strategy

if TYPE_CHECKING:
    from mpistrat.collectives.collectives import Collectives

_BATCH_SIZE = 64
_SHAPE = (128, 128, 3)
_NUM_DISTINCT = 64
_SHARE = 4
"""One row for so many examples of the other files, because each takes long to decode."""

_NUM_THREADS = 2
_ONE_THREAD = "mpistrat, map"
_CACHED = "mpistrat, map and cache, later passes"

MAPS = Table(
    (
        Column.text("decoded by", "what"),
        Column("examples / s", lambda row: f"{row['examples_per_s']:,.0f}"),
        Column.time("one pass", "pass_s"),
        Column.ratio("rate / map in one thread", "rate_over_map"),
        Column.ratio("memory / elements", "memory_over_elements"),
    ),
    "maps",
    "Rows of zlib bytes that decode to 48 KiB outside of Python's lock, shuffled; memory of a node",
)


def write_packed(folder: Path, num_examples: int) -> None:
    """Write compressed images as rows of variable length."""
    rng = np.random.default_rng(0)
    # About as many bits as a JPEG has, so that decoding takes about as long.
    images = rng.integers(0, 4, (_NUM_DISTINCT, *_SHAPE), np.uint8)
    packed = [np.frombuffer(zlib.compress(image.tobytes(), 1), np.uint8) for image in images]
    with h5py().File(folder / "packed.h5", "w") as file:
        rows = file.create_dataset("image", (_num_rows(num_examples),), h5py().vlen_dtype(np.uint8))
        for number in range(len(rows)):
            rows[number] = packed[number % _NUM_DISTINCT]


def _num_rows(num_examples: int) -> int:
    return max(num_examples // _SHARE, _BATCH_SIZE)


def measure_maps(
    strategy: Strategy, folder: Path, num_examples: int, num_samples: int
) -> list[Row]:
    """Time passes of all ranks beside plain Python on rank 0. **Collective**."""
    collectives: Collectives = strategy.extended._collectives
    path, count = folder / "packed.h5", _num_rows(num_examples)
    plain = {
        "h5py, a loop": partial(_loop, path),
        f"h5py, {_NUM_THREADS} threads of a ThreadPoolExecutor": partial(_pool, path),
    }
    calls: dict[str, Callable[[], object]] = {
        name: call if collectives.rank == 0 else bool for name, call in plain.items()
    }

    def batches(num_parallel_calls: int | None, *, is_cached: bool = False) -> Iterable[Any]:
        dataset = Dataset.from_hdf5(path, "image").shuffle(0)
        dataset = dataset.map(_decoded, num_parallel_calls=num_parallel_calls)
        dataset = dataset.cache() if is_cached else dataset
        return strategy.experimental_distribute_dataset(dataset.batch(_BATCH_SIZE))

    calls[_ONE_THREAD] = partial(_exhaust, batches(None))
    name = f"mpistrat, map(num_parallel_calls={_NUM_THREADS})"
    calls[name] = partial(_exhaust, batches(_NUM_THREADS))
    calls["mpistrat, map and cache, first pass"] = lambda: _exhaust(batches(None, is_cached=True))
    # One pass fills it, before it takes its turns.
    before = sum(collectives.gather_json(_shared_bytes()))
    kept = batches(None, is_cached=True)
    _exhaust(kept)
    collectives.gather_json(None)  # all ranks have written, and none has left
    taken = sum(collectives.gather_json(_shared_bytes())) - before
    calls[_CACHED] = partial(_exhaust, kept)
    timings = take_turns(calls, collectives, num_samples)
    memory = taken / (count * int(np.prod(_SHAPE)))
    return [
        {
            "what": what,
            "examples_per_s": count / timings.median_s(what),
            "pass_s": timings.median_s(what),
            **timings.ratio("rate_over_map", _ONE_THREAD, what),
            **({"memory_over_elements": memory} if what == _CACHED else {}),
        }
        for what in calls
    ]


def _decoded(row: np.ndarray) -> np.ndarray:
    return np.frombuffer(zlib.decompress(row.data), np.uint8).reshape(_SHAPE)


def _exhaust(batches: Iterable[Any]) -> None:
    for _ in batches:
        pass


def _shuffled_rows(path: Path) -> Iterator[np.ndarray]:
    with h5py().File(path) as file:
        rows = file["image"]
        for number in np.random.default_rng(0).permutation(len(rows)).tolist():
            yield rows[number]


def _stack(images: Iterable[np.ndarray]) -> None:
    """Stack them in batches, each kept until the next."""
    waiting: list[np.ndarray] = []
    for image in images:
        waiting.append(image)
        if len(waiting) == _BATCH_SIZE:
            _batch, waiting = np.stack(waiting), []
    if waiting:
        _batch = np.stack(waiting)


def _loop(path: Path) -> None:
    """Read and decode one row after the other, as programs do."""
    _stack(map(_decoded, _shuffled_rows(path)))


def _pool(path: Path) -> None:
    """Decode in threads, with as many results waiting as `map` lets wait."""

    def images() -> Iterator[np.ndarray]:
        waiting: deque[Future[np.ndarray]] = deque()
        with ThreadPoolExecutor(_NUM_THREADS) as threads:
            for row in _shuffled_rows(path):
                waiting.append(threads.submit(_decoded, row))
                if len(waiting) == 2 * _NUM_THREADS:
                    yield waiting.popleft().result()
            for each in waiting:
                yield each.result()

    _stack(images())


def _shared_bytes() -> int:
    """Return this process's share of the memory that ranks share: each page counts once a node."""
    total, is_shared = 0, False
    try:
        lines = Path("/proc/self/smaps").read_text().splitlines()
    except OSError:
        return 0
    for line in lines:
        if line.startswith("Pss:") and is_shared:
            total += 1024 * int(line.split()[1])
        elif "-" in line.split(" ", 1)[0]:
            is_shared = "/memfd:mpistrat" in line
    return total
