"""Batches take the memory of those that the program has dropped, and of no others."""

import gc
import os

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import DataError

ROWS = np.arange(4_000 * 64, dtype=np.int32).reshape(4_000, 64)
BATCH = 300
"""Batches of 77 KB come from memory that returns."""


@pytest.fixture(params=[{}, {"chunks": (100, 64)}, {"compression": "gzip"}], ids=str)
def path(request, tmp_path):
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file.create_dataset("x", data=ROWS, **request.param)
    return tmp_path / "rows.h5"


def batches(path, length=BATCH, **shuffle):
    data = ms.data.Dataset.from_hdf5(path, "x")
    return (data.shuffle(**shuffle) if shuffle else data).batch(length)


@pytest.mark.parametrize("is_shuffled", [False, True], ids=["in order", "shuffled"])
def test_batches_and_views_that_are_kept_do_not_change(path, is_shuffled):
    data = batches(path, **({"seed": 3, "reshuffle_each_iteration": False} if is_shuffled else {}))
    expected = [batch.copy() for batch in data]
    kept = []
    for number, batch in enumerate(data):
        # Of some batches only a view lives on, and some are dropped: their memory is taken again.
        if number % 3 < 2:
            part = slice(None) if number % 3 else slice(7, None, 9)
            kept.append((batch[part], expected[number][part]))
        del batch
        gc.collect(1)  # what a batch may be in a cycle with is young
    for found, wanted in kept:
        np.testing.assert_array_equal(found, wanted)


def test_tensors_keep_the_memory_of_their_batch(path):
    torch = pytest.importorskip("torch")
    tensors = [torch.from_numpy(batch) for batch in batches(path)]
    assert torch.equal(torch.cat(tensors), torch.from_numpy(ROWS))


def test_a_loop_takes_the_memory_of_batches_that_it_has_dropped(path):
    addresses = [batch.ctypes.data for batch in batches(path, 2_000).repeat(4)]
    assert len(set(addresses)) < len(addresses) / 2


def test_text_is_in_memory_of_its_own(tmp_path):
    with h5py.File(tmp_path / "text.h5", "w") as file:
        file["x"] = [f"example {n}" for n in range(20_000)]
    for _ in range(2):
        first, second = ms.data.Dataset.from_hdf5(tmp_path / "text.h5", "x").batch(10_000)
        assert (first[0], second[-1]) == ("example 0", "example 19999")
        del first, second
        gc.collect(1)  # what a batch may be in a cycle with is young


def test_a_file_that_becomes_shorter_within_a_pass_is_an_error(tmp_path):
    with h5py.File(tmp_path / "rows.h5", "w") as file:
        file["x"] = ROWS
    batches_ = iter(batches(tmp_path / "rows.h5"))
    np.testing.assert_array_equal(next(batches_), ROWS[:BATCH])
    os.truncate(tmp_path / "rows.h5", ROWS.nbytes // 2)
    with pytest.raises(DataError, match=r"rows\.h5"):
        for _ in batches_:
            pass
