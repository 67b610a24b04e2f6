"""HDF5 files of images to read, as `mpistrat bench data` makes them."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from mpistrat.hdf5 import h5py

__all__ = ["BATCH_SIZE", "FILES", "write_files"]

BATCH_SIZE = 256
FILES = ("gzip", "contiguous")
_SIDE, _CHUNK = 32, 64
_NUM_DISTINCT = 320 * _CHUNK
"""Further images are the first ones again, because inventing them takes longer than reading."""


def write_files(folder: Path, num_examples: int) -> None:
    """Write the same images chunked and compressed, and in one piece. Local.

    Waves of random length and direction in 32 steps of brightness: about as compressible as
    drawings, so that inflating them takes most of the time of a scan.
    """
    rng = np.random.default_rng(0)
    images = _waves(rng, min(num_examples, _NUM_DISTINCT))
    label = rng.integers(0, 10, num_examples)
    shape = (num_examples, *images.shape[1:])
    for name in FILES:
        with h5py().File(folder / f"{name}.h5", "w") as file:
            options = {"chunks": (_CHUNK, *shape[1:]), "compression": "gzip"}
            dataset = file.create_dataset(
                "image", shape, np.uint8, **(options if name == "gzip" else {})
            )
            dataset[: len(images)] = images
            for first in range(len(images), num_examples, _CHUNK):
                count = min(_CHUNK, num_examples - first)
                if name == "gzip":
                    source = (first % _NUM_DISTINCT, 0, 0, 0)
                    mask, content = dataset.id.read_direct_chunk(source)
                    dataset.id.write_direct_chunk((first, 0, 0, 0), content, mask)
                else:
                    dataset[first : first + count] = images[first % _NUM_DISTINCT :][:count]
            file.create_dataset("label", data=label)


def _waves(rng: np.random.Generator, count: int) -> np.ndarray:
    y, x = np.mgrid[:_SIDE, :_SIDE]
    images = np.empty((count, _SIDE, _SIDE, 3), np.uint8)
    for first in range(0, count, 1000):
        part = images[first : first + 1000]
        a, b = rng.random((2, len(part), 1, 1)) / 2
        color = rng.random((len(part), 1, 1, 3))
        waves = 128 + 60 * np.sin(a * x + b * y)[..., None] * color
        part[...] = waves.astype(np.uint8) // 8 * 8
    return images
