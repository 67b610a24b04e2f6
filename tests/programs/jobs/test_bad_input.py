"""What the digits job does with bad input: one message, a non-zero code, nothing overwritten.

Four jobs show how one ends; what else is refused, ranks of one job find one after the other.
"""

import json
import os
import re
import shutil

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import launch
from tests import ROOT
from tests.programs.jobs.conftest import Job

pytestmark = [pytest.mark.launches, pytest.mark.timeout(200)]

LIMIT_S = 60


@pytest.fixture(scope="module")
def earlier(digits, tmp_path_factory):
    """Return a job that has trained, and is only looked at."""
    job = Job(digits, tmp_path_factory.mktemp("earlier") / "runs" / "digits")
    job.train("--epochs", 2, ranks=1)
    return job


def copy_of(earlier, folder):
    """Return a job whose data may be spoiled and whose folder holds an earlier run."""
    shutil.copytree(earlier.output.parent, folder / "runs")
    shutil.copy(earlier.data, folder / "digits.h5")
    return Job(folder / "digits.h5", folder / "runs" / "digits")


@pytest.fixture
def job(earlier, tmp_path):
    return copy_of(earlier, tmp_path)


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


def test_a_missing_data_file(job):
    job.data = job.data.with_name("nowhere.h5")
    assert_refused(job, because="nowhere.h5")


def test_a_batch_size_that_is_not_positive(job):
    assert_refused(job, "--batch-size=0", because="not 0")


def test_an_output_folder_that_cannot_be_written(job):
    blocker = job.output.parent / "file"
    blocker.write_text("kept")
    job.output = blocker / "digits"
    assert_refused(job, because=str(job.output), ranks=3)


def test_resuming_with_a_checkpoint_of_another_model(job):
    layers = [{"kernel": ms.Variable(np.zeros((64, 32), np.float32))}]
    path = job.output / "checkpoint-3.h5"
    ms.Checkpoint(model={"layers": layers}).write(path)
    assert_refused(job, "--resume", because="(64, 32)")


def no_hdf5(job):
    job.data.write_bytes(b"image,label\n" * 1000)


def truncated(job):
    os.truncate(job.data, job.data.stat().st_size // 2)


def without_labels(job):
    with h5py.File(job.data, "a") as file:
        del file["train/label"]


def fewer_labels(job):
    replace(job.data, "train/label", np.zeros(1000, np.uint8))


def no_examples(job):
    replace(job.data, "train/image", np.zeros((0, 8, 8), np.uint8))
    replace(job.data, "train/label", np.zeros(0, np.uint8))


def replace(path, name, value):
    with h5py.File(path, "a") as file:
        del file[name]
        file[name] = value


def part_of_the_model(job):
    with h5py.File(job.output / "checkpoint-2.h5", "a") as file:
        del file["variables/model/layers/2"]


def damaged_checkpoint(job):
    os.truncate(job.output / "checkpoint-2.h5", 1000)


def as_it_is(job):
    pass


REFUSED = {
    "a data file that is not HDF5": (no_hdf5, [], "is not an HDF5 file"),
    "a truncated data file": (truncated, [], "truncated"),
    "a missing field": (without_labels, [], "train/label"),
    "fields of unequal length": (fewer_labels, [], "1000"),
    "an empty data set": (no_examples, [], "no examples"),
    "a negative batch size": (as_it_is, ["--batch-size=-1"], "not -1"),
    "a batch size above the data": (as_it_is, ["--batch-size=1438"], "larger than the data"),
    "no epochs": (as_it_is, ["--epochs=0"], "--epochs must be at least 1"),
    "part of the model": (part_of_the_model, ["--resume"], "model/layers/2/kernel"),
    "a damaged checkpoint": (damaged_checkpoint, ["--resume"], "truncated"),
}
ONE_AFTER_THE_OTHER = """
import json, sys
sys.path.insert(0, {jobs!r})
import train_digits
from mpistrat.testing.launch import rank_and_size
caught = {{}}
for name, options in json.loads(sys.argv[1]).items():
    sys.argv[1:] = options
    try:
        train_digits.main()
    except Exception as error:
        caught[name] = str(error)
with open(f"caught-{{rank_and_size()[0]}}.json", "w") as file:
    json.dump(caught, file)
"""


@pytest.fixture(scope="module")
def caught(earlier, tmp_path_factory):
    """Return what each of two ranks catches of each of `REFUSED`, by name, in one job."""
    folder = tmp_path_factory.mktemp("refused")
    jobs = {name: copy_of(earlier, folder / str(i)) for i, name in enumerate(REFUSED)}
    commands = {}
    for name, (spoil, options, _) in REFUSED.items():
        spoil(jobs[name])
        commands[name] = [str(each) for each in jobs[name].command(*options)[1:]]
    before = {name: job.files() for name, job in jobs.items()}
    program = ONE_AFTER_THE_OTHER.format(jobs=str(ROOT / "jobs"))
    done = launch.run(["-c", program, json.dumps(commands)], 2, LIMIT_S, cwd=folder)
    assert (done.returncode, done.stderr) == (0, "")
    assert {name: job.files() for name, job in jobs.items()} == before
    return [json.loads((folder / f"caught-{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_on_every_rank_and_changes_nothing(caught, name):
    _, _, because = REFUSED[name]
    for of_rank in caught:
        assert because in of_rank[name]


def test_an_unknown_option_is_explained_once(job):
    before = job.files()
    done = job.run("--bach-size", 3, limit_s=LIMIT_S)
    assert done.returncode != 0
    assert done.stderr.count("unrecognized arguments: --bach-size") == 1, done.stderr
    assert "Traceback" not in done.stderr
    assert job.files() == before


def test_help_is_printed_once(job):
    done = job.run("--help", limit_s=LIMIT_S)
    assert done.returncode == 0
    assert done.stdout.count("usage: train_digits.py") == 1, done.stdout
