"""The data file of the digits job."""

import h5py
import numpy as np
import pytest

from mpistrat.testing import launch
from tests.programs.jobs.conftest import PREPARE

pytestmark = pytest.mark.launches


def test_every_digit_is_in_one_part_with_its_label(digits):
    from sklearn.datasets import load_digits  # which takes seconds

    with h5py.File(digits) as file:
        images = np.concatenate([file["train/image"][:], file["test/image"][:]])
        labels = np.concatenate([file["train/label"][:], file["test/label"][:]])
        assert len(file["test/label"]) == 360
    source = load_digits()
    expected = sorted(
        (i.tobytes(), t) for i, t in zip(source.images.astype("u1"), source.target, strict=True)
    )
    assert sorted((i.tobytes(), t) for i, t in zip(images, labels, strict=True)) == expected


def test_both_parts_hold_every_digit(digits):
    with h5py.File(digits) as file:
        for part in ("train", "test"):
            assert set(file[part]["label"][:]) == set(range(10))


def test_data_sets_are_chunked_compressed_and_described(digits):
    with h5py.File(digits) as file:
        assert "scikit-learn" in file.attrs["written_by"]
        assert "E. Alpaydin" in file.attrs["source"]
        for name in ("train/image", "train/label", "test/image", "test/label"):
            assert file[name].chunks[0] == 64
            assert file[name].compression == "gzip"
            assert file[name].attrs["description"]


def test_the_file_is_the_same_to_the_byte_when_written_again(digits, tmp_path):
    again = tmp_path / "new" / "digits.h5"
    assert launch.run([PREPARE, "--output", again]).returncode == 0
    assert again.read_bytes() == digits.read_bytes()
    assert list(again.parent.iterdir()) == [again]


def test_an_output_that_cannot_be_written_is_one_message_and_leaves_nothing(tmp_path):
    blocker = tmp_path / "file"
    blocker.write_text("kept")
    done = launch.run([PREPARE, "--output", blocker / "digits.h5"])
    assert done.returncode != 0
    assert "cannot be written" in done.stderr
    assert "Traceback" not in done.stderr
    assert blocker.read_text() == "kept"
