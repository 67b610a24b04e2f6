"""The launch files beside the jobs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from mpistrat.testing import launch
from tests import ROOT

pytestmark = [pytest.mark.launches, pytest.mark.timeout(200)]

# Writes down how it was called, and runs the tasks with mpiexec.
SRUN = """#!/bin/bash
echo "$@" >> srun.log
[ -z "$ONLY_WRITE_DOWN" ] || exit 0
while [[ $1 == --* ]]; do shift; done
exec "{python}" -m mpistrat.testing -n 2 --limit 100 -- "${{@:2}}"
"""


@pytest.fixture
def checkout(tmp_path):
    """Return a copy of jobs/ in an empty folder, and an environment with its tools."""
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    tools = tmp_path / "tools"
    tools.mkdir()
    srun = tools / "srun"
    srun.write_text(SRUN.format(python=sys.executable))
    srun.chmod(0o755)
    python = tools / "python"
    python.write_text(f'#!/bin/bash\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    return tmp_path


def run(checkout, *command, **variables):
    path = f"{checkout / 'tools'}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(
        command,
        cwd=checkout,
        env=launch.environment({"PATH": path, **variables}),
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=150,
    )


def test_sbatch_prepares_trains_and_resumes(checkout):
    first = run(checkout, "bash", "jobs/train.sbatch", "--epochs", "2")
    assert first.returncode == 0, first.stdout + first.stderr
    assert "test accuracy: " in first.stdout
    second = run(checkout, "bash", "jobs/train.sbatch", "--epochs", "3")
    assert second.returncode == 0, second.stdout + second.stderr
    assert "resumes from runs/digits/checkpoint-2.h5" in second.stdout
    assert (checkout / "runs/digits/checkpoint-3.h5").exists()


def srun_options(checkout, **variables):
    done = run(checkout, "bash", "jobs/train.sbatch", ONLY_WRITE_DOWN="1", **variables)
    assert done.returncode == 0, done.stderr
    return (checkout / "srun.log").read_text().split()


def test_sbatch_names_the_protocol_of_the_mpi_library_or_that_of_the_user(checkout, digits):
    (checkout / "data").mkdir()
    shutil.copy(digits, checkout / "data")
    assert f"--mpi={'pmix' if launch.is_open_mpi() else 'pmi2'}" in srun_options(checkout)
    (checkout / "srun.log").unlink()
    options = srun_options(checkout, SLURM_MPI_TYPE="pmix_v4", SLURM_CPUS_PER_TASK="3")
    assert {"--mpi=pmix_v4", "--cpus-per-task=3"} <= set(options)


def test_sbatch_says_where_to_submit_it_from(checkout):
    done = run(checkout / "jobs", "bash", "train.sbatch")
    assert done.returncode != 0
    assert "submit from the folder that holds jobs/" in done.stderr


def test_sbatch_says_when_no_python_has_the_package(checkout):
    python = checkout / "tools" / "python"
    python.write_text("#!/bin/bash\nexit 1\n")
    python.chmod(0o755)
    done = run(checkout, "bash", "jobs/train.sbatch")
    assert done.returncode != 0
    assert "has mpistrat" in done.stderr


def test_local_prepares_and_trains(checkout):
    done = run(checkout, "jobs/local.sh", "--epochs", "2", PYTHON=sys.executable, RANKS="3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "test accuracy: " in done.stdout
    assert (checkout / "data/digits.h5").exists()
    assert (checkout / "runs/digits/checkpoint-2.h5").exists()


@pytest.mark.parametrize("ranks", ["two", "0", "-1", "1.5", "2 3"])
def test_a_number_of_ranks_that_is_none_is_a_sentence(checkout, ranks):
    sentence = f"RANKS={ranks} is no number of ranks"
    done = run(checkout, "jobs/local.sh", PYTHON=sys.executable, RANKS=ranks)
    assert (done.returncode, done.stderr.count(sentence)) == (2, 1)
    assert not (checkout / "data").exists()
    shutil.copy(ROOT / "Makefile", checkout)
    done = run(checkout, "make", "train", f"RANKS={ranks}")
    assert (done.returncode, done.stderr.count(sentence)) == (2, 1)
    assert not (checkout / ".venv").exists()


def test_make_says_what_is_installed(checkout):
    shutil.copy(ROOT / "Makefile", checkout)
    (checkout / "pyproject.toml").write_text("nothing = that can be installed")
    (checkout / "setup.py").touch()
    shutil.copytree(ROOT / "mpistrat", checkout / "mpistrat")
    python = checkout / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    # Not a link, which would be the Python of the system, where pip may install nothing.
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (checkout / ".venv" / ".python").touch()
    done = run(checkout, "make", "train", "MPI=mpich")
    assert done.returncode != 0, "the code of pip is lost"
    assert "installing .[mpich,jobs] into .venv" in done.stdout
    assert "Obtaining file:" in done.stdout


@pytest.mark.parametrize("name", ["local.sh", "train.sbatch"])
def test_the_scripts_are_sound_bash(name):
    done = subprocess.run(["bash", "-n", ROOT / "jobs" / name], timeout=60)
    assert done.returncode == 0
