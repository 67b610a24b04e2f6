"""Benchmark of HDF5 output against h5py on one rank and plain writes: same values, in one run."""

from __future__ import annotations

import contextlib
import importlib
import os
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from mpistrat import context, hdf5
from mpistrat.bench.benchmark import RESULTS, Bars, Benchmark, Choices, Column, Findings, Row, Table
from mpistrat.bench.checkpointing import new_folder
from mpistrat.bench.measure import Timings
from mpistrat.collectives.collectives import Collectives
from mpistrat.data.hdf5_writer.root_file import write_all
from mpistrat.data.hdf5_writer.writer import HDF5Writer
from mpistrat.mpi.world import open_world
from mpistrat.strategies import MPIStrategy

_ROWS, _WIDTH, _CHUNK_ROWS = 196_608, 256, 1024
"""A dataset of 201 MB of float32, with chunks of 1 MiB."""
_STEP, _NUM_STEPS, _NUM_DURABLE, _NUM_NUMBERS = 12_500, 1000, 100, 3000
"""Elements of a float64 step of 100 kB, which all ranks share; numbers of steps."""

_Candidates = dict[str, Callable[[], object]]


def measure(choices: Choices) -> Findings:
    """Time whole files and steps, and measure sizes, memory and readers. **Collective**."""
    strategy = MPIStrategy(device=choices.device)
    ranks = context.collectives_of(strategy)
    with new_folder(ranks) as folder:
        output = _Output(strategy, ranks, folder)
        rows = [output.whole(*each, choices.num_samples) for each in _kinds()]
        for is_durable, has_numbers in ((False, True), (False, False), (True, False)):
            rows.append(output.steps(is_durable, has_numbers, choices.num_samples))
        facts = output.facts()
    note = (
        "Whole files: 201 MB of float32, flushed to disk. Steps: 100 kB of float64, of which each "
        "rank has a part. The peer of steps is a gather and SWMR with a flush on rank 0; of "
        "durable steps, a gather and a pwrite with two fdatasync."
    )
    return Findings({RESULTS: rows, "facts": facts}, (note,))


def _kinds() -> list[tuple[str, dict[str, Any]]]:
    kinds: list[tuple[str, dict[str, Any]]] = [
        ("gzip 4 and shuffle", {"compression": "gzip", "compression_opts": 4, "shuffle": True}),
        ("uncompressed", {}),
        ("contiguous", {"chunks": None}),
    ]
    with contextlib.suppress(ImportError):
        kinds.insert(1, ("LZ4", dict(importlib.import_module("hdf5plugin").LZ4())))
    return kinds


