"""Where the disk fails: one error on every rank, what was there stays, the program goes on."""

import contextlib
import os
import resource
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import hdf5
from mpistrat.checkpoint import writer
from mpistrat.testing import launch

MODES = [{}, {"asynchronous": True}, {"parallel": True}]
LARGE = 2**17
"""Elements of an array that is written past the HDF5 library."""


@contextlib.contextmanager
def full_disk(manager, monkeypatch):
    """No file can grow over 100 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        yield "File too large"
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)


@contextlib.contextmanager
def read_only_folder(manager, monkeypatch):
    """No file can be made, not even by root: /proc takes none."""
    with monkeypatch.context() as patch:
        patch.setattr(manager, "_directory", "/proc/mpistrat")
        yield "No such file or directory"


@contextlib.contextmanager
def removed_folder(manager, monkeypatch):
    """The folder goes while the file is being written, and comes back later."""
    # With the mark of the writer, which the next one waits for.
    monkeypatch.setattr(writer, "_LONGEST_COMMIT_S", 0.3)
    away = f"{manager.directory}.away"
    moved = []

    def replace(source, target):
        os.rename(manager.directory, away)
        moved.append(away)
        os.replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(hdf5, "replace_file", replace)
        yield "No such file or directory"
    if moved:  # on the rank that writes
        shutil.rmtree(manager.directory, ignore_errors=True)
        os.rename(away, manager.directory)


@pytest.mark.mpi
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("trouble", [full_disk, read_only_folder, removed_folder])
def test_an_error_on_every_rank_and_the_older_file_intact(
    strategy, mpi_tmp_path, monkeypatch, mode, trouble
):
    with strategy.scope():
        small = ms.Variable(np.zeros(3), name="small")
        large = ms.Variable(np.zeros(LARGE), name="large")
    checkpoint = ms.Checkpoint(small=small, large=large)
    manager = ms.CheckpointManager(checkpoint, mpi_tmp_path / "c", **mode)

    def save(value):
        with strategy.scope():
            large.assign(np.full(LARGE, float(value)), read_value=False)
        path = manager.save(value)
        manager.wait()
        return path

    older = save(1)
    with trouble(manager, monkeypatch) as words:
        for _ in range(2 if trouble is not removed_folder else 1):
            with pytest.raises(ms.errors.CheckpointError, match=f"cannot be written: {words}"):
                save(2)
        if trouble is full_disk:  # nor is a file lost that would have been replaced
            with pytest.raises(ms.errors.CheckpointError, match=f"cannot be written: {words}"):
                checkpoint.write(older)
    strategy.extended._collectives.gather_json(None)
    assert manager.checkpoints == [older]
    with strategy.scope():
        assert ms.latest_checkpoint(manager.directory) == older
    checkpoint.restore(older).assert_consumed()
    assert np.all(large.value() == 1)
    newer = save(2)
    assert manager.checkpoints == [older, newer]
    strategy.extended._collectives.gather_json(None)
    if trouble is not removed_folder:  # which took the unfinished file with it
        assert sorted(os.listdir(manager.directory)) == ["checkpoint-1.h5", "checkpoint-2.h5"]


FILLS_A_DISK = """
import os, subprocess, sys
from pathlib import Path
import numpy as np
import mpistrat as ms

disk = Path(sys.argv[1])
strategy = ms.MPIStrategy(device="cpu")
rank, collectives = strategy.cluster_resolver.task_id, strategy.extended._collectives
with strategy.scope():
    large = ms.Variable(np.zeros(100_000), name="large")
    small = ms.Variable(np.zeros(3), name="small")
checkpoint = ms.Checkpoint(large=large, small=small)

def save(manager, value):
    large.assign(np.full(100_000, float(value)))
    path = manager.save(value)
    manager.wait()
    return path

def fails(manager, value, words):
    older, files = manager.checkpoints, sorted(disk.rglob("*"))
    try:
        save(manager, value)
    except ms.errors.CheckpointError as error:
        assert f"cannot be written: {words}" in str(error), error
    else:
        raise AssertionError(f"saved in spite of: {words}")
    collectives.gather_json(None)
    assert (manager.checkpoints, sorted(disk.rglob("*"))) == (older, files)
    checkpoint.restore(older[-1]).assert_consumed()
    assert np.all(large.value() == value - 1)

def on_one_rank(act):
    collectives.gather_json(None)
    if rank == 0:
        act()
    collectives.gather_json(None)

