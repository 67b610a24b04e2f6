"""Other ways to read the images: h5py by itself, and PyTorch's DataLoader."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.bench.data_files import BATCH_SIZE
from mpistrat.hdf5 import h5py
from mpistrat.tensors import import_torch

__all__ = ["NUM_FANCY", "NUM_LOADED", "fancy_reads", "loader_reads", "scan"]

NUM_FANCY = 2 * BATCH_SIZE
"""Examples that `fancy_reads` reads: all of them would take a quarter of a minute."""

NUM_LOADED = 8 * BATCH_SIZE
_NUM_WORKERS = 2


def scan(path: Path) -> None:
    """Read all batches in the order of the file, by plain slices of h5py. Local.

    Each batch is kept until the next has come, as in any program that uses it.
    """
    with h5py().File(path, "r") as file:
        image, label = file["image"], file["label"]
        for first in range(0, len(image), BATCH_SIZE):
            _batch = image[first : first + BATCH_SIZE], label[first : first + BATCH_SIZE]


def fancy_reads(path: Path) -> None:
    """Read random batches by index arrays, sorted as h5py wants them. Local."""
    with h5py().File(path, "r") as file:
        image, label = file["image"], file["label"]
        order = np.random.default_rng(0).permutation(len(image))[:NUM_FANCY]
        for first in range(0, NUM_FANCY, BATCH_SIZE):
            rows = np.sort(order[first : first + BATCH_SIZE])
            image[rows]
            label[rows]


class _Examples:
    """The map-style data set of a PyTorch program: a file for each worker, an example a read."""

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
    """Return a pass of a shuffled DataLoader with two workers, ``None`` without PyTorch. Local."""
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
