"""Views of files: which chunks and fields are read, and windows that stay within their file."""

import h5py
import numpy as np
import pytest

from mpistrat.data import Dataset
from mpistrat.data.hdf5 import chunk_cache, row_reader

N, CHUNK, FIELDS = 12000, 20, ("image", "label")


@pytest.fixture
def files(tmp_path):
    """Return a gzip file of images and labels, and one with other chunks, of the same length."""
    rows = np.arange(N, dtype=np.int64)
    for name, chunk in (("a", CHUNK), ("b", 30)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            image = np.repeat(rows[:, None], 64, axis=1)
            file.create_dataset("image", data=image, chunks=(chunk, 64), compression="gzip")
            file.create_dataset("label", data=rows % 10)
    return tmp_path


@pytest.fixture
def decoded(monkeypatch):
    """Count the chunks that are decoded, with little memory for those that wait."""
    monkeypatch.setattr(chunk_cache, "_ROW_CACHE_BYTES", 2**10)
    monkeypatch.setattr(chunk_cache, "_MIN_CAPACITY_BYTES", 2**15)
    monkeypatch.setattr("mpistrat.data.transformations.shuffle.WINDOW_BYTES", 2**20)
    counts, decode = {}, row_reader.Hdf5Reader._decode

    def counting(self, field, chunks):
        key = self._catalog.columns[field].path, self._catalog.files[0].path[-4]
        counts[key] = counts.get(key, 0) + len(chunks)
        return decode(self, field, chunks)

    monkeypatch.setattr(row_reader.Hdf5Reader, "_decode", counting)
    return counts


HALF = np.sort(np.random.default_rng(0).permutation(N)[: N // 2])
VIEWS = {
    "select": (lambda d, _: d.select(np.random.default_rng(0).permutation(N)), 1),
    "select half": (lambda d, _: d.select(HALF), 1),
    "select some": (lambda d, _: d.select(HALF[::30]), 1 / 3),
    "filter": (lambda d, _: d.filter(lambda label: label < 3, fields=1), 1),
    "zip": (lambda d, other: Dataset.zip((d, other)), 1),
    "concatenate": (lambda d, _: d.concatenate(d.skip(N // 2)), 1.5),
    "windows": (lambda d, _: d.window(4), 1),
    "windows apart": (lambda d, _: d.window(2, stride=60), 1 / 3),
    "sample": (lambda d, _: d.sample(np.ones(N)), 1),
    "mixture": (lambda d, other: Dataset.sample_from_datasets([d, d], [1, 1], 0, False), 2),
    "enumerate": (lambda d, _: d.enumerate().skip(7), 1),
    "select of zip": (lambda d, other: Dataset.zip((d, other)).select(HALF), 1),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", VIEWS)
def test_a_shuffle_reads_each_chunk_about_once(files, decoded, name, size):
    make, factor = VIEWS[name]
    a, b = (Dataset.from_hdf5(files / f"{each}.h5", FIELDS) for each in "ab")
    dataset = make(a, b).shuffle(1).batch(60)
    assert dataset.cardinality() > 0
    if name == "filter":
        assert ("image", "a") not in decoded  # the labels alone
    decoded.clear()
    found = []
    for rank in range(size):
        for element in dataset._pipeline.elements(0, 0, size, rank):
            pair = element[0] if "zip" in name else element[1] if name == "enumerate" else element
            image, label = pair
            assert (image[..., 0] % 10 == label).all()
            found += image[..., 0].ravel().tolist()
    assert len(set(found)) > 0
    expected = factor * N / CHUNK
    assert decoded["image", "a"] <= 1.35 * expected + 10 * size


def test_windows_stay_within_their_file(tmp_path):
    for name, first, length in (("a", 0, 10), ("b", 10, 3), ("c", 13, 8)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            file["x"] = np.arange(first, first + length)
    dataset = Dataset.from_hdf5(tmp_path / "*.h5", "x")
    found = [window.tolist() for window in dataset.window(4, stride=3)]
    assert found == [[0, 1, 2, 3], [3, 4, 5, 6], [6, 7, 8, 9], [13, 14, 15, 16], [16, 17, 18, 19]]
    across = [window[0] for window in dataset.window(4, stride=3, across_files=True)]
    assert across == [0, 3, 6, 9, 12, 15]
    firsts = [int(w[0]) for w in dataset.skip(5).select(np.arange(16)).window(3, dilation=2)]
    assert firsts == [5, 13, 14, 15, 16]
    both = dataset.take(4).concatenate(dataset.skip(13)).window(3)
    assert [int(w[0]) for w in both] == [0, 1, 13, 14, 15, 16, 17, 18]
    shuffled = np.concatenate(list(dataset.window(4, 3).shuffle(0).batch(2)))
    assert sorted(shuffled.tolist()) == found
    for unfixed in (dataset.shuffle(0), dataset.repeat(), dataset.sample(np.ones(21))):
        with pytest.raises(ValueError, match="across_files=True"):
            list(unfixed.window(2))
        assert len(next(iter(unfixed.window(2, across_files=True)))) == 2


@pytest.mark.parametrize("chunks", [None, (7,), (50,)])
@pytest.mark.parametrize("dtype", ["i4", ">i4"])
def test_windows_of_uncompressed_rows(tmp_path, monkeypatch, chunks, dtype):
    monkeypatch.setattr(chunk_cache, "_ROW_CACHE_BYTES", 0)
    for name, first in (("a", 0), ("b", 100)):
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            rows = np.arange(first, first + 100).astype(dtype)
            file.create_dataset("x", data=rows, chunks=chunks)
    dataset = Dataset.from_hdf5(tmp_path / "*.h5", "x")
    for across in (False, True):
        windows = dataset.window(9, across_files=across)
        found = np.concatenate(list(windows.shuffle(0).batch(32)))
        assert (found == found[:, :1] + np.arange(9)).all()
        firsts = [*range(92), *range(100, 192)] if not across else list(range(192))
        assert sorted(found[:, 0].tolist()) == firsts
