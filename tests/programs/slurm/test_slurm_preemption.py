"""Preemption by Slurm: a job saves, queues itself again, and resumes where it stopped."""

import json
import os
import re
import shutil
import signal
import time
from pathlib import Path

import h5py
import pytest

from mpistrat.testing import launch
from tests import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]

EPOCHS = 30
"""So many that the first run is not through with them before it is preempted."""

CHECKPOINTS = "runs/digits/checkpoint-*.h5"


@pytest.fixture
def submit(cluster, tmp_path):
    """Return a function that submits a digits job, which trains on two nodes."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    yield lambda flags=(), options=(): Job(cluster, tmp_path, flags, options)
    cluster.cancel_all()


def is_task(pid):
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:  # it has ended meanwhile
        return False
    return b"python" in arguments[0] and b"jobs/train_digits.py" in arguments


class Job:
    """One batch job, its log and what Slurm says of it."""

    def __init__(self, cluster, folder, flags, options):
        self._cluster = cluster
        self.folder = folder
        command = ("sbatch", "--parsable", "--output=%j.out", *flags, "jobs/train.sbatch")
        submitted = cluster.run(*command, "--epochs", EPOCHS, *options, cwd=folder)
        assert submitted.returncode == 0, submitted.stderr
        self.number = submitted.stdout.strip()

    def log(self):
        path = self.folder / f"{self.number}.out"
        return path.read_text() if path.exists() else ""

    def control(self, *arguments):
        done = self._cluster.run("scontrol", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def fact(self, name):
        text = self.control("--oneliner", "show", "job", self.number)
        return re.search(rf"\b{name}=(\S+)", text)[1]

    def send(self, name):
        done = self._cluster.run("scancel", f"--signal={name}", self.number)
        assert done.returncode == 0, done.stderr

    def is_queued_again(self):
        return self.fact("Restarts") == "1" and self.fact("JobState") == "PENDING"

    def checkpoint(self):
        """Return the path of the newest checkpoint, one of an unfinished run."""
        number = {int(path.stem.partition("-")[2]): path for path in self.folder.glob(CHECKPOINTS)}
        assert 1 <= max(number) < EPOCHS
        return number[max(number)]

    def kill_tasks(self):
        """Kill all tasks, and return the files in /dev/shm that they shared."""
        tasks = [pid for pid in self._cluster.pids() if is_task(pid)]
        assert len(tasks) == 4
        maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in tasks)
        for pid in tasks:
            os.kill(pid, signal.SIGKILL)
        return {Path(name) for name in re.findall(r"/dev/shm/\S+", maps)}

    def wait_until(self, condition, limit_s):
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f"{self.fact('JobState')}:\n{self.log()}"
            time.sleep(0.1)


def test_a_signal_saves_requeues_and_resumes(submit):
    job = submit()
    job.wait_until(lambda: "epoch  1/" in job.log(), 120)
    job.send("USR1")
    check_it_saved(job, "got SIGUSR1")
    check_it_goes_on(job)


def test_the_end_of_the_allocation_saves_requeues_and_resumes(submit):
    # The margin is the whole time: the first step sees the end, however fast the machine is.
    job = submit(["--time=2", "--signal=USR1@1"], ["--walltime-margin", 120])
    check_it_saved(job, "the end of the job is near")
    check_it_goes_on(job, "TimeLimit=10")


def test_a_killed_job_resumes_when_it_is_queued_again(submit):
    job = submit()
    job.wait_until(lambda: "epoch  1/" in job.log(), 120)
    shared = job.kill_tasks()
    job.wait_until(lambda: job.fact("JobState") == "FAILED", 120)
    # A library that took what the killed tasks have left for its own would now fail at once, not
    # hang once in many times.
    left = [path for path in shared if path.exists()]
    assert left or launch.is_open_mpi()
    try:
        for path in left:
            os.truncate(path, path.stat().st_size // 2)
        job.control("requeue", job.number)
        job.wait_until(job.is_queued_again, 120)
        check_it_goes_on(job)
    finally:
        for path in left:
            path.unlink(missing_ok=True)


def check_it_saved(job, reason):
    """Check that `job` has saved for a `reason`, and is queued again."""
    job.wait_until(job.is_queued_again, 120)
    log = job.log()
    assert f"saved before the end; job {job.number} is queued again" in log
    assert reason in log
    assert "Traceback" not in log
    with h5py.File(job.checkpoint()) as file:
        assert file.attrs["num_replicas"] == 4


def check_it_goes_on(job, *changes):
    """Check that a `job` that is queued again resumes where it was, after some `changes`."""
    newest = job.checkpoint()
    time.sleep(1.5)  # a node does not start a job in the second in which it has ended it
    # Slurm would let it wait for two minutes.
    job.control("update", f"JobId={job.number}", "StartTime=now", *changes)
    job.wait_until(lambda: job.fact("JobState") not in ("PENDING", "RUNNING", "COMPLETING"), 180)
    assert (job.fact("JobState"), job.fact("ExitCode")) == ("COMPLETED", "0:0"), job.log()
    assert f"resumes from {newest.relative_to(job.folder)}" in job.log()
    rows = json.loads((newest.parent / "learning_curve.json").read_text())
    assert [row["epoch"] for row in rows] == list(range(1, EPOCHS + 1))
    assert rows[-1]["test_accuracy"] >= 0.95
