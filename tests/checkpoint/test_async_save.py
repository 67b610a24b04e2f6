"""Saving in the background: what is saved, when errors come, and what the end waits for."""

import os
import signal
import threading

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint import async_save
from mpistrat.testing import launch

ON_READ, SUM = ms.VariableSynchronization.ON_READ, ms.VariableAggregation.SUM
LARGE = 2**18
"""Elements of an array that is written past the HDF5 library."""


@pytest.fixture
def weight(strategy):
    with strategy.scope():
        return ms.Variable(np.zeros(LARGE), name="weight")


@pytest.fixture
def make(strategy, weight, mpi_tmp_path):
    def make(**arguments):
        checkpoint = ms.Checkpoint(weight=weight)
        return ms.CheckpointManager(checkpoint, mpi_tmp_path / "a", asynchronous=True, **arguments)

    return make


class Gate:
    """Holds up the writing of snapshots, or lets it fail."""

    def __init__(self, write):
        self.opened = threading.Event()
        self.writing = 0
        self.error = None
        self._write = write

    def __call__(self, taken, *arguments):
        self.writing += 1
        assert self.writing == 1
        assert self.opened.wait(60)
        if self.error is None:
            self._write(taken, *arguments)
        self.writing -= 1
        if self.error is not None:
            raise self.error


@pytest.fixture
def gate(monkeypatch):
    gate = Gate(async_save.Snapshot.write)
    # A function, because an object would not be bound to the snapshot.
    monkeypatch.setattr(async_save.Snapshot, "write", lambda *arguments: gate(*arguments))
    return gate


def set_to(strategy, variable, value):
    with strategy.scope():
        variable.assign(np.full(variable.shape, float(value)), read_value=False)


@pytest.mark.mpi
def test_the_file_has_the_values_of_the_moment_of_save(strategy, weight, make, gate, rank):
    manager = make()
    for step in (1, 2):
        set_to(strategy, weight, step)
        path = manager.save(step)
        assert path not in manager.checkpoints
        set_to(strategy, weight, -1)
        if rank == 0:
            assert not os.path.exists(path)
            gate.opened.set()
        manager.wait()
        gate.opened.clear()
        assert manager.latest_checkpoint == path
        with h5py.File(path) as file:
            assert file.attrs["step"] == step
            assert np.all(file["variables/weight"][()] == step)
        strategy.extended._collectives.gather_json(None)
    assert manager.restore_or_initialize() == path
    assert np.all(weight.value() == 2)


@pytest.mark.mpi
def test_two_saves_never_overlap_and_old_files_go(strategy, weight, make, gate, rank):
    manager = make(max_to_keep=2)
    threading.Timer(0.2, gate.opened.set).start()
    for step in range(4):
        set_to(strategy, weight, step)
        manager.save(step)
    manager.wait()
    assert [os.path.basename(p) for p in manager.checkpoints] == [
        f"checkpoint-{step}.h5" for step in (2, 3)
    ]
    assert sorted(os.listdir(manager.directory)) == ["checkpoint-2.h5", "checkpoint-3.h5"]
    assert ms.latest_checkpoint(manager.directory) == manager.latest_checkpoint


@pytest.mark.mpi
@pytest.mark.parametrize("ask", ["save", "wait", "restore_or_initialize"])
def test_an_error_of_the_writer_comes_on_every_rank_with_the_next_call(make, gate, ask):
    manager = make()
    gate.opened.set()
    first = manager.save(1)
    manager.wait()
    gate.error = ms.errors.CheckpointError("the disk is full")
    manager.save(2)
    with pytest.raises(ms.errors.CheckpointError, match="the disk is full"):
        getattr(manager, ask)()
    gate.error = None
    assert manager.checkpoints == [first]
    assert manager.save() == first.replace("-1.", "-2.")
    manager.wait()
    assert len(manager.checkpoints) == 2


@pytest.mark.mpi
def test_sync_on_read_variables_are_aggregated_before_save_returns(
    strategy, make, mpi_tmp_path, rank, size
):
    with strategy.scope():
        total = ms.Variable(np.zeros(LARGE), synchronization=ON_READ, aggregation=SUM)
    strategy.run(lambda: total.assign(np.full(LARGE, rank + 1.0), read_value=False))
    manager = ms.CheckpointManager(ms.Checkpoint(total=total), mpi_tmp_path, asynchronous=True)
    path = manager.save()
    strategy.run(lambda: total.assign(np.zeros(LARGE), read_value=False))
    manager.wait()
    with h5py.File(path) as file:
        assert np.all(file["variables/total"][()] == size * (size + 1) / 2)
    strategy.extended._collectives.gather_json(None)


