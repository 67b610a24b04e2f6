"""The files that the benchmarks of reading write and read."""

import h5py
import numpy as np
import pytest

from benchmarks import data_peers
from mpistrat.bench import data
from mpistrat.bench.data import FILES, write_files

NUM_EXAMPLES = 1100


@pytest.mark.parametrize("num_distinct", [NUM_EXAMPLES, 320])
def test_all_files_hold_the_same_examples(tmp_path, monkeypatch, num_distinct):
    monkeypatch.setattr(data, "_NUM_DISTINCT", num_distinct)
    write_files(tmp_path, NUM_EXAMPLES)
    images = {}
    for name in FILES:
        with h5py.File(tmp_path / f"{name}.h5") as file:
            images[name] = file["image"][()]
            assert file["label"].shape == (NUM_EXAMPLES,)
            assert (file["image"].compression == "gzip") == (name == "gzip")
            assert ("32004" in file["image"]._filters) == (name == "lz4")
    for image in images.values():
        np.testing.assert_array_equal(image, images["gzip"])
    assert len(np.unique(images["gzip"].reshape(NUM_EXAMPLES, -1), axis=0)) == num_distinct


def test_the_loader_reads_from_all_of_the_file(tmp_path):
    write_files(tmp_path, NUM_EXAMPLES)
    path = tmp_path / "gzip.h5"
    examples = data_peers._Examples(path)
    with h5py.File(path) as file:
        for number in (0, len(examples) - 1):
            row = number * NUM_EXAMPLES // len(examples)
            np.testing.assert_array_equal(examples[number][0], file["image"][row])
    assert (len(examples) - 1) * NUM_EXAMPLES // len(examples) == NUM_EXAMPLES - 1


def test_records_hold_the_images(tmp_path, monkeypatch):
    pytest.importorskip("lmdb")
    write_files(tmp_path, NUM_EXAMPLES)
    data_peers.write_mapped(tmp_path)
    images = np.load(tmp_path / "image.npy").reshape(NUM_EXAMPLES, -1)
    kept = []

    def keep(read, num_examples):
        found = np.array([np.frombuffer(each, np.uint8) for each in read(np.arange(num_examples))])
        kept.append(found)

    monkeypatch.setattr(data_peers, "_read_records", keep)
    reads = data_peers.record_reads(tmp_path)
    assert "LMDB, shuffled, contiguous" in reads
    for read in reads.values():
        read()
        np.testing.assert_array_equal(kept[-1], images)
