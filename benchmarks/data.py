"""Benchmark of reading beside all peers that are installed, and of other layouts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks.data_layouts import LAYOUTS, measure_layouts, write_layouts
from benchmarks.data_maps import MAPS, measure_maps, write_packed
from benchmarks.data_peers import NUM_LOADED, loader_reads, read_mapped, record_reads, write_mapped
from benchmarks.data_stores import store_reads
from benchmarks.data_windows import WINDOWS, WINDOWS_TABLE, measure_windows
from mpistrat.bench.benchmark import RESULTS, Choices, Findings, Row
from mpistrat.bench.data import BENCHMARK as PLAIN
from mpistrat.bench.data import Peer, measure_beside
from mpistrat.strategies import Strategy

_MAPPED = "NumPy, mapped .npy, sorted indices, contiguous"
_LOADER = "torch DataLoader, shuffled, 2 workers, gzip"


def measure(choices: Choices) -> Findings:
    """Time passes of all ranks together over images and rows. **Collective** over COMM_WORLD."""
    found = measure_beside(choices, _peers, _tables)
    names = [str(row["what"]) for row in found.tables[RESULTS]]
    packages = {
        "PyTorch": "torch",
        "lmdb": "LMDB",
        "array_record": "Array",
        "pyfive": "pyfive",
        "grain": "Grain",
        "virtualizarr, icechunk, zarrs or obstore": "zarrs",
    }
    missing = [
        f"{package} is not installed, so it is left out."
        for package, part in packages.items()
        if not any(part in name for name in names)
    ]
    return replace(found, notes=(*found.notes, *missing))


def _peers(folder: Path, num_examples: int) -> dict[str, Peer]:
    write_mapped(folder)
    write_layouts(folder, num_examples)
    write_packed(folder, num_examples)
    peers = {_MAPPED: Peer(partial(read_mapped, folder), num_examples)}
    loader = loader_reads(folder / "gzip.h5")
    if loader is not None:
        peers[_LOADER] = Peer(loader, NUM_LOADED)
    reads = record_reads(folder) | store_reads(folder)
    return peers | {name: Peer(read, num_examples) for name, read in reads.items()}


def _tables(strategy: Strategy, folder: Path, choices: Choices) -> Mapping[str, Sequence[Row]]:
    given = strategy, folder, choices.num_examples, choices.num_samples
    return {
        WINDOWS: measure_windows(*given),
        LAYOUTS.key: measure_layouts(*given),
        MAPS.key: measure_maps(*given),
    }


BENCHMARK = replace(
    PLAIN,
    summary="epochs of HDF5 files of images, compared with h5py, PyTorch, LMDB, Grain and others",
    measure=measure,
    tables=(*PLAIN.tables, LAYOUTS, WINDOWS_TABLE, MAPS),
)
