"""HDF5 files of images to read, as `mpistrat bench data` makes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpistrat.hdf5 import h5py

__all__ = ["BATCH_SIZE", "FILES", "write_files"]

BATCH_SIZE = 256
FILES = ("gzip", "contiguous")
_SIDE, _CHUNK = 32, 64


def write_files(folder: Path, num_examples: int) -> None:
    """Write the same images chunked and compressed, and in one piece. Local.

    Waves of random length and direction in 32 steps of brightness: about as compressible as
    drawings, so that inflating them takes most of the time of a scan.
    """
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:_SIDE, :_SIDE]
    image = np.empty((num_examples, _SIDE, _SIDE, 3), np.uint8)
    for first in range(0, num_examples, 1000):
        count = min(1000, num_examples - first)
        a, b = rng.random((2, count, 1, 1)) / 2
        color = rng.random((count, 1, 1, 3))
        waves = 128 + 60 * np.sin(a * x + b * y)[..., None] * color
        image[first : first + count] = waves.astype(np.uint8) // 8 * 8
    label = rng.integers(0, 10, num_examples)
    for name in FILES:
        with h5py().File(folder / f"{name}.h5", "w") as file:
            options = {"chunks": (_CHUNK, *image.shape[1:]), "compression": "gzip"}
            file.create_dataset("image", data=image, **(options if name == "gzip" else {}))
            file.create_dataset("label", data=label)
