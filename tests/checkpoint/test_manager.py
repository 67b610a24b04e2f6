import os
import socket
import subprocess
import sys
import tempfile
from datetime import datetime, timedelta, timezone

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat import hdf5
from mpistrat.checkpoint import reader, retention
from tests.helpers import as_nobody


@pytest.fixture
def weight():
    return ms.Variable(np.float32(0))


@pytest.fixture
def make(tmp_path, weight):
    def make(**arguments):
        return ms.CheckpointManager(ms.Checkpoint(weight=weight), tmp_path / "ckpt", **arguments)

    return make


def steps(manager):
    return [int(path.rpartition("-")[2].removesuffix(".h5")) for path in manager.checkpoints]


def damage(path):
    os.truncate(path, os.path.getsize(path) // 2)


def test_save_numbers_files_by_step(make, tmp_path):
    manager = make()
    assert manager.checkpoints == []
    assert manager.latest_checkpoint is None
    path = manager.save(7)
    assert path == str(tmp_path / "ckpt" / "checkpoint-7.h5")
    assert manager.save() == str(tmp_path / "ckpt" / "checkpoint-8.h5")
    assert manager.latest_checkpoint == manager.checkpoints[-1]
    with h5py.File(path) as found:
        assert found.attrs["step"] == 7
    manager.wait()


def test_the_first_step_is_one(make):
    assert make().save().endswith("checkpoint-1.h5")


def test_the_step_counter_gives_the_step(make):
    counter = ms.Variable(np.int64(40))
    manager = make(step_counter=counter)
    assert manager.save().endswith("checkpoint-40.h5")
    counter.assign_add(2)
    assert manager.save().endswith("checkpoint-42.h5")
    assert manager.save(50).endswith("checkpoint-50.h5")
    assert make(step_counter=lambda: 60).save().endswith("checkpoint-60.h5")


@pytest.mark.parametrize(("step", "error"), [(-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_steps_that_are_none_are_refused(make, step, error):
    with pytest.raises(error, match="The step of a checkpoint must"):
        make().save(step)


def test_the_newest_files_stay(make):
    manager = make(max_to_keep=2)
    for _ in range(4):
        manager.save()
    assert steps(manager) == [3, 4]
    assert sorted(os.listdir(manager.directory)) == ["checkpoint-3.h5", "checkpoint-4.h5"]


def test_a_new_manager_finds_what_is_in_the_folder(make, tmp_path):
    first = make(max_to_keep=None)
    for step in (2, 10, 9):
        first.save(step)
    (tmp_path / "ckpt" / "notes.txt").write_text("")
    (tmp_path / "ckpt" / "checkpoint-x.h5").write_text("")
    again = make()
    assert steps(again) == [2, 10, 9]  # by time, not by number
    assert again.save().endswith("checkpoint-11.h5")


def test_restore_or_initialize(make, weight):
    called = []
    assert make().restore_or_initialize(lambda: called.append(1)) is None
    assert make().restore_or_initialize() is None
    assert called == [1]
    weight.assign(np.float32(3))
    path = make().save(3)
    weight.assign(np.float32(4))
    assert make().restore_or_initialize(lambda: called.append(2)) == path
    assert weight.value() == 3
    assert called == [1]


def test_damaged_files_are_passed_over_with_a_warning(make, weight, caplog):
    manager = make()
    for step in (1, 2, 3):
        weight.assign(np.float32(step))
        manager.save(step)
    damage(manager.checkpoints[2])
    assert ms.latest_checkpoint(manager.directory) == manager.checkpoints[1]
    assert "checkpoint-3.h5" in caplog.text
    assert make().restore_or_initialize() == manager.checkpoints[1]
    assert weight.value() == 2
    for path in manager.checkpoints[:2]:
        damage(path)
    assert ms.latest_checkpoint(manager.directory) is None


def test_a_folder_of_damaged_files_is_no_new_beginning(make, weight, tmp_path):
    manager = make()
    for step in (1, 2):
        manager.save(step)
        damage(manager.checkpoints[-1])
    weight.assign(np.float32(9))
    called = []
    with pytest.raises(ms.errors.CheckpointCorruptError, match=r"(?s)-2\.h5.*-1\.h5.* move these"):
        make().restore_or_initialize(lambda: called.append(1))
    assert not called
    assert weight.value() == 9
    for path in manager.checkpoints:
        os.rename(path, f"{path}.damaged")
    assert make().restore_or_initialize(lambda: called.append(1)) is None
    assert called == [1]


def test_a_folder_of_a_newer_format_is_no_new_beginning(make, weight):
    manager = make()
    manager.save(1)
    with h5py.File(manager.checkpoints[0], "r+") as file:
        file.attrs["format_version"] = 3
    for look in (lambda: ms.latest_checkpoint(manager.directory), make().restore_or_initialize):
        with pytest.raises(ms.errors.CheckpointError, match="has format version 3"):
            look()
    manager.save(2)
    assert ms.latest_checkpoint(manager.directory) == manager.checkpoints[-1]


@pytest.mark.parametrize("moment", [0, 1], ids=["listed", "looked at"])
def test_a_file_that_another_process_removes_meanwhile_is_not_missed(make, monkeypatch, moment):
    manager = make()
    manager.save(1)
    first, second = manager.checkpoints[0], manager.checkpoints[0].replace("-1.h5", "-2.h5")
    opened = []

    def open_checkpoint(path):
        if len(opened) == moment:
            os.rename(first, second)
        opened.append(path)
        return reader.open_checkpoint(path)

    monkeypatch.setattr(retention, "open_checkpoint", open_checkpoint)
    assert ms.latest_checkpoint(manager.directory) == second
    assert opened == [first] * (moment + 1) + [second] * 2


def test_a_list_of_files_that_are_gone_is_an_error_and_no_new_beginning(make, monkeypatch):
    manager = make()
    manager.save(1)
    os.rename(manager.checkpoints[0], manager.checkpoints[0] + ".away")
    assert ms.latest_checkpoint(manager.directory) is None
    monkeypatch.setattr(retention.os, "listdir", lambda _: ["checkpoint-1.h5"])
    for look in (lambda: ms.latest_checkpoint(manager.directory), manager.restore_or_initialize):
        with pytest.raises(ms.errors.CheckpointError, match="not there, 20 times in a row"):
            look()


def test_init_fn_must_be_a_function(make):
    with pytest.raises(TypeError, match="init_fn must be"):
        make().restore_or_initialize(3)


def test_latest_checkpoint_of_no_folder(tmp_path):
    assert ms.latest_checkpoint(tmp_path) is None
    assert ms.latest_checkpoint(tmp_path / "absent") is None
    (tmp_path / "file").write_text("")
    with pytest.raises(ms.errors.CheckpointError, match="cannot be read"):
        ms.latest_checkpoint(tmp_path / "file")


def test_another_programs_checkpoint_is_refused_and_changes_nothing(make, weight, tmp_path):
    make().save(1)
    other = ms.Checkpoint(weight=weight, bias=ms.Variable(np.zeros(3)))
    weight.assign(np.float32(9))
    with pytest.raises(ms.errors.CheckpointMismatchError, match=r"bias \(float64 of shape"):
        ms.CheckpointManager(other, tmp_path / "ckpt").restore_or_initialize()
    assert weight.value() == 9


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"max_to_keep": 0}, ValueError),
        ({"max_to_keep": 1.5}, TypeError),
        ({"max_to_keep": True}, TypeError),
        ({"keep_every_n_hours": -1}, ValueError),
        ({"keep_every_n_hours": float("nan")}, ValueError),
        ({"keep_every_n_hours": "1"}, TypeError),
        ({"step_counter": 3}, TypeError),
        ({"asynchronous": 1}, TypeError),
    ],
)
def test_arguments_that_cannot_be_honoured_are_refused(make, arguments, error):
    with pytest.raises(error):
        make(**arguments)


