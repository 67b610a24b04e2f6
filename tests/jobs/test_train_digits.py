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
    expected = [row["loss"] for row in finished.rows()]
    for ranks in (1, 3, 4):
        job = type(finished)(digits, tmp_path / str(ranks) / "digits")
        assert job.train(ranks=ranks) >= 0.95
        loss = [row["loss"] for row in job.rows()]
        np.testing.assert_allclose(loss, expected, rtol=1e-4)
        shutil.rmtree(job.output)


def test_the_loss_curve_is_the_same_where_ranks_have_empty_slices(job, tmp_path):
    # 1,437 examples in batches of 359: the last batch has one example, for one rank of three.
    curves = []
    for ranks in (1, 3):
        job.output = tmp_path / str(ranks) / "digits"
        job.train("--epochs", 5, "--batch-size", 359, ranks=ranks)
        curves.append([row["loss"] for row in job.rows()])
    np.testing.assert_allclose(*curves, rtol=1e-4)


def test_synchronized_batch_norm_has_one_loss_curve_on_any_number_of_ranks(job, tmp_path):
    # The last batch has one example, so that on three ranks two have empty slices.
    options = ("--epochs", 4, "--batch-size", 359, "--batch-norm", "synchronized")
    curves = []
    for ranks in (1, 2, 3, 4):
        job.output = tmp_path / str(ranks) / "digits"
        job.train(*options, ranks=ranks)
        curves.append([(row["loss"], row["test_loss"]) for row in job.rows()])
        np.testing.assert_allclose(curves[-1], curves[0], rtol=1e-4)


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


def test_a_killed_run_goes_on_to_the_same_bits(job, tmp_path):
    options = ("--epochs", 40)
    killed = launch.Launched(job.command(*options), ranks=3)
    killed.wait_for_output("epoch  3/40")
    killed.kill()
    assert not (job.output / "checkpoint-40.h5").exists()
    done = job.run(*options, "--resume", ranks=3)
    assert done.returncode == 0, done.stderr
    assert "goes on from" in done.stdout

    whole = type(job)(job.data, tmp_path / "whole" / "digits")
    whole.train(*options, ranks=3)
    assert_equal_bits(job.output / "checkpoint-40.h5", whole.output / "checkpoint-40.h5")
    assert job.rows() == whole.rows()


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


def test_resuming_goes_on_on_another_number_of_ranks(job, tmp_path):
    job.train("--epochs", 3, ranks=2)
    job.train("--epochs", 6, "--resume", ranks=3)
    whole = type(job)(job.data, tmp_path / "whole" / "digits")
    whole.train("--epochs", 6)
    ours, theirs = ([row["loss"] for row in each.rows()] for each in (job, whole))
    np.testing.assert_allclose(ours, theirs, rtol=1e-4)


def test_resuming_without_a_run_starts_one(job):
    job.train("--epochs", 1, "--resume")
    assert len(job.rows()) == 1


def test_resuming_a_finished_run_prints_its_accuracy(job):
    accuracy = job.train("--epochs", 2)
    assert job.train("--epochs", 2, "--resume") == accuracy


def test_a_new_run_moves_the_earlier_one_aside(job):
    job.train("--epochs", 2)
    before = {path.name: digest for path, digest in job.files().items()}
    done = job.run("--epochs", 1, "--seed", 7)
    assert done.returncode == 0, done.stderr
    assert "moved the earlier run" in done.stdout
    aside = job.output.with_name("digits.1")
    after = {path.name: digest for path, digest in job.files().items() if path.parent == aside}
    assert after == before
    assert len(job.rows()) == 1


def test_another_seed_gives_another_run(job):
    job.train("--epochs", 1)
    first = job.rows()
    job.train("--epochs", 1, "--seed", 1)
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
