"""Writers that are killed at any instant: each file under its final name is whole, and none is
lost that was said to be on disk.
"""

import contextlib
import os
import random
import re
import select
import signal
import sys
import time

import h5py  # noqa: F401  the children shall not import it, one after the other
import hdf5plugin  # noqa: F401
import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.testing import launch
from tests import ROOT
from tests.devices import array_equal

NUM_KILLS = 100
LENGTH = 80_000
"""Elements of a variable, which is written past the HDF5 library."""
NAMES = ["weight", "bias"]
RANKS_OF_JOBS = [0, 1, 0]
"""Which rank is killed in each job."""

JOB = """
import os, sys
from pathlib import Path
import mpistrat as ms
from tests.checkpoint.test_killed_writers import save_for_ever

folder, mode = Path(sys.argv[1]), sys.argv[2]
strategy = ms.MPIStrategy(device="cpu")
rank = strategy.cluster_resolver.task_id

def report(step):
    if rank == 0:
        (folder / "reported").write_text(str(step))

(folder / f"pid-{rank}").write_text(str(os.getpid()))
with strategy.scope():
    save_for_ever(folder, mode, report)
"""


def save_for_ever(folder, mode, report):
    """Save step after step, and report each step that is said to be on disk."""
    variables = {name: ms.Variable(np.zeros(LENGTH, np.float32)) for name in NAMES}
    checkpoint = ms.Checkpoint(**variables, rng=np.random.default_rng(0))
    switches = {} if mode == "synchronous" else {mode: True}
    manager = ms.CheckpointManager(checkpoint, folder, max_to_keep=2, **switches)
    step = max([step_of(path) for path in manager.checkpoints], default=0)
    while True:
        step += 1
        for variable in variables.values():
            variable.assign(np.full(LENGTH, step, np.float32))
        manager.save(step)
        if mode == "asynchronous":
            if step % 2:
                continue
            manager.wait()
        report(step)


def step_of(path):
    return int(re.search(r"checkpoint-(\d+)\.h5$", str(path))[1])


def check_folder(folder, reported):
    """Verify all files, also in what they say of themselves, and return the newest step."""
    newest = 0
    for path in sorted(folder.glob("*.h5")):
        with open_checkpoint(path) as reader:
            reader.verify()
            values = [reader.read_variable(name) for name in NAMES]
            assert reader.header.step == step_of(path)
        assert array_equal(values, np.full((2, LENGTH), step_of(path), np.float32))
        newest = max(newest, step_of(path))
    assert newest >= reported, f"{folder} lost step {reported}: the newest is {newest}"
    return newest


def fork_writer(folder, mode):
    """Start a writer in a fork of this process, which has imported all already."""
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(receive)
            save_for_ever(folder, mode, lambda step: os.write(send, b"%d\n" % step))
        except BaseException as error:
            sys.stderr.write(f"{error!r}\n")
        finally:
            os._exit(1)
    os.close(send)
    return child, receive


@pytest.mark.launches
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous"])
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_writers_killed_at_random_instants(tmp_path, mode):
    chance = random.Random(mode)
    reported = num_before_first = num_while_writing = 0
    for _ in range(NUM_KILLS):
        child, receive = fork_writer(tmp_path, mode)
        lines = b""
        with contextlib.closing(os.fdopen(receive, "rb", buffering=0)) as pipe:
            # From the first report on, so that the instants lie within the saves.
            if chance.random() < 0.9:
                select.select([pipe], [], [], 30)
            time.sleep(chance.uniform(0, 0.03))
            os.kill(child, signal.SIGKILL)
            _, status = os.waitpid(child, 0)
            while block := pipe.read(4096):
                lines += block
        assert os.WIFSIGNALED(status), "the writer ended by itself"
        num_before_first += not lines
        num_while_writing += any(tmp_path.glob(".checkpoint-*.partial"))
        reported = max([reported, *map(int, lines.split())])
        newest = check_folder(tmp_path, reported)
    assert newest >= NUM_KILLS // 2
    assert num_before_first < NUM_KILLS // 2
    assert num_while_writing > NUM_KILLS // 10
    # What the killed ones left is never picked up, and goes when the next one starts.
    manager = ms.CheckpointManager(ms.Checkpoint(x=ms.Variable(0.0)), tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".h5"] * len(manager.checkpoints)
    assert ms.latest_checkpoint(tmp_path) == str(tmp_path / f"checkpoint-{newest}.h5")


@pytest.mark.launches
@pytest.mark.slow
@pytest.mark.parametrize("mode", ["synchronous", "asynchronous", "parallel"])
def test_jobs_in_which_a_rank_is_killed(tmp_path, mode):
    chance = random.Random(mode)
    (tmp_path / "job.py").write_text(JOB)
    reported = tmp_path / "reported"
    steps = []
    for rank in RANKS_OF_JOBS:
        reported.unlink(missing_ok=True)
        job = launch.Launched(
            [tmp_path / "job.py", tmp_path, mode], 2, env={"PYTHONPATH": str(ROOT)}
        )
        end = time.monotonic() + 60
        while not reported.exists() and time.monotonic() < end and job.process.poll() is None:
            time.sleep(0.01)
        time.sleep(chance.uniform(0, 0.05))
        os.kill(int((tmp_path / f"pid-{rank}").read_text()), signal.SIGKILL)
        assert job.finish(30).returncode != 0
        steps.append(check_folder(tmp_path, int(reported.read_text() or 0)))
    assert steps == sorted(set(steps)), "a job did not go on from the newest checkpoint"