def test_a_manager_needs_a_checkpoint(weight, tmp_path):
    with pytest.raises(TypeError, match="needs a Checkpoint"):
        ms.CheckpointManager(weight, tmp_path)
    with pytest.raises(TypeError, match="path as a string"):
        ms.CheckpointManager(ms.Checkpoint(weight=weight), None)


def test_keep_every_n_hours_keeps_files_in_between(make):
    manager = make(max_to_keep=1, keep_every_n_hours=1e-9)
    for _ in range(3):
        manager.save()
    assert steps(manager) == [1, 2, 3]


DIES_WHILE_WRITING = """
import os, signal, sys
from mpistrat import hdf5
with hdf5.create_atomically(sys.argv[1]) as file:
    file["x"] = 1
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.launches
def test_leftovers_of_dead_writers_are_removed(make, tmp_path):
    folder = tmp_path / "ckpt"
    target = folder / "checkpoint-5.h5"
    command = [sys.executable, "-c", DIES_WHILE_WRITING, str(target)]
    assert subprocess.run(command, timeout=60).returncode == -9
    (leftover,) = folder.iterdir()
    assert leftover.suffix != ".h5"
    assert ms.latest_checkpoint(folder) is None
    foreign = folder / f".checkpoint-6.h5.elsewhere.{os.getpid()}.abc.partial"
    foreign.write_text("")
    old = folder / ".checkpoint-7.h5.elsewhere.1.abc.partial"
    old.write_text("")
    os.utime(old, (0, 0))
    dead = leftover.name.split(".")[-4:-2]  # the host and the process
    (folder / ".checkpoint-9.h5.commit.partial").write_text(".".join(dead))
    with hdf5.create_atomically(folder / "checkpoint-8.h5"):
        assert make().checkpoints == []
        left = sorted(path.name for path in folder.iterdir())
        assert len(left) == 2
        assert foreign.name in left
        assert socket.gethostname().split(".")[0] in next(n for n in left if "-8" in n)
    assert steps(make()) == [8]


def put_ahead(path, hours):
    """Have the file say that it was written `hours` from now."""
    created = datetime.now(timezone.utc) + timedelta(hours=hours)
    with h5py.File(path, "r+") as file:
        file.attrs["created"] = created.isoformat()
        del file.attrs["digest"]  # which other programs' files need not have either


def test_files_of_a_clock_that_was_ahead_do_not_hide_new_ones(make, weight, caplog):
    first = make()
    for step in (100, 200, 300):
        weight.assign(np.float32(step))
        put_ahead(first.save(step), 1 + step / 1e6)
    again = make(max_to_keep=3)
    (warning,) = [each.getMessage() for each in caplog.records if "future" in each.getMessage()]
    assert all(f"checkpoint-{step}.h5" in warning for step in (100, 200, 300))
    assert again.restore_or_initialize() == first.checkpoints[-1]
    for step in (400, 500):
        weight.assign(np.float32(step))
        again.save(step)
    assert steps(again) == steps(make()) == [300, 400, 500]
    assert make().restore_or_initialize() == again.checkpoints[-1]
    assert weight.value() == 500
    assert ms.latest_checkpoint(again.directory) == again.checkpoints[-1]


def test_a_new_file_is_never_removed_however_wrong_the_clocks(make):
    put_ahead(make().save(1), 1000)
    manager = make(max_to_keep=1)
    assert os.path.exists(manager.save(2))
    assert steps(manager) == steps(make()) == [2]


def test_the_file_that_was_restored_outlives_damaged_newer_ones(make, weight):
    first = make()
    for step in (1, 2, 3):
        weight.assign(np.float32(step))
        first.save(step)
    for path in first.checkpoints[1:]:
        damage(path)
    again = make(max_to_keep=2)
    restored = again.restore_or_initialize()
    assert restored == first.checkpoints[0]
    again.save(4)
    assert sorted(os.listdir(again.directory)) == ["checkpoint-1.h5", "checkpoint-4.h5"]


@pytest.fixture
def open_folder(weight):
    """Make a manager in a folder that every user may reach."""
    with tempfile.TemporaryDirectory() as parent:
        os.chmod(parent, 0o755)
        yield ms.CheckpointManager(ms.Checkpoint(weight=weight), f"{parent}/ckpt")
        os.chmod(f"{parent}/ckpt", 0o755)


@pytest.mark.parametrize("mode", [0o000, 0o444], ids=["closed", "cannot be entered"])
def test_a_folder_that_may_not_be_entered_is_named(open_folder, mode):
    open_folder.save(1)
    folder = open_folder.directory
    os.chmod(folder, mode)
    with as_nobody():
        with pytest.raises(ms.errors.CheckpointError, match=folder):
            ms.CheckpointManager(open_folder.checkpoint, folder)
        with pytest.raises(ms.errors.CheckpointError, match=folder):
            ms.latest_checkpoint(folder)


def test_a_folder_behind_one_that_may_not_be_entered_is_named(open_folder):
    open_folder.save(1)
    parent = os.path.dirname(open_folder.directory)
    os.chmod(parent, 0o700)
    with as_nobody(), pytest.raises(ms.errors.CheckpointError, match=open_folder.directory):
        ms.CheckpointManager(open_folder.checkpoint, open_folder.directory)
    with as_nobody(), pytest.raises(ms.errors.CheckpointError, match="permission denied"):
        open_folder.checkpoint.restore(f"{open_folder.directory}/checkpoint-1.h5")


def test_a_file_that_may_not_be_read_is_no_empty_folder(open_folder):
    first, second = open_folder.save(1), open_folder.save(2)
    os.chmod(second, 0)
    with as_nobody():
        assert ms.latest_checkpoint(open_folder.directory) == first
    os.unlink(first)
    with as_nobody(), pytest.raises(ms.errors.CheckpointError, match=second):
        ms.latest_checkpoint(open_folder.directory)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_relative_folder_stays_the_same_where_the_program_changes_its_own(
    tmp_path, monkeypatch, weight, asynchronous
):
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
    monkeypatch.chdir(there)
    others = ms.Checkpoint(weight=weight).write("ckpt/checkpoint-1.h5")
    monkeypatch.chdir(here)
    checkpoint = ms.Checkpoint(weight=weight)
    manager = ms.CheckpointManager(checkpoint, "ckpt", max_to_keep=1, asynchronous=asynchronous)
    manager.save(1)
    monkeypatch.chdir(there)
    assert manager.save(2) == os.path.join("ckpt", "checkpoint-2.h5")
    manager.wait()
    assert manager.checkpoints == [os.path.join("ckpt", "checkpoint-2.h5")]
    assert os.listdir(here / "ckpt") == ["checkpoint-2.h5"]
    assert os.listdir(there / "ckpt") == [os.path.basename(others)]
    assert manager.restore_or_initialize() == manager.latest_checkpoint


def test_a_step_that_the_file_cannot_hold_is_refused(make):
    manager = make()
    assert manager.save(2**63 - 1)
    with pytest.raises(ValueError, match="below 2\\*\\*63"):
        manager.save(2**63)