def remount(how):
    subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)

def fill(left_bytes):
    with open(disk / "ballast", "wb", buffering=0) as file:
        try:
            while file.write(bytes(10_000)):
                pass
        except OSError:
            file.truncate(file.tell() - left_bytes)

for mode in ({}, {"asynchronous": True}, {"parallel": True}):
    manager = ms.CheckpointManager(checkpoint, disk / "-".join(["mode", *mode]), **mode)
    save(manager, 1)
    for left_bytes in (0, 100_000, 700_000):
        on_one_rank(lambda: fill(left_bytes))
        fails(manager, 2, "No space left on device")
    on_one_rank((disk / "ballast").unlink)
    save(manager, 2)
    on_one_rank(lambda: remount("ro"))
    fails(manager, 3, "Read-only file system")
    on_one_rank(lambda: remount("rw"))
    assert ms.latest_checkpoint(manager.directory) == manager.checkpoints[-1]
    on_one_rank(lambda: [os.unlink(path) for path in manager.checkpoints])
print(f"rank {rank} saw it all\\n", end="", flush=True)
"""


@pytest.mark.launches
@pytest.mark.slow
def test_a_disk_that_fills_and_one_that_turns_read_only(tmp_path):
    own_mounts = ["unshare", "--user", "--map-root-user", "--mount"]
    if not shutil.which("unshare") or subprocess.run([*own_mounts, "true"], check=False).returncode:
        pytest.skip("no file system can be mounted here")
    (tmp_path / "program.py").write_text(FILLS_A_DISK)
    (tmp_path / "disk").mkdir()
    mount = ["sh", "-c", 'mount -t tmpfs -o size=3m none "$0" && exec "$@"', tmp_path / "disk"]
    ranks = [sys.executable, "-m", "mpistrat.testing", "-n", "3", "--limit", "60", "--"]
    done = subprocess.run(
        [*own_mounts, *mount, *ranks, tmp_path / "program.py", tmp_path / "disk"],
        capture_output=True, text=True, timeout=90, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert sorted(done.stdout.splitlines()) == [f"rank {rank} saw it all" for rank in range(3)]


MEASURES = """
import sys
import numpy as np
import mpistrat as ms

BYTES = 2**25
way = ms.CommunicationImplementation[sys.argv[2]]
strategy = ms.MPIStrategy(
    device="cpu", communication_options=ms.CommunicationOptions(implementation=way)
)
rank, size = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync

def peak_bytes():
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return 1024 * int(lines["VmHWM"].split()[0])

with strategy.scope():
    objects = {f"mirrored{i}": ms.Variable(np.zeros(BYTES // 8)) for i in range(4)}
    for aggregation in ("SUM", "MEAN", "ONLY_FIRST_REPLICA"):
        objects[aggregation] = ms.Variable(
            np.zeros(BYTES // 8), synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation[aggregation],
        )
small = ms.Checkpoint(x=ms.Variable(np.zeros(3)))
checkpoint = ms.Checkpoint(**objects)
with strategy.scope():
    small.write(sys.argv[1])  # HDF5 and all buffers are there
    open("/proc/self/clear_refs", "w").write("5")
    before = peak_bytes()
    checkpoint.write(sys.argv[1])
    checkpoint.write(sys.argv[1], parallel=True)
    saving = peak_bytes() - before
    open("/proc/self/clear_refs", "w").write("5")
    before = peak_bytes()
    checkpoint.restore(sys.argv[1]).assert_consumed()
    restoring = peak_bytes() - before
print(f"rank {rank} {saving / BYTES:.2f} {restoring / BYTES:.2f}\\n", end="", flush=True)
"""


@pytest.mark.launches
@pytest.mark.parametrize(("ranks", "way"), [(1, "AUTO"), (3, "AUTO"), (3, "MPI")])
def test_memory_does_not_grow_with_ranks_or_variables(tmp_path, ranks, way):
    done = launch.run(["-c", MEASURES, tmp_path / "run.h5", way], ranks=ranks, limit_s=120)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    found = {int(rank): (float(saving), float(restoring)) for _, rank, saving, restoring in lines}
    assert sorted(found) == list(range(ranks))
    assert found[0][0] < 2, found  # largest variables
    # All seven are read before any changes, on the ranks in equal parts, and go on piece by piece.
    assert all(each[1] < -(-7 // ranks) + 1 for each in found.values()), found
