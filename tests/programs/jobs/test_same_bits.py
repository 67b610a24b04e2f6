"""The digits job with --replicas: the same bits on any number of ranks, also after a restart."""

import signal

import h5py
import numpy as np
import pytest

from mpistrat.testing import launch
from tests.programs.jobs.conftest import Job

pytestmark = [pytest.mark.launches, pytest.mark.timeout(200)]

OPTIONS = ("--replicas", 12, "--epochs", 2, "--batch-size", 200, "--batch-norm", "synchronized")


def digest(job, *options, ranks):
    """Train, and return the digest that the job prints last."""
    done = job.run(*OPTIONS, *options, ranks=ranks)
    assert done.returncode == 0, done.stdout + done.stderr
    label, text = done.stdout.strip().split("\n")[-1].split(": ")
    assert label == "weights"
    return text


def data_sets(path):
    found = {}
    with h5py.File(path) as file:
        file.visititems(
            lambda name, item: (
                found.update({name: np.asarray(item[()]).tobytes()})
                if hasattr(item, "dtype")
                else None
            )
        )
        attributes = dict(file.attrs)
    return found, attributes


@pytest.fixture(scope="module")
def one_rank(digits, tmp_path_factory):
    job = Job(digits, tmp_path_factory.mktemp("one") / "digits")
    job.digest = digest(job, ranks=1)
    return job


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_weights_do_not_depend_on_the_ranks(job, one_rank, ranks):
    assert digest(job, ranks=ranks) == one_rank.digest
    ours, attributes = data_sets(job.output / "checkpoint-2.h5")
    theirs, of_one = data_sets(one_rank.output / "checkpoint-2.h5")
    assert ours == theirs
    assert any(name.startswith("replicas/") for name in ours)
    differing = {name for name in of_one if of_one[name] != attributes[name]}
    assert differing <= {"created", "mpi_library", "digest"}
    told = launch.run(
        [
            "-m",
            "mpistrat",
            "diff",
            job.output / "checkpoint-2.h5",
            one_rank.output / "checkpoint-2.h5",
        ]
    )
    assert told.returncode == 0, told.stdout


def test_a_job_goes_on_at_another_number_of_ranks(job, one_rank):
    first = job.run(*OPTIONS[:2], "--epochs", 1, *OPTIONS[4:], ranks=3)
    assert first.returncode == 0, first.stderr
    assert digest(job, "--resume", ranks=2) == one_rank.digest


KILLED = """
import os, sys
sys.argv[0] = {program!r}
if "MPISTRAT_RESTART" not in os.environ:
    import mpistrat as ms
    manager_save = ms.CheckpointManager.save
    def save(self, *args, **kwargs):
        result = manager_save(self, *args, **kwargs)
        if kwargs.get("step") == 1 and ms.MPIStrategy(device="cpu").rank == 1:
            os.kill(os.getpid(), {signal})
        return result
    ms.CheckpointManager.save = save
exec(compile(open({program!r}).read(), {program!r}, "exec"))
"""


RUN = ("-m", "mpistrat", "run", "-n", "2", "--oversubscribe", "--restarts", "1")


def test_run_starts_it_again_after_a_kill(job, one_rank, tmp_path):
    program, *options = job.command(*OPTIONS)
    script = tmp_path / "killed.py"
    script.write_text(KILLED.format(program=str(program), signal=int(signal.SIGKILL)))
    done = launch.run(
        [*RUN, script, *options],
        limit_s=100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.strip().split("\n")[-1] == f"weights: {one_rank.digest}"
    assert "resumes from" in done.stdout
