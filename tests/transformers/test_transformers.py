"""Hugging Face's trainer learns over MPI what it learns over gloo, and resumes from HDF5 files."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest

from mpistrat.testing import launch
from tests.torch import torchrun

pytestmark = [pytest.mark.launches, pytest.mark.timeout(300)]
HAS_ALL = all(map(find_spec, ("transformers", "accelerate", "torch")))
needs_transformers = pytest.mark.skipif(not HAS_ALL, reason="needs transformers and accelerate")

PROGRAM = Path(__file__).parent / "programs" / "training.py"


def run(*arguments, ranks):
    command = ["-W", "ignore", PROGRAM, *arguments]
    return launch.run(command, ranks, 150, env={"ON_MPI": "1"})


def succeeded(done):
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_transformers
def test_it_learns_over_mpi_what_it_learns_over_gloo_and_resumes_after_any_step(tmp_path):
    folders = [tmp_path / "gloo", tmp_path / "mpi"]
    for each in folders:
        each.mkdir()
    said = torchrun.run([PROGRAM, "checks", folders[0]], 2)
    assert said.count("is done without MPI") == 2
    assert succeeded(run("checks", folders[1], ranks=2)).count("is done with MPI") == 2
    gloo, mpi = (np.load(each / "found.npz") for each in folders)
    assert {"plain weights", "accumulated weights", "limited weights"} <= set(gloo)
    for name in gloo:
        np.testing.assert_allclose(mpi[name], gloo[name], rtol=1e-6, err_msg=name)


@needs_transformers
def test_killed_and_preempted_jobs_resume_on_other_numbers_of_ranks(tmp_path):
    folder, path = tmp_path / "runs", tmp_path / "expected.npz"
    succeeded(run("reference", path, ranks=1))
    assert run("ended", folder, "kill", "13", ranks=2).returncode != 0
    assert (folder / "checkpoint-10.h5").exists()
    preempted = run("ended", folder, "term", "16", ranks=3)
    assert preempted.returncode == 75, preempted.stdout + preempted.stderr
    assert "resumed from checkpoint-16.h5" in succeeded(run("resumed", folder, path, ranks=1))


def test_transformers_is_not_imported_early_and_a_missing_one_is_named():
    code = (
        "import sys, mpistrat.transformers as mt\n"
        "print({'transformers', 'torch', 'mpi4py.MPI'} & set(sys.modules))\n"
        "sys.modules['transformers'] = None\n"
        "mt.HDF5Checkpoint"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "set()\n"
    assert done.returncode == 1
    if find_spec("torch") is not None:
        assert "not installed: pip install transformers accelerate\n" in done.stderr
