"""Benchmark of checkpoints beside plain h5py: same arrays, same folder, same run."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from mpistrat import hdf5
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
from mpistrat.bench.measure import Timings
from mpistrat.checkpoint import Checkpoint, CheckpointManager
from mpistrat.checkpoint.ranks import share_out
from mpistrat.checkpoint.raw_io import ChecksumPool
from mpistrat.collectives.collectives import Collectives
from mpistrat.strategies import MPIStrategy
from mpistrat.variables import Variable

__all__ = ["BENCHMARK"]

_NUM_ARRAYS = 8
_BYTES_PER_ARRAY = 2**26


@dataclass(frozen=True)
class _Candidate:
    """What all ranks time, and what they do before each time without timing it."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


def measure(choices: Choices) -> Findings:
    """Time saving and restoring 512 MiB of float32 variables. **Collective**."""
    strategy = MPIStrategy(device="cpu")
    collectives = strategy.extended._collectives
    rng = np.random.default_rng(0)
    with strategy.scope():
        variables = {
            f"weight{i}": Variable(rng.random(_BYTES_PER_ARRAY // 4, np.float32), name=f"w{i}")
            for i in range(_NUM_ARRAYS)
        }
    with _folder(collectives) as folder:
        rows = [
            _row(*each, collectives, choices.num_samples)
            for each in _comparisons(variables, folder, collectives)
        ]
    note = (
        "Plain h5py is alone on rank 0: it writes and flushes to disk, and reads without a digest. "
        "Cold: the file has left the memory of the system. Each copy goes to warm memory. Digests: "
        "SHA-256 of the same bytes and nothing else, for a save on rank 0, for a restore and with "
        "parallel=True on all ranks; bound is their time divided by that of the peer."
    )
    return Findings({RESULTS: rows}, (note,))


def _comparisons(
    variables: Mapping[str, Variable], folder: Path, collectives: Collectives
) -> Iterator[tuple[str, str, dict[str, _Candidate]]]:
    checkpoint = Checkpoint(**variables)
    arrays = {name: variable._storage for name, variable in variables.items()}
    paths = {"ours": folder / "ours.h5", "peer": folder / "plain.h5"}

    def on_root(call: Callable[[], object]) -> Callable[[], object]:
        return call if collectives.rank == 0 else lambda: None

    def digest(num_ranks: int) -> _Candidate:
        owners = share_out({name: array.nbytes for name, array in arrays.items()}, range(num_ranks))
        own = [array for name, array in arrays.items() if owners[name] == collectives.rank]
        return _Candidate(lambda: _digest(own))

    manager = CheckpointManager(checkpoint, folder / "managed", 1, asynchronous=True)
    copies = {name: array.copy() for name, array in arrays.items()}
    room = {name: on_root(partial(_remove, path)) for name, path in paths.items()}
    for what, parallel in (("save", False), ("save, parallel=True", True)):
        write = partial(checkpoint.write, paths["ours"], parallel=parallel)
        yield (
            what,
            "h5py and fsync",
            {
                "ours": _Candidate(write, room["ours"]),
                "peer": _Candidate(on_root(lambda: _write(paths["peer"], arrays)), room["peer"]),
                "digests": digest(collectives.size if parallel else 1),
            },
        )
    yield (
        "stall of an asynchronous save",
        "copy",
        {
            "ours": _Candidate(manager.save, manager.wait),
            "peer": _Candidate(on_root(lambda: _copy(copies, arrays)), manager.wait),
        },
    )
    manager.wait()
    for state, prepare in (("cold", _forget), ("warm", _touch)):
        files = {name: on_root(partial(prepare, path)) for name, path in paths.items()}
        yield (
            f"restore, {state}",
            "h5py",
            {
                "ours": _Candidate(lambda: checkpoint.restore(paths["ours"]), files["ours"]),
                "peer": _Candidate(on_root(lambda: _read(paths["peer"])), files["peer"]),
                "digests": digest(collectives.size),
            },
        )


def _row(
    what: str,
    peer: str,
    candidates: Mapping[str, _Candidate],
    collectives: Collectives,
    num_samples: int,
) -> Row:
    """Time the candidates in turns, after a warm-up round. **Collective**."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    order = random.Random(0)  # equal on all ranks
    for number in range(num_samples + 1):
        order.shuffle(names)
        for name in names:
            candidate = candidates[name]
            candidate.prepare()
            collectives.gather_json(None)
            began_s = perf_counter()
            candidate.run()
            time_s = max(collectives.gather_json(perf_counter() - began_s))
            if number:
                samples[name].append(time_s)
    timings = Timings(samples)
    num_bytes = _NUM_ARRAYS * _BYTES_PER_ARRAY
    row: dict[str, Any] = {"what": what, "peer": peer, "num_bytes": num_bytes}
    row |= timings.medians() | {"ours_over_peer": timings.median_ratio("ours", "peer")}
    if "digests" in candidates:
        row["digests_over_peer"] = timings.median_ratio("digests", "peer")
    return row


@contextmanager
def _folder(collectives: Collectives) -> Iterator[Path]:
    """Yield a new folder in the current one, and remove it at the end. **Collective**."""
    made = None  # not below TMPDIR: the file system of the current folder is measured
    with collectives.all_or_none("bench"):
        if collectives.rank == 0:
            made = tempfile.mkdtemp(dir=".", prefix=".mpistrat-bench-")
    folder = Path(collectives.broadcast_json(made))
    try:
        yield folder
    finally:
        if collectives.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)


def _write(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with hdf5.h5py().File(path, "w") as file:
        for name, array in arrays.items():
            file.create_dataset(name, data=array)
    with open(path, "rb") as written:
        os.fsync(written.fileno())


def _read(path: Path) -> dict[str, np.ndarray]:
    with hdf5.h5py().File(path, "r") as file:
        return {name: dataset[()] for name, dataset in file.items()}


def _digest(arrays: Sequence[np.ndarray]) -> None:
    """Compute the digests of arrays in memory."""
    with ChecksumPool() as digests:
        digesters = [digests.begin() for _ in arrays]
        for digester, array in zip(digesters, arrays, strict=True):
            digester.update(array, is_view=True)
        for digester in digesters:
            digester.result()


def _copy(targets: Mapping[str, np.ndarray], sources: Mapping[str, np.ndarray]) -> None:
    for name, source in sources.items():
        np.copyto(targets[name], source)


def _remove(path: Path) -> None:
    """Remove a file, because every checkpoint is a new one."""
    path.unlink(missing_ok=True)


def _forget(path: Path) -> None:
    """Drop a file from the page cache."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _touch(path: Path) -> None:
    """Read a file into the page cache."""
    with open(path, "rb") as file:
        while file.read(2**24):
            pass


BENCHMARK = Benchmark(
    "checkpoint",
    "saving and restoring 512 MiB in the current folder, beside plain h5py",
    measure,
    (
        Table(
            (
                Column.text("what", "what"),
                Column.size("size", "num_bytes"),
                Column.time("mpistrat", "ours_s"),
                Column.text("peer", "peer"),
                Column.time("its time", "peer_s"),
                Column.ratio("ratio", "ours_over_peer"),
                Column.time("digests", "digests_s"),
                Column.ratio("bound", "digests_over_peer"),
            )
        ),
    ),
    (Bars(lambda row: row["what"], {"ours_s": "mpistrat", "peer_s": "peer"}, "seconds"),),
)
