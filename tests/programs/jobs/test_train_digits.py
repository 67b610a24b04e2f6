"""The digits job from end to end: what it learns, prints, writes and goes on with."""

import os
import shutil
import signal
import subprocess
import sys

import h5py
import numpy as np
import pytest

from mpistrat.testing import launch
from tests.programs.jobs.conftest import Job

PYTHON = os.path.realpath(sys.executable)

pytestmark = [pytest.mark.launches, pytest.mark.timeout(400)]


def contents(path):
    """Return every data set of an HDF5 file by name."""
    found = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, item: found.update({name: item[()]} if hasattr(item, "dtype") else {})
        )
    return found


def assert_equal_bits(path, other):
    ours, theirs = contents(path), contents(other)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert np.asarray(value).tobytes() == np.asarray(theirs[name]).tobytes(), name


@pytest.fixture(scope="module")
def finished(digits, tmp_path_factory):
    """Return a job that has trained with its defaults on 2 ranks, and is only looked at."""
    job = Job(digits, tmp_path_factory.mktemp("finished") / "runs" / "digits")
    job.accuracy = job.train()
    return job


def losses(job):
    """Return the losses on the training and the test part, for each epoch."""
    return [(row["loss"], row["test_loss"]) for row in job.rows()]


def test_it_learns_the_digits(finished):
    assert finished.accuracy >= 0.95
    assert finished.accuracy == pytest.approx(finished.rows()[-1]["test_accuracy"], abs=1e-4)


