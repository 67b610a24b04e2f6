"""Small data stay in memory: read once, however many passes and iterators there are."""

import h5py
import numpy as np
import pytest

from mpistrat.data import Dataset
from mpistrat.data.hdf5 import chunk_cache, row_reader
from mpistrat.data.hdf5.catalog import read_catalog
from mpistrat.data.hdf5.row_reader import Hdf5Reader

NUM_ROWS = 500, 231


@pytest.fixture
def pattern(tmp_path):
    """Two files with rows of 48 bytes in chunks, 4 in one piece and 1 of many tiny chunks."""
    first = 0
    for number, length in enumerate(NUM_ROWS):
        label = np.arange(first, first + length)
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            image = np.repeat(label[:, None], 6, axis=1)
            file.create_dataset("image", data=image, chunks=(16, 4), compression="gzip")
            file["label"] = label.astype(">i4")
            file.create_dataset("flag", data=label % 3 == 0, chunks=(2,))
        first += length
    return str(tmp_path / "*.h5")


@pytest.fixture
def loaded(monkeypatch):
    """Return a list of the field and number of each chunk that is read, ever longer."""
    numbers = []
    decode = Hdf5Reader._decode

    def noting(self, field, chunks):
        numbers.extend((self._catalog.columns[field].path, chunk) for chunk, _ in chunks)
        return decode(self, field, chunks)

    monkeypatch.setattr(Hdf5Reader, "_decode", noting)
    return numbers


def is_sound(batch):
    label = batch["label"]
    is_same = (batch["image"] == label[:, None]).all() and (batch["flag"] == (label % 3 == 0)).all()
    return is_same and label.dtype == np.dtype("i4")


@pytest.mark.parametrize("shuffled", [False, True])
def test_each_chunk_is_read_once_and_never_handed_out_itself(pattern, loaded, shuffled):
    dataset = Dataset.from_hdf5(pattern)
    batches = (dataset.shuffle(0) if shuffled else dataset).batch(32).prefetch(1)
    orders = []
    for _ in range(3):
        iterators = zip(batches, batches, strict=True)  # at the same time, in two threads
        orders.append([])
        for ours, theirs in iterators:
            assert is_sound(ours)
            assert is_sound(theirs)
            orders[-1] += ours["label"].tolist()
            for array in ours.values():
                array[...] = 0
        assert sorted(orders[-1]) == list(range(sum(NUM_ROWS)))
        if len(orders) == 1:
            assert len(set(loaded)) == sum(2 * -(-n // 16) + -(-n // 2) for n in NUM_ROWS)
            loaded.clear()
    assert not loaded
    assert len({tuple(order) for order in orders}) == (3 if shuffled else 1)


def test_a_rank_reads_only_what_it_needs(pattern, loaded, all_ranks):
    dataset = Dataset.from_hdf5(pattern, ("image", "flag"))
    list(all_ranks(dataset.take(64).batch(64), 2)[1])
    assert sorted(loaded) == [("flag", n) for n in range(16, 32)] + [("image", 2), ("image", 3)]


@pytest.mark.parametrize(
    ("limit", "cached"),
    [
        (sum(NUM_ROWS) - 1, set()),
        (sum(NUM_ROWS), {"flag"}),
        (sum(NUM_ROWS) * 5, {"flag", "label"}),
        (sum(NUM_ROWS) * 53 - 1, {"flag", "label"}),
        (sum(NUM_ROWS) * 53, {"flag", "label", "image"}),
    ],
)
@pytest.mark.parametrize("shuffled", [False, True])
def test_the_smallest_fields_are_cached_as_far_as_the_limit_goes(
    pattern, loaded, monkeypatch, limit, cached, shuffled
):
    monkeypatch.setattr(chunk_cache, "_ROW_CACHE_BYTES", limit)
    monkeypatch.setattr(row_reader, "is_placed", lambda *_: False)  # as without compiled code
    dataset = Dataset.from_hdf5(pattern)
    batches = (dataset.shuffle(0) if shuffled else dataset).batch(32)
    assert all(map(is_sound, batches))
    loaded.clear()
    assert all(map(is_sound, batches))
    # Of what is not cached, rows in one piece are read by slices where they are in order.
    assert {name for name, _ in loaded} == {"image", "flag"} - cached | (
        {"label"} - cached if shuffled else set()
    )


def test_of_fields_of_one_size_that_of_the_chunks_is_cached_last(tmp_path, monkeypatch):
    with h5py.File(tmp_path / "pair.h5", "w") as file:
        for name in "ab":
            file.create_dataset(name, data=np.arange(1000), chunks=(10,))
    monkeypatch.setattr(chunk_cache, "_ROW_CACHE_BYTES", 8000)
    catalog = read_catalog([str(tmp_path / "pair.h5")], None)
    plans = chunk_cache.plan_fields(catalog, 100)
    assert not plans[catalog.widest].is_cached
    assert sum(plan.is_cached for plan in plans) == 1
    for a, b in Dataset.from_hdf5(tmp_path / "pair.h5", ("a", "b")).shuffle(0).batch(64):
        assert a.tolist() == b.tolist()
