"""Datasets whose elements are arrays (H5T_ARRAY): h5py reads them as further axes."""

import h5py
import numpy as np
import pytest

import mpistrat as ms

Dataset = ms.data.Dataset
NUM_ROWS = 37
TYPES = {
    "big-endian": np.dtype((">i2", (2, 3))),
    "little-endian": np.dtype(("<f4", (2,))),
    "one element": np.dtype((">f8", (1,))),
    "texts": np.dtype(("S3", (2,))),
}
STORAGE = {
    "contiguous": {},
    "chunks": {"chunks": (5,)},
    "gzip": {"chunks": (5,), "compression": "gzip", "shuffle": True},
}


def filled(file, name, dtype, shape, **options):
    """Write elements of an array type, and return them as h5py reads them."""
    dataset = file.create_dataset(name, shape, dtype, **options)
    numbers = np.arange(np.prod((*shape, *dtype.shape))).reshape(*shape, *dtype.shape)
    dataset[...] = numbers % 1000 if dtype.base.kind != "S" else (numbers % 1000).astype("S3")
    return dataset[()]


@pytest.mark.parametrize("storage", STORAGE)
@pytest.mark.parametrize("kind", TYPES)
def test_array_types_read_as_h5py_reads_them(tmp_path, kind, storage):
    path, dtype = tmp_path / "data.h5", TYPES[kind]
    with h5py.File(path, "w") as file:
        expected = filled(file, "x", dtype, (NUM_ROWS,), **STORAGE[storage])
    dataset = Dataset.from_hdf5(path, "x")
    assert dataset.element_spec == ms.data.ArraySpec(dtype.shape, dtype.base.newbyteorder("="))
    np.testing.assert_array_equal(np.stack(list(dataset)), expected)
    for number, row in dataset.enumerate().shuffle(seed=0):
        np.testing.assert_array_equal(row, expected[number])
    batch = next(iter(dataset.select([3, 3, 30]).batch(3)))
    np.testing.assert_array_equal(batch, expected[[3, 3, 30]])
    assert batch.dtype.isnative


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("options", [{}, {"chunks": (3, 2), "compression": "gzip"}], ids=str)
def test_array_types_along_an_axis(tmp_path, axis, options):
    path = tmp_path / "data.h5"
    with h5py.File(path, "w") as file:
        shape = (NUM_ROWS, 4) if axis == 0 else (4, NUM_ROWS)
        expected = filled(file, "x", TYPES["big-endian"], shape, **options)
    dataset = Dataset.from_hdf5(path, ms.data.Field("x", axis=axis))
    np.testing.assert_array_equal(np.stack(list(dataset)), np.moveaxis(expected, axis, 0))
