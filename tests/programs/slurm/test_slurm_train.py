"""The digits job on two nodes, as `jobs/train.sbatch` submits it."""

import shutil

import h5py
import pytest

from mpistrat.testing import launch
from tests import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(400)]


@pytest.fixture
def checkout(tmp_path):
    """Return a folder with nothing but jobs/."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    return tmp_path


def test_the_digits_are_trained_on_two_nodes_and_the_job_resumes(cluster, checkout):
    first = cluster.batch("jobs/train.sbatch", "--epochs", 2, limit_s=180, cwd=checkout)
    assert first.returncode == 0, first.stdout
    assert "test accuracy: " in first.stdout
    runs = checkout / "runs/digits"
    with h5py.File(runs / "checkpoint-2.h5") as file:
        assert file.attrs["num_replicas"] == 4

    # Three tasks on one node and two on the other.
    layout = ("--ntasks=5", "--ntasks-per-node=3")
    second = cluster.batch(*layout, "jobs/train.sbatch", "--epochs", 3, limit_s=180, cwd=checkout)
    assert second.returncode == 0, second.stdout
    assert "resumes from runs/digits/checkpoint-2.h5" in second.stdout
    found = ["MPICH uses TCP" in each.stdout for each in (first, second)]
    assert found == [False, not launch.is_open_mpi()]
    with h5py.File(runs / "checkpoint-3.h5") as file:
        assert file.attrs["num_replicas"] == 5


def test_a_job_that_fails_is_a_failed_job(cluster, checkout):
    done = cluster.batch("jobs/train.sbatch", "--epochs", 0, limit_s=120, cwd=checkout)
    assert done.returncode != 0
    assert done.stdout.count("Traceback") == 1, done.stdout
    assert "ValueError: --epochs must be at least 1, not 0." in done.stdout
