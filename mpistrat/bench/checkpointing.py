"""Benchmark of checkpoints against h5py and safetensors: same arrays, same folder, same run."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from mpistrat import context, hdf5
from mpistrat.arrays import is_on_host, namespace_of
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
from mpistrat.bench.measure import SHAPES, Timings, random_arrays
from mpistrat.checkpoint import Checkpoint, CheckpointManager
from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.collectives.collectives import Collectives
from mpistrat.strategies import MPIStrategy
from mpistrat.variables import Variable

_MODELS = {
    "161 arrays, 102 MB": SHAPES,
    "10 arrays, 1 GB": ((25_000_000,),) * 10,
}
"""Shapes of ResNet-50, and a few large arrays."""


@dataclass(frozen=True)
class _Candidate:
    """Function that all ranks time, and preparation before each call, which is not timed."""

    run: Callable[[], object]
    prepare: Callable[[], object] = lambda: None


_Candidates = dict[str, _Candidate]
"""Candidates by name: `mpistrat`, the peer by hand, and other libraries that are installed."""


def measure(choices: Choices) -> Findings:
    """Time saving and restoring of float32 variables. **Collective**."""
    strategy = MPIStrategy(device=choices.device)
    collectives = context.collectives_of(strategy)
    rows = []
    for model, shapes in _MODELS.items():
        with strategy.scope():
            variables = {
                f"weight{i}": Variable(values, name=f"weight{i}")
                for i, values in enumerate(random_arrays(shapes))
            }
        with new_folder(collectives) as folder:
            compared = _Comparison(variables, folder, collectives)
            for what, peer, candidates in compared.rows():
                row: Row = {"what": what, "model": model, "peer": peer}
                rows.append({**row, **_row(candidates, collectives, choices.num_samples)})
        del variables, compared
    note = (
        "By hand: h5py writes on rank 0 and flushes to disk, and reads all values on each rank, "
        "without a digest, into new arrays; in place, into arrays that are there. Cold: the file "
        f"has left the memory of the system. Versions: {_versions()}."
    )
    return Findings({RESULTS: rows}, (note,))


class _Comparison:
    """One model in one folder, which several libraries save and restore."""

    def __init__(
        self, variables: Mapping[str, Variable], folder: Path, collectives: Collectives
    ) -> None:
        self._arrays = {name: variable._storage for name, variable in variables.items()}
        self._copies = _on_host({name: array.copy() for name, array in self._arrays.items()})
        self._checkpoint = Checkpoint(**variables)
        self._folder = folder
        self._is_root = collectives.rank == 0

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.{'h5' if name in ('ours', 'hand') else name}"

    def _on_root(self, call: Callable[[], object]) -> Callable[[], object]:
        return call if self._is_root else lambda: None

    def _placed(self, arrays: Mapping[str, np.ndarray]) -> list[Any]:
        """Return arrays that were read, moved to the memory of the variables."""
        return [namespace_of(self._arrays[name]).asarray(array) for name, array in arrays.items()]

    def rows(self) -> Iterator[tuple[str, str, _Candidates]]:
        """Yield each comparison with its title and the name of the peer by hand. **Collective**."""
        for what, parallel in (("save", False), ("save, parallel=True", True)):
            yield what, "h5py and fsync", self._saves(parallel)
        yield from self._stall()
        for state, prepare in (("warm", _touch), ("cold", _forget)):
            yield f"restore, {state}", "h5py", self._restores(prepare)
        yield "verify, warm", "read", self._verifications()

    def _saves(self, parallel: bool) -> _Candidates:
        ours = partial(self._checkpoint.write, self._path("ours"), parallel=parallel)
        calls: dict[str, Callable[[], object]] = {
            "ours": ours,
            "hand": self._on_root(lambda: _write(self._path("hand"), _on_host(self._arrays))),
        }
        if not parallel and (safetensors := _safetensors()) is not None:
            path = self._path("safetensors")
            calls["safetensors"] = self._on_root(
                lambda: _save_safetensors(safetensors, path, _on_host(self._arrays))
            )
        return {
            name: _Candidate(call, self._on_root(partial(_remove, self._path(name))))
            for name, call in calls.items()
        }

    def _stall(self) -> Iterator[tuple[str, str, _Candidates]]:
        manager = CheckpointManager(self._checkpoint, self._folder / "later", 1, asynchronous=True)
        copy = self._on_root(lambda: _copy(self._copies, self._arrays))
        candidates = {
            "ours": _Candidate(manager.save, manager.wait),
            "hand": _Candidate(copy, manager.wait),
        }
        yield "stall of an asynchronous save", "copy", candidates
        manager.wait()

    def _restores(self, prepare: Callable[[Path], None]) -> _Candidates:
        calls: dict[str, Callable[[], object]] = {
            "ours": lambda: self._checkpoint.restore(self._path("ours")),
            "hand": lambda: self._placed(_read(self._path("hand"))),
            "in_place": lambda: _read_into(self._path("hand"), self._copies),
        }
        if (safetensors := _safetensors()) is not None:
            path = self._path("safetensors")
            calls["safetensors"] = lambda: self._placed(safetensors.load_file(path))
        if not all(map(is_on_host, self._arrays.values())):
            del calls["in_place"]  # h5py reads only to host memory
        files = {"in_place": self._path("hand")}
        return {
            name: _Candidate(
                call, self._on_root(partial(prepare, files.get(name, self._path(name))))
            )
            for name, call in calls.items()
        }

    def _verifications(self) -> _Candidates:
        touch = self._on_root(partial(_touch, self._path("ours")))

        def verify() -> None:
            with open_checkpoint(self._path("ours")) as reader:
                reader.verify()

        return {
            "ours": _Candidate(self._on_root(verify), touch),
            "hand": _Candidate(self._on_root(lambda: _read(self._path("hand"))), touch),
        }


def _row(candidates: _Candidates, collectives: Collectives, num_samples: int) -> Row:
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
            collectives.device.synchronize()
            time_s = max(collectives.gather_json(perf_counter() - began_s))
            if number:
                samples[name].append(time_s)
    timings = Timings(samples)
    row: dict[str, Any] = timings.medians()
    for name in candidates.keys() - {"ours"}:
        row |= timings.ratio(f"ours_over_{name}", "ours", name)
    return row


def _versions() -> str:
    """Return the versions of the peers, as text."""
    names = [f"h5py {hdf5.h5py().__version__}", f"HDF5 {hdf5.h5py().version.hdf5_version}"]
    if _safetensors() is not None:
        names.append(f"safetensors {importlib.metadata.version('safetensors')}")
    return ", ".join(names)


def _safetensors() -> Any:
    """Return safetensors for NumPy, or ``None`` if it is not installed."""
    try:
        return importlib.import_module("safetensors.numpy")
    except ModuleNotFoundError:
        return None


@contextmanager
def new_folder(collectives: Collectives) -> Iterator[Path]:
    """Yield a new folder in the current one, and remove it at the end. **Collective**."""
    made = None  # not in TMPDIR, because the file system of the current folder is measured
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
    # fsync flushes the file, whichever descriptor has written to it (fsync(2)).
    with open(path, "rb") as written:
        os.fsync(written.fileno())


def _read(path: Path) -> dict[str, np.ndarray]:
    with hdf5.h5py().File(path, "r") as file:
        return {name: dataset[()] for name, dataset in file.items()}


def _read_into(path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    with hdf5.h5py().File(path, "r") as file:
        for name, array in arrays.items():
            file[name].read_direct(array)


def _save_safetensors(library: Any, path: Path, arrays: Mapping[str, np.ndarray]) -> None:
    library.save_file(arrays, path)
    with open(path, "rb") as written:
        os.fsync(written.fileno())


def _copy(targets: Mapping[str, np.ndarray], sources: Mapping[str, Any]) -> None:
    for name, source in sources.items():
        if is_on_host(source):
            np.copyto(targets[name], source)
        else:
            source.get(out=targets[name])


def _on_host(arrays: Mapping[str, Any]) -> dict[str, np.ndarray]:
    return {name: each if is_on_host(each) else each.get() for name, each in arrays.items()}


def _remove(path: Path) -> None:
    """Remove a file, because every checkpoint is a new file."""
    path.unlink(missing_ok=True)


def _forget(path: Path) -> None:
    """Drop a file from the page cache."""
    with open(path, "rb") as file:
        # Only pages that are on disk are dropped. This file was flushed after it was written.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _touch(path: Path) -> None:
    """Read a file into the page cache."""
    with open(path, "rb") as file:
        while file.read(2**24):
            pass


BENCHMARK = Benchmark(
    "checkpoint",
    "saving and restoring in the current folder, compared with plain h5py and safetensors",
    measure,
    (
        Table(
            (
                Column.text("what", "what"),
                Column.text("model", "model"),
                Column.time("mpistrat", "ours_s"),
                Column.text("by hand", "peer"),
                Column.time("its time", "hand_s"),
                Column.speed_up("speed-up", "ours_over_hand"),
                Column.speed_up("over in place", "ours_over_in_place"),
                Column.speed_up("over safetensors", "ours_over_safetensors"),
            )
        ),
    ),
    (
        Bars(
            lambda row: f"{row['what']}\n{row['model']}",
            {"ours_s": "mpistrat", "hand_s": "by hand", "safetensors_s": "safetensors"},
            "seconds",
        ),
    ),
    runs_on_devices=True,
)
