"""A job that is told to go saves, queues itself again, and goes on where it stopped."""

import json
import re
import shutil
import time

import h5py
import pytest

from tests import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]

EPOCHS = 24
MARGIN_S = 53
"""Of a job of a minute, so that it is told soon after its start."""


@pytest.fixture
def submit(cluster, tmp_path):
    """Return a function that submits a digits job, which trains on two nodes."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    yield lambda flags=(), options=(): Job(cluster, tmp_path, flags, options)
    cluster.cancel_all()


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

    def wait_until(self, condition, limit_s):
        end = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < end, f"{self.fact('JobState')}:\n{self.log()}"
            time.sleep(0.1)


def test_a_signal_saves_requeues_and_resumes(submit):
    job = submit()
    job.wait_until(lambda: "epoch  2/" in job.log(), 60)
    job.send("USR1")
    check_it_goes_on(job, "got SIGUSR1")


def test_the_end_of_the_allocation_saves_requeues_and_resumes(submit):
    job = submit(["--time=1"], ["--walltime-margin", MARGIN_S])
    check_it_goes_on(job, "the end of the job is near", "TimeLimit=10")


def check_it_goes_on(job, reason, *changes):
    """Check that `job` saves for a `reason`, is queued again, and goes on after some `changes`."""
    job.wait_until(lambda: job.fact("Restarts") == "1" and job.fact("JobState") == "PENDING", 60)
    first = job.log()
    assert f"saved before the end; job {job.number} is queued again" in first
    assert reason in first
    assert "Traceback" not in first
    runs = job.folder / "runs/digits"
    newest = max(int(re.search(r"(\d+)", path.name)[1]) for path in runs.glob("checkpoint-*.h5"))
    assert 1 <= newest < EPOCHS
    with h5py.File(runs / f"checkpoint-{newest}.h5") as file:
        assert file.attrs["num_replicas"] == 4

    # Slurm lets a job that was queued again wait for two minutes.
    job.control("update", f"JobId={job.number}", "StartTime=now", *changes)
    job.wait_until(lambda: job.fact("JobState") not in ("PENDING", "RUNNING", "COMPLETING"), 90)
    assert (job.fact("JobState"), job.fact("ExitCode")) == ("COMPLETED", "0:0"), job.log()
    assert f"goes on from runs/digits/checkpoint-{newest}.h5" in job.log()
    rows = json.loads((runs / "learning_curve.json").read_text())
    assert [row["epoch"] for row in rows] == list(range(1, EPOCHS + 1))
    assert rows[-1]["test_accuracy"] >= 0.95
