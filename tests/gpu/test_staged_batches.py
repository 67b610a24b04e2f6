"""Batches of files on the way to a device: read into page-locked memory, copied from there."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.cuda_api import pinned_empty
from mpistrat.data.distribute import _read_for
from mpistrat.data.distributed_dataset import _is_for_transfer, memory_for
from tests.helpers import result_of

ROWS, WIDTH = 640, 96


@pytest.fixture
def path(gpus, tmp_path):
    import h5py

    found = gpus.broadcast_object(str(tmp_path / "rows.h5"))
    if gpus.rank == 0:
        with h5py.File(found, "w") as file:
            numbers = np.arange(ROWS * WIDTH, dtype=np.int32).reshape(ROWS, WIDTH)
            file.create_dataset("x", data=numbers, chunks=(16, WIDTH))
            file.create_dataset("y", data=np.arange(ROWS, dtype=">f8"))
            file.create_dataset("name", data=[f"row {i}" for i in range(ROWS)])
    gpus.barrier()
    return found


def batches_of(gpus, path, change=lambda data: data, prefetch=0):
    data = change(ms.data.Dataset.from_hdf5(path, {"x": "x", "y": "y"}).shuffle(seed=1))
    data = data.batch(8 * gpus.size)
    return data.prefetch(prefetch) if prefetch else data


@pytest.mark.parametrize("prefetch", [0, 1, 4])
def test_batches_that_are_kept_stay_as_they_are(gpus, path, prefetch):
    """The memory of the host recurs, but only after its copy: the stand-in overwrites it."""
    distributed = gpus.experimental_distribute_dataset(batches_of(gpus, path, prefetch=prefetch))
    for _ in range(2):
        kept = [(batch["x"].values[0], batch["y"].values[0]) for batch in distributed]
        assert len(kept) == -(-ROWS // (8 * gpus.size))
        rows = []
        for x, y in kept:
            x, y = x.get(), y.get()
            np.testing.assert_array_equal(x, y[:, None].astype(np.int32) * WIDTH + np.arange(WIDTH))
            rows += y.astype(int).tolist()
        of_ranks = result_of(
            gpus, lambda rows=rows: ms.get_replica_context().all_gather_object(rows)
        )
        assert sorted(row for own in of_ranks for row in own) == list(range(ROWS))


def test_rows_are_read_where_they_are_copied_from(gpus, path):
    device = gpus.extended.device
    pipeline = _read_for(device, batches_of(gpus, path)._pipeline)
    batch = next(pipeline.elements(0, 0))
    assert _is_for_transfer(batch["x"])
    assert not _is_for_transfer(next(batches_of(gpus, path)._pipeline.elements(0, 0))["x"])


@pytest.mark.parametrize("name", ["map", "cache"])
def test_what_the_program_may_write_to_is_copied_first(gpus, path, name):
    def change(data):
        return data.cache() if name == "cache" else data.map(lambda each: each)

    pipeline = batches_of(gpus, path, change)._pipeline
    assert _read_for(gpus.extended.device, pipeline) is pipeline


def test_an_array_that_a_map_returns_again_is_a_new_batch_each_time(gpus, path):
    kept = {}

    def same(each):
        found = kept.setdefault(each["x"].shape, each["x"])
        found[...] = each["x"]
        return found

    data = ms.data.Dataset.from_hdf5(path, {"x": "x"}).batch(8 * gpus.size).map(same)
    found = [each.values[0] for each in gpus.experimental_distribute_dataset(data)]
    whole = ROWS // (8 * gpus.size)
    firsts = [int(each[0, 0]) for each in found[:whole]]
    step = 8 * gpus.size * WIDTH
    assert firsts == [step * i + 8 * gpus.rank * WIDTH for i in range(whole)]


def test_text_and_numbers_of_foreign_byte_order(gpus, path):
    data = ms.data.Dataset.from_hdf5(path, {"y": "y", "name": "name"}).batch(8 * gpus.size)
    for batch in gpus.experimental_distribute_dataset(data):
        numbers, names = batch["y"].values[0].get(), batch["name"].values[0]
        assert [str(each) for each in names] == [f"row {int(number)}" for number in numbers]


def test_views_of_memory_for_transfers_are_known_and_arrays_of_programs_are_not(gpus):
    array = memory_for(gpus.extended.device)((12,), np.dtype("f4"))
    for each in (array, array.reshape(3, 4), array.reshape(3, 4).T, array[2:], array.view("i4")):
        assert _is_for_transfer(each)
    assert not _is_for_transfer(array.copy())
    assert not _is_for_transfer(np.frombuffer(b"1234", np.uint8))
    with gpus.extended.device.current():
        of_program = pinned_empty(12, np.dtype("f4"))
    assert not _is_for_transfer(of_program)
