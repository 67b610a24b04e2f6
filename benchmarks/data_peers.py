"""Ways of others to read the same images: NumPy, PyTorch, LMDB and ArrayRecord."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.bench.data import BATCH_SIZE
from mpistrat.hdf5 import h5py
from mpistrat.pytorch import import_torch

NUM_LOADED = 8 * BATCH_SIZE
_NUM_WORKERS = NUM_THREADS = 2
IMAGE_SHAPE = (32, 32, 3)
_NUM_AT_ONCE = 20_000


def write_mapped(folder: Path) -> None:
    """Write the images and labels of the folder as .npy files."""
    with h5py().File(folder / "contiguous.h5") as file:
        image = file["image"]
        mapped = np.lib.format.open_memmap(folder / "image.npy", "w+", image.dtype, image.shape)
        for first in range(0, len(image), _NUM_AT_ONCE):
            mapped[first : first + _NUM_AT_ONCE] = image[first : first + _NUM_AT_ONCE]
        np.save(folder / "label.npy", file["label"][()])


def read_mapped(folder: Path) -> None:
    """Read random batches of mapped arrays by index arrays."""
    image = np.load(folder / "image.npy", mmap_mode="r")
    label = np.load(folder / "label.npy")
    order = np.random.default_rng(0).permutation(len(image))
    for first in range(0, len(image), BATCH_SIZE):
        rows = np.sort(order[first : first + BATCH_SIZE])
        _batch = image[rows], label[rows]


class _Examples:
    """A map-style data set, as in PyTorch programs: one open file per worker."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._files: dict[int, Any] = {}

    def __len__(self) -> int:
        return NUM_LOADED

    def __getitem__(self, number: int) -> tuple[Any, Any]:
        file = self._files.get(os.getpid())
        if file is None:
            file = self._files[os.getpid()] = h5py().File(self._path, "r")
        image, label = file["image"], file["label"]
        row = number * len(image) // NUM_LOADED
        return image[row], label[row]


def loader_reads(path: Path) -> Callable[[], None] | None:
    """Return a function that reads a shuffled DataLoader, ``None`` without PyTorch."""
    torch = import_torch()
    if torch is None:
        return None
    loader = torch.utils.data.DataLoader(
        _Examples(path),
        batch_size=BATCH_SIZE,
        shuffle=True,
        num_workers=_NUM_WORKERS,
        persistent_workers=True,
    )

    def read() -> None:
        for _ in loader:
            pass

    return read


def record_reads(folder: Path) -> dict[str, Callable[[], None]]:
    """Write the images as LMDB and as ArrayRecord, where these are installed.

    Returns functions that read random batches of them.
    """
    lmdb, records = _module("lmdb"), _module("array_record.python.array_record_module")
    reads: dict[str, Callable[[], None]] = {}
    if lmdb is not None:
        reads["LMDB, shuffled, contiguous"] = partial(_read_lmdb, _write_lmdb(lmdb, folder))
    if records is not None:
        reads["ArrayRecord with zstd, shuffled, gzip"] = _array_record(records, folder)
    return reads


def _module(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError:
        return None


def _write_lmdb(lmdb: Any, folder: Path) -> Any:
    """Return a database of the images by their numbers, open for reading."""
    image = np.load(folder / "image.npy", mmap_mode="r")
    path = str(folder / "image.lmdb")
    with (
        lmdb.open(path, map_size=2 * image.nbytes + 2**24, subdir=False, lock=False) as database,
        database.begin(write=True) as transaction,
    ):
        for number, row in enumerate(image):
            transaction.put(number.to_bytes(4, "big"), row.tobytes(), append=True)
    # As its documentation advises for random reads.
    return lmdb.open(path, subdir=False, readonly=True, lock=False, readahead=False)


def _read_lmdb(database: Any) -> None:
    with database.begin(buffers=True) as transaction:

        def read(rows: np.ndarray) -> list[Any]:
            return [transaction.get(row.to_bytes(4, "big")) for row in rows.tolist()]

        _read_records(read, database.stat()["entries"])


def write_records(folder: Path) -> str:
    """Write the images as ArrayRecord, and return the path of the file."""
    records = importlib.import_module("array_record.python.array_record_module")
    path = folder / "image.array_record"
    if not path.exists():
        writer = records.ArrayRecordWriter(str(path), "group_size:1")
        for row in np.load(folder / "image.npy", mmap_mode="r"):
            writer.write(row.tobytes())
        writer.close()
    return str(path)


def _array_record(records: Any, folder: Path) -> Callable[[], None]:
    """Write the images as ArrayRecord, and return what reads them."""
    options = "readahead_buffer_size:0,index_storage_option:in_memory"
    reader = records.ArrayRecordReader(write_records(folder), options)
    return partial(_read_records, lambda rows: reader.read(rows.tolist()), reader.num_records())


def _read_records(read: Callable[[np.ndarray], Sequence[Any]], num_examples: int) -> None:
    """Read random batches, each record into its row of an array."""
    order = np.random.default_rng(0).permutation(num_examples)
    for first in range(0, num_examples, BATCH_SIZE):
        found = read(order[first : first + BATCH_SIZE])
        batch = np.empty((len(found), len(found[0])), np.uint8)
        for row, record in zip(batch, found, strict=True):
            row[:] = np.frombuffer(record, np.uint8)
