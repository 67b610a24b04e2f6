"""Rows of many datasets, one by one: frames of recordings, steps of demonstrations."""

import itertools
from collections import Counter

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.data.hdf5.examples import SingleReader
from mpistrat.errors import DataError

Dataset, Field = ms.data.Dataset, ms.data.Field
LENGTHS = [3, 0, 5, 1, 8, 2, 2, 4, 7, 1, 3, 6]


def write(path, lengths=LENGTHS, first=0, **options):
    """Write recordings of these lengths, whose rows tell their numbers."""
    with h5py.File(path, "w") as file:
        for number, length in enumerate(lengths):
            group = file.create_group(f"run_{number}")
            frames = np.arange(first, first + length)
            chunk = {"chunks": (min(2, length), 3), **options} if options and length else {}
            group.create_dataset("image", data=np.repeat(frames[:, None], 3, axis=1), **chunk)
            group["energy"] = frames * 0.5
            first += length
    return path


FIELDS = {"image": "run_*/image", "energy": "run_*/energy"}


@pytest.mark.parametrize("options", [{}, {"compression": "gzip"}], ids=str)
def test_frames_are_examples(tmp_path, options):
    rows = Dataset.from_hdf5(write(tmp_path / "data.h5", **options), FIELDS).unbatch()
    count = sum(LENGTHS)
    assert rows.cardinality() == count
    assert rows.element_spec["image"] == ms.data.ArraySpec((3,), np.int64)
    assert rows.element_spec["energy"] == ms.data.ArraySpec((), np.float64)
    for dataset in (rows, rows.shuffle(0), rows.shuffle(1, window=5), rows.shuffle(0).repeat(2)):
        for size in (1, 4, 100):
            batches = list(dataset.batch(size))
            images = np.concatenate([batch["image"] for batch in batches])
            energies = np.concatenate([batch["energy"] for batch in batches])
            assert (images == images[:, :1]).all()
            assert (energies == images[:, 0] / 2).all()
            counts = np.bincount(images[:, 0], minlength=count)
            assert (counts == len(images) // count).all()
    assert [int(e["image"][0]) for e in rows] == list(range(count))
    assert [int(e["image"][0]) for e in rows.skip(3).take(4)] == [3, 4, 5, 6]


def test_shuffled_recordings_keep_their_rows_together(tmp_path):
    path = write(tmp_path / "data.h5")
    rows = Dataset.from_hdf5(path, "run_*/energy").shuffle(0).unbatch()
    starts = np.cumsum([0, *LENGTHS])
    found = [int(2 * e) for e in rows]
    assert found != list(range(sum(LENGTHS)))
    while found:
        run = int(np.searchsorted(starts, found[0], "right")) - 1
        expected = list(range(starts[run], starts[run + 1]))
        assert found[: len(expected)] == expected
        found = found[len(expected) :]


def test_rows_of_several_files(tmp_path):
    half = len(LENGTHS) // 2
    write(tmp_path / "0.h5", LENGTHS[:half])
    write(tmp_path / "1.h5", LENGTHS[half:], first=sum(LENGTHS[:half]))
    rows = Dataset.from_hdf5([tmp_path / "0.h5", tmp_path / "1.h5"], FIELDS).unbatch()
    assert [int(2 * e["energy"]) for e in rows] == list(range(sum(LENGTHS)))
    found = [int(2 * e) for batch in rows.shuffle(3).batch(5) for e in batch["energy"]]
    assert sorted(found) == list(range(sum(LENGTHS)))
    windows = [w["energy"].tolist() for w in rows.window(2)]  # never across files
    border = sum(LENGTHS[:half])
    assert [(border - 1) / 2, border / 2] not in windows
    assert len(windows) == sum(LENGTHS) - 2


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_each_recording_is_read_about_once_in_a_shuffled_pass(tmp_path, monkeypatch, size):
    lengths = [20] * 100
    path = write(tmp_path / "data.h5", lengths, compression="gzip")
    reads = Counter()
    read = SingleReader._whole

    def noting(self, root, name, shape):
        reads[name] += 1
        return read(self, root, name, shape)

    monkeypatch.setattr(SingleReader, "_whole", noting)
    rows = Dataset.from_hdf5(path, "run_*/image").unbatch().shuffle(0)
    assert not reads, "the file tells the lengths"
    seen = []
    for rank in range(size):
        elements = rows.batch(64)._pipeline.elements(0, 0, size, rank)
        seen += [int(row[0]) for batch in elements for row in batch]
    assert sorted(seen) == list(range(2000))
    assert sum(reads.values()) <= 1.5 * 100 + 8 * size


def test_rows_after_a_map_a_filter_and_zip(tmp_path):
    path = write(tmp_path / "data.h5")
    runs = Dataset.from_hdf5(path, FIELDS)
    calls = []

    def every_second(run):
        calls.append(1)
        return run["energy"][::2]

    halved = runs.map(every_second).unbatch()
    starts = np.cumsum([0, *LENGTHS])
    expected = [n / 2 for a, b in itertools.pairwise(starts) for n in range(a, b, 2)]
    assert [float(e) for e in halved] == expected
    calls.clear()
    batches = list(halved.shuffle(0).batch(4))
    assert sorted(np.concatenate(batches).tolist()) == expected
    assert len(calls) <= len(LENGTHS) + 1
    long = runs.filter(lambda run: len(run["energy"]) > 3).unbatch()
    assert long.cardinality() == sum(n for n in LENGTHS if n > 3)
    both = Dataset.zip((runs, Dataset.range(len(LENGTHS)))).map(
        lambda run, n: (run["energy"], np.full(len(run["energy"]), n))
    )
    assert [int(n) for _, n in both.unbatch()] == np.repeat(range(12), LENGTHS).tolist()
    assert [int(n) for _, n in both.cache("1 MiB").unbatch().take(4)] == [0, 0, 0, 2]


def test_what_cannot_be_taken_apart(tmp_path):
    path = write(tmp_path / "data.h5")
    with h5py.File(path, "a") as file:
        del file["run_3/energy"]
        file["run_3/energy"] = np.arange(3.0)
    with pytest.raises(DataError, match=r"example 3 have the lengths 1 and 3"):
        Dataset.from_hdf5(path, ("run_*/image", "run_*/energy")).unbatch().cardinality()
    with pytest.raises(ValueError, match="without a first dimension"):
        list(Dataset.range(3).unbatch())
    with pytest.raises(DataError, match=r"element 1 has the shapes"):
        list(Dataset.range(3).map(lambda n: (np.zeros(1), np.zeros(n + 1 if n else 1))).unbatch())
    with pytest.raises(ValueError, match="Call unbatch before repeat"):
        list(Dataset.range(3).map(lambda n: np.zeros(2)).repeat(2).unbatch())
    with pytest.raises(ValueError, match="Call it before batch"):
        Dataset.range(3).batch(2).flat_map(lambda n: n)

    def random(n):
        return np.zeros(ms.data.example_rng().integers(3))

    with pytest.raises(ValueError, match="example_rng"):
        list(Dataset.range(3).map(random).unbatch())
    calls = []

    def unsteady(n):
        calls.append(n)
        return np.zeros(len(calls))

    with pytest.raises(DataError, match="same number of rows each time"):
        list(Dataset.range(3).map(unsteady).unbatch())


def test_rows_of_nothing(tmp_path):
    path = write(tmp_path / "data.h5", [0, 0])
    rows = Dataset.from_hdf5(path, "run_*/energy").unbatch()
    for dataset in (rows, rows.shuffle(0), rows.shuffle(0).repeat(2), rows.batch(2)):
        assert dataset.cardinality() == len(list(dataset)) == 0


def test_rows_of_a_generator():
    spec = ms.data.ArraySpec((None,), np.int64)
    arrays = Dataset.from_generator(lambda: map(np.arange, range(5)), spec)
    assert [int(x) for x in arrays.unbatch()] == [0, 0, 1, 0, 1, 2, 0, 1, 2, 3]