class _Output:
    """The files of one run, by this package and by its peers."""

    def __init__(self, strategy: Any, ranks: Collectives, folder: Path) -> None:
        self._strategy, self._ranks, self._folder = strategy, ranks, folder
        self._comm = open_world(None).comm
        self._own = np.empty(0)

    def _remove(self) -> None:
        if self._ranks.rank == 0:
            for path in self._folder.iterdir():
                path.unlink()

    def whole(self, what: str, options: Mapping[str, Any], num_samples: int) -> Row:
        """Time the writing of a whole file. **Collective**."""
        ranks, options = self._ranks, {"chunks": (_CHUNK_ROWS, _WIDTH), **options}
        bounds = [_ROWS * rank // ranks.size for rank in range(ranks.size + 1)]
        walk = np.random.default_rng(0).standard_normal((_ROWS, _WIDTH), np.float32)
        whole = np.cumsum(walk, axis=0, out=walk).round(2, out=walk)
        start, stop = bounds[ranks.rank : ranks.rank + 2]
        own = whole[start:stop]
        ours, hand = self._folder / "ours.h5", self._folder / "hand.h5"

        def write() -> None:
            with HDF5Writer(ours, strategy=self._strategy) as out:
                out.create_dataset("x", whole.shape, "f4", **options)
                out.write({"x": own})

        def by_h5py() -> None:
            if ranks.rank == 0:
                with hdf5.h5py().File(hand, "w") as file:
                    file.create_dataset("x", data=whole, **options)
                _flush(hand)

        def by_pwrite() -> None:
            handle = os.open(self._folder / "raw", os.O_RDWR | os.O_CREAT)
            write_all(handle, start * _WIDTH * 4, own)
            os.fsync(handle)
            os.close(handle)

        calls: _Candidates = {"ours": write, "hand": by_h5py, "raw": by_pwrite}
        timings = self._timed(calls, num_samples)
        write()
        by_h5py()
        ranks.gather_json(None)
        sizes = [path.stat().st_size for path in (ours, hand)] if ranks.rank == 0 else [1, 1]
        self._remove()
        return {
            "what": what,
            "peer": "h5py on one rank",
            **timings.medians(),
            **timings.ratio("ours_over_hand", "ours", "hand"),
            **timings.ratio("ours_over_raw", "ours", "raw"),
            "stored_ratio": sizes[0] / sizes[1],
        }

    def steps(self, durable: bool, has_numbers: bool, num_samples: int) -> Row:
        """Time appending steps to a file that grows. **Collective**.

        With `has_numbers`, each step has two numbers as well.
        """
        number, comm, ranks = _NUM_DURABLE if durable else _NUM_STEPS, self._comm, self._ranks
        lengths = [len(each) for each in np.array_split(np.empty(_STEP), ranks.size)]
        own = np.random.default_rng(ranks.rank).random(lengths[ranks.rank])
        joined = np.empty(_STEP)
        ours, hand = self._folder / "ours.h5", self._folder / "hand.h5"

        def append() -> None:
            with HDF5Writer(ours, "a", durable=durable, strategy=self._strategy) as out:
                out.create_dataset("x", (None, _STEP), "f8", split_axis=1)
                for step in range(number):
                    numbers = {"time": step / 2, "norm": float(step)} if has_numbers else {}
                    out.append({"x": own, **numbers})

        def gather() -> bool:
            comm.Gatherv(own, (joined, lengths) if ranks.rank == 0 else None)
            return ranks.rank == 0

        def by_h5py() -> None:
            file = hdf5.h5py().File(hand, "w", libver="latest") if ranks.rank == 0 else None
            if file is not None:
                shape = {"shape": (0, _STEP), "maxshape": (None, _STEP), "chunks": (1, _STEP)}
                datasets = [file.create_dataset("x", dtype="f8", **shape)]
                for name in ("time", "norm") if has_numbers else ():
                    one = {"shape": (0,), "maxshape": (None,), "chunks": (1024,)}
                    datasets.append(file.create_dataset(name, dtype="f8", **one))
                file.swmr_mode = True
            for step in range(number):
                if gather():
                    for dataset, value in zip(datasets, (joined, step / 2, step), strict=False):
                        dataset.resize(step + 1, axis=0)
                        dataset[step] = value
                    for dataset in datasets:
                        dataset.flush()
            if file is not None:
                file.close()
                _flush(hand)

        def by_pwrite() -> None:
            handle = os.open(self._folder / f"raw{ranks.rank}", os.O_RDWR | os.O_CREAT)
            for step in range(number):
                if gather():
                    write_all(handle, 4096 + step * joined.nbytes, joined)
                    os.fdatasync(handle)
                    write_all(handle, 0, step.to_bytes(8, "little"))
                    os.fdatasync(handle)
            os.close(handle)

        calls: _Candidates = {"ours": append, "hand": by_pwrite if durable else by_h5py}
        timings = self._timed(calls, num_samples)
        return {
            "what": f"{number} steps of 100 kB"
            + (" and 2 numbers" if has_numbers else "")
            + (", durable" if durable else ""),
            "peer": "pwrite, 2 fdatasync" if durable else "gather, SWMR",
            **timings.medians(),
            **timings.ratio("ours_over_hand", "ours", "hand"),
        }

    def _timed(self, calls: _Candidates, num_samples: int) -> Timings:
        """Time candidates that write new files, in turns. **Collective**."""
        samples: dict[str, list[float]] = {name: [] for name in calls}
        names, order = list(calls), random.Random(0)  # equal on all ranks
        for number in range(num_samples + 1):
            order.shuffle(names)
            for name in names:
                self._remove()
                self._ranks.gather_json(None)
                began_s = perf_counter()
                calls[name]()
                time_s = max(self._ranks.gather_json(perf_counter() - began_s))
                if number:  # the first round is a warm-up
                    samples[name].append(time_s)
        self._remove()
        self._ranks.gather_json(None)
        return Timings(samples)

    def facts(self) -> list[Row]:
        """Measure sizes of growing files, memory, and readers of a file that grows."""
        ranks, path = self._ranks, self._folder / "facts.h5"
        own = np.array_split(1 + np.random.default_rng(0).random(_STEP), ranks.size)[ranks.rank]
        reader = None
        with HDF5Writer(path, "a", strategy=self._strategy) as out:
            out.create_dataset("x", (None, _STEP), "f8", split_axis=1)
            out.append({"x": own})
            # A separate process: a rank that writes would never read during a commit.
            if ranks.rank == 0:
                command = [sys.executable, "-c", _READER, str(path), str(self._folder / "stop")]
                reader = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
                assert reader.stdout is not None
                reader.stdout.readline()  # it has begun
            ranks.gather_json(None)
            for _ in range(_NUM_STEPS - 1):
                out.append({"x": own})
            if reader is not None:
                (self._folder / "stop").touch()
        opens, failed = map(int, reader.communicate()[0].split()) if reader is not None else (0, 0)
        size = path.stat().st_size
        numbers = self._folder / "numbers.h5"
        with HDF5Writer(numbers, "a", strategy=self._strategy) as out:
            for step in range(_NUM_NUMBERS):
                out.append({"x": step / 2})
        large = np.zeros((2**25 // ranks.size, 2), np.float32)  # 256 MiB in all
        large[...] = 1
        before = _peak_bytes(is_new=True)
        with HDF5Writer(self._folder / "large.h5", strategy=self._strategy) as out:
            out.append({"x": large})
        used = max(ranks.gather_json(_peak_bytes() - before))
        return [
            {"fact": "file of 100 kB steps / its data", "value": size / (_NUM_STEPS * _STEP * 8)},
            {
                "fact": f"file of {_NUM_NUMBERS} numbers, MiB",
                "value": numbers.stat().st_size / 2**20,
            },
            {"fact": "memory in addition to the part, MiB", "value": used / 2**20},
            {"fact": "opens while the file grows", "value": float(opens)},
            {"fact": "opens that failed", "value": float(failed)},
        ]


_READER = """
import h5py, os, sys
path, stop = sys.argv[1:]
print(flush=True)
opens = failed = seen = 0
while not os.path.exists(stop):
    opens += 1
    try:
        with h5py.File(path, "r") as file:
            seen, before = len(file["x"]), seen
            failed += seen < before or not file["x"][-1].all()
    except OSError:
        failed += 1
print(opens, failed)
"""
"""Opens the file again and again; every element of every step is above 0."""


def _peak_bytes(is_new: bool = False) -> int:
    """Return the peak of this process's memory on Linux, since the last call with `is_new`."""
    if is_new:
        Path("/proc/self/clear_refs").write_text("5")
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))


def _flush(path: Path) -> None:
    with open(path, "rb") as file:
        os.fsync(file.fileno())


BENCHMARK = Benchmark(
    "output",
    "HDF5Writer in the current folder, compared with h5py on one rank and with plain writes",
    measure,
    (
        Table(
            (
                Column.text("what", "what"),
                Column.time("mpistrat", "ours_s"),
                Column.text("peer", "peer"),
                Column.time("its time", "hand_s"),
                Column.speed_up("speed-up", "ours_over_hand"),
                Column.speed_up("over pwrite by all ranks", "ours_over_raw"),
                Column.ratio("stored / h5py's", "stored_ratio"),
            )
        ),
        Table(
            (Column.text("fact", "fact"), Column.ratio("value", "value")),
            "facts",
            "Files and memory",
        ),
    ),
    (
        Bars(
            lambda row: str(row["what"]),
            {"ours_s": "mpistrat", "hand_s": "peer", "raw_s": "pwrite by all ranks"},
            "seconds",
        ),
    ),
)