def test_it_leaves_checkpoints_and_the_learning_curve(finished):
    names = {path.name for path in finished.output.iterdir()}
    pictures = {"learning_curve.json", "learning_curve.png"}
    assert names == pictures | {f"checkpoint-{epoch}.h5" for epoch in (28, 29, 30)}
    assert (finished.output / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    assert [row["epoch"] for row in finished.rows()] == list(range(1, 31))


def test_the_loss_curve_is_the_same_on_any_number_of_ranks(digits, tmp_path, finished):
    expected = losses(finished)[:6]
    for ranks in (1, 3, 4):
        job = Job(digits, tmp_path / str(ranks) / "digits")
        job.train("--epochs", 6, ranks=ranks)
        np.testing.assert_allclose(losses(job), expected, rtol=1e-4)


@pytest.mark.parametrize("batch_norm", ["none", "synchronized"])
def test_the_loss_curve_is_the_same_where_ranks_have_empty_slices(job, tmp_path, batch_norm):
    # 1,437 examples in batches of 359: the last batch has one example, for one rank of three.
    options = ("--epochs", 3, "--batch-size", 359, "--batch-norm", batch_norm)
    curves = []
    for ranks in (1, 3):
        job.output = tmp_path / str(ranks) / "digits"
        job.train(*options, ranks=ranks)
        curves.append(losses(job))
    np.testing.assert_allclose(*curves, rtol=1e-4)


def test_batch_norm_per_replica_learns_and_resumes(job):
    job.train("--epochs", 3, "--batch-norm", "replica")
    assert job.train("--epochs", 5, "--batch-norm", "replica", "--resume") >= 0.95
    names = contents(job.output / "checkpoint-5.h5")
    layers = [f"variables/model/layers/{k}/norm/moving_mean" for k in (0, 1, 2)]
    assert [name in names for name in layers] == [True, True, False]


def test_a_log_file_has_one_plain_line_per_epoch(job):
    done = job.run("--epochs", 3)
    lines = done.stdout.strip().split("\n")
    assert len(lines) == 4
    assert "\x1b" not in done.stdout + done.stderr
    for epoch, line in enumerate(lines[:3], 1):
        assert line.startswith(f"epoch {epoch}/3  loss ")
        assert "examples/s" in line
        assert "s left" in line
    library = "Open MPI" if launch.is_open_mpi() else "MPICH"
    (described,) = [each for each in done.stderr.splitlines() if "training on" in each]
    assert described.startswith(f"training on 2 rank(s), {library} ")
    assert described.endswith((", cpu:0", ", gpu:0"))


def test_a_killed_run_goes_on_to_the_same_bits(job, finished):
    killed = launch.Launched(job.command(), ranks=2)
    killed.wait_for_output("epoch  3/30")
    killed.kill()
    assert not (job.output / "checkpoint-30.h5").exists()
    done = job.run("--resume")
    assert done.returncode == 0, done.stderr
    assert "resumes from" in done.stdout
    assert_equal_bits(job.output / "checkpoint-30.h5", finished.output / "checkpoint-30.h5")
    assert job.rows() == finished.rows()


def test_a_preempted_run_goes_on_in_the_middle_of_the_epoch(job, finished):
    preempted = launch.Launched(job.command(), ranks=2)
    preempted.wait_for_output("epoch  3/30")
    ranks = [pid for pid in preempted.pids() if os.readlink(f"/proc/{pid}/exe") == PYTHON]
    os.kill(ranks[-1], signal.SIGTERM)
    assert preempted.wait(60) == 75, preempted.stderr()
    assert "got SIGTERM" in preempted.stderr()
    assert not (job.output / "learning_curve.json").exists()
    assert job.train("--resume") == finished.accuracy
    assert job.rows() == finished.rows()


def test_resuming_goes_on_on_another_number_of_ranks(job, finished):
    job.train("--epochs", 3, ranks=2)
    job.train("--epochs", 6, "--resume", ranks=3)
    np.testing.assert_allclose(losses(job), losses(finished)[:6], rtol=1e-4)


def test_resuming_starts_a_run_where_there_is_none_and_prints_the_accuracy_of_a_finished_one(job):
    accuracy = job.train("--epochs", 2, "--resume")
    assert len(job.rows()) == 2
    assert job.train("--epochs", 2, "--resume") == accuracy


def test_a_new_run_with_another_seed_moves_the_earlier_one_aside(job):
    job.train("--epochs", 1)
    before = {path.name: digest for path, digest in job.files().items()}
    first = job.rows()
    done = job.run("--epochs", 1, "--seed", 7)
    assert done.returncode == 0, done.stderr
    assert "moved the earlier run" in done.stdout
    aside = job.output.with_name("digits.1")
    after = {path.name: digest for path, digest in job.files().items() if path.parent == aside}
    assert after == before
    assert len(job.rows()) == 1
    assert job.rows() != first


def hdf5_tool(*command):
    if shutil.which(command[0]) is None:
        pytest.skip(f"{command[0]} is not installed")
    return subprocess.run(
        command, capture_output=True, text=True, check=True, timeout=60, stdin=subprocess.DEVNULL
    ).stdout


def test_h5ls_shows_the_tree_of_a_checkpoint(finished):
    listing = hdf5_tool("h5ls", "-r", finished.output / "checkpoint-30.h5")
    lines = {" ".join(line.split()) for line in listing.split("\n")}
    assert "/variables/model/layers/0/kernel Dataset {64, 128}" in lines
    assert "/variables/model/layers/2/bias Dataset {10}" in lines
    assert any(line.startswith("/variables/optimizer/") for line in lines)
    assert any(line.startswith("/state/batches") for line in lines)
    assert any(line.startswith("/state/history") for line in lines)


def test_h5dump_shows_the_attributes_of_a_checkpoint(finished):
    path = finished.output / "checkpoint-30.h5"
    root = hdf5_tool("h5dump", "-A", "-g", "/", path)
    for name in ("format", "format_version", "step", "num_replicas", "created"):
        assert f'ATTRIBUTE "{name}"' in root
    assert '"mpistrat-checkpoint"' in root
    kernel = hdf5_tool("h5dump", "-A", "-d", "/variables/model/layers/0/kernel", path)
    for name in ("synchronization", "aggregation", "trainable", "digest"):
        assert f'ATTRIBUTE "{name}"' in kernel