@pytest.mark.mpi
def test_the_copy_uses_its_memory_again(strategy, weight, make):
    manager = make()
    taken = manager._saver._snapshot
    places = []
    for step in range(3):
        set_to(strategy, weight, step)
        manager.save()
        manager.wait()
        places.append([each.array.ctypes.data for each in taken._items])
    assert places[0] == places[1] == places[2]
    assert len(places[0]) == (strategy.cluster_resolver.task_id == 0)


ENDS = """
import os, signal, sys, threading, time
import numpy as np
import mpistrat as ms
from mpistrat.checkpoint import async_save

how, folder = sys.argv[1:]
strategy = ms.MPIStrategy(device="cpu")
rank = strategy.cluster_resolver.task_id
with strategy.scope():
    weight = ms.Variable(np.full(2**20, 7.0))
manager = ms.CheckpointManager(ms.Checkpoint(weight=weight), folder, asynchronous=True)
manager.save(1)
manager.wait()

write = async_save.Snapshot.write
def write_slowly(self, *arguments):
    print("writing", flush=True)
    time.sleep(6 if how == "exception after the end of rank 0" else 1.5)
    write(self, *arguments)
async_save.Snapshot.write = write_slowly

manager.save(2)
if how == "exit":
    sys.exit(3)
if how == "exception":
    raise RuntimeError("uncaught")
if how == "exception of another" and rank == 1:
    raise RuntimeError("uncaught")
if how == "exception of another":
    strategy.extended._collectives.gather_json(None)
if how == "exception of rank 0" and rank == 0:
    raise RuntimeError("uncaught")
if how == "exception after the end of rank 0" and rank == 1:
    time.sleep(0.5)
    raise RuntimeError("uncaught")
if how in ("exception of rank 0", "killed"):
    time.sleep(60)
"""


@pytest.mark.quick("exception of rank 0-1")
@pytest.mark.launches
@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("end", 0),
        ("exit", 3),
        ("exception of another", 1),
        ("exception of rank 0", 1),
        ("exception after the end of rank 0", 1),
    ],
)
def test_the_end_of_the_program_waits_for_the_file(tmp_path, how, code):
    program = tmp_path / "program.py"
    program.write_text(ENDS)
    folder = tmp_path / "ckpt"
    grace = {"MPISTRAT_EXIT_GRACE_S": "0.3"}
    done = launch.run([program, how, folder], ranks=2, env=grace)
    assert done.returncode == code, done.stderr
    assert sorted(os.listdir(folder)) == ["checkpoint-1.h5", "checkpoint-2.h5"]
    assert ms.latest_checkpoint(folder) == str(folder / "checkpoint-2.h5")


@pytest.mark.launches
def test_sigterm_while_writing_loses_nothing_older(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(ENDS)
    folder = tmp_path / "ckpt"
    started = launch.Launched([program, "killed", folder], ranks=2)
    started.wait_for_output("writing")
    os.kill(started.process.pid, signal.SIGTERM)
    assert started.wait(30) != 0
    assert ms.latest_checkpoint(folder) == str(folder / "checkpoint-1.h5")
    left = ms.CheckpointManager(ms.Checkpoint(weight=ms.Variable(np.zeros(2**20))), folder)
    assert left.restore_or_initialize().endswith("checkpoint-1.h5")
    assert os.listdir(folder) == ["checkpoint-1.h5"]


NO_ONE_ASKS = """
import sys
import numpy as np
import mpistrat as ms
sys.modules["mpi4py"] = None
manager = ms.CheckpointManager(
    ms.Checkpoint(x=ms.Variable(np.ones(10))), sys.argv[1], asynchronous=True
)
if "file" in sys.argv:
    open(sys.argv[1], "w").close()
manager.save()
"""


@pytest.mark.launches
def test_an_error_that_no_call_would_raise_is_logged_at_the_end(tmp_path):
    done = launch.run(["-c", NO_ONE_ASKS, tmp_path / "file", "file"])
    assert done.stderr.count("file/checkpoint-1.h5 cannot be written: ") == 1, done.stderr
    assert "Traceback" not in done.stderr
    done = launch.run(["-c", NO_ONE_ASKS, tmp_path / "new"])
    assert (done.returncode, done.stderr) == (0, "")
    assert os.listdir(tmp_path / "new") == ["checkpoint-1.h5"]
