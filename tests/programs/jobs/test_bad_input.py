"""What the digits job does with bad input: one message, a non-zero code, nothing overwritten."""

import os
import re
import shutil

import h5py
import numpy as np
import pytest

import mpistrat as ms
from tests.programs.jobs.conftest import Job

pytestmark = [pytest.mark.launches, pytest.mark.timeout(200)]

LIMIT_S = 60


@pytest.fixture(scope="module")
def earlier(digits, tmp_path_factory):
    """Return a job that has trained, and is only looked at."""
    job = Job(digits, tmp_path_factory.mktemp("earlier") / "runs" / "digits")
    job.train("--epochs", 2, ranks=1)
    return job


@pytest.fixture
def job(earlier, tmp_path):
    """Return a job whose data may be spoiled and whose folder holds an earlier run."""
    shutil.copytree(earlier.output.parent, tmp_path / "runs")
    shutil.copy(earlier.data, tmp_path / "digits.h5")
    return Job(tmp_path / "digits.h5", tmp_path / "runs" / "digits")


def assert_refused(job, *options, because, ranks=2):
    before = job.files()
    done = job.run(*options, ranks=ranks, limit_s=LIMIT_S)
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1, done.stderr
    assert "Traceback" not in done.stdout
    traceback = done.stderr[done.stderr.index("Traceback") :]
    message = re.split(r"^[\w.]+Error: ", traceback, flags=re.MULTILINE)[1]
    assert because in message, done.stderr
    assert job.files() == before


def without(path, name):
    with h5py.File(path, "a") as file:
        del file[name]


def replace(path, name, value):
    with h5py.File(path, "a") as file:
        del file[name]
        file[name] = value


def test_a_missing_data_file(job):
    job.data = job.data.with_name("nowhere.h5")
    assert_refused(job, because="nowhere.h5")


def test_a_data_file_that_is_not_hdf5(job):
    job.data.write_bytes(b"image,label\n" * 1000)
    assert_refused(job, because="is not an HDF5 file")


def test_a_truncated_data_file(job):
    os.truncate(job.data, job.data.stat().st_size // 2)
    assert_refused(job, because="truncated")


def test_a_missing_field(job):
    without(job.data, "train/label")
    assert_refused(job, because="train/label")


def test_fields_of_unequal_length(job):
    replace(job.data, "train/label", np.zeros(1000, np.uint8))
    assert_refused(job, because="1000")


def test_an_empty_data_set(job):
    replace(job.data, "train/image", np.zeros((0, 8, 8), np.uint8))
    replace(job.data, "train/label", np.zeros(0, np.uint8))
    assert_refused(job, because="no examples")


@pytest.mark.parametrize("size", [0, -1])
def test_a_batch_size_that_is_not_positive(job, size):
    assert_refused(job, f"--batch-size={size}", because=f"not {size}")


def test_a_batch_size_larger_than_the_data(job):
    assert_refused(job, "--batch-size", 1438, because="larger than the data")


def test_no_epochs(job):
    assert_refused(job, "--epochs", 0, because="--epochs must be at least 1")


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_output_folder_that_cannot_be_written(job, ranks):
    blocker = job.output.parent / "file"
    blocker.write_text("kept")
    job.output = blocker / "digits"
    assert_refused(job, because=str(job.output), ranks=ranks)


def test_resuming_with_a_checkpoint_of_another_model(job):
    layers = [{"kernel": ms.Variable(np.zeros((64, 32), np.float32))}]
    path = job.output / "checkpoint-3.h5"
    ms.Checkpoint(model={"layers": layers}).write(path)
    assert_refused(job, "--resume", because="(64, 32)")


def test_resuming_with_a_checkpoint_of_part_of_the_model(job):
    with h5py.File(job.output / "checkpoint-2.h5", "a") as file:
        del file["variables/model/layers/2"]
    assert_refused(job, "--resume", because="model/layers/2/kernel")


def test_resuming_with_a_damaged_checkpoint(job):
    os.truncate(job.output / "checkpoint-2.h5", 1000)
    assert_refused(job, "--resume", because="truncated")


def test_an_unknown_option_is_explained_once(job):
    before = job.files()
    done = job.run("--bach-size", 3, limit_s=LIMIT_S)
    assert done.returncode != 0
    assert done.stderr.count("unrecognized arguments: --bach-size") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert job.files() == before
