"""A wrong ``srun --mpi`` ends the job, where else every task would train alone."""

import time

import pytest

from mpistrat.testing import launch

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]

PROGRAM = """
import mpistrat as ms
strategy = ms.MPIStrategy()
print("trains with", strategy.num_replicas_in_sync)
"""


def refused(srun, flag):
    began = time.monotonic()
    done = srun(PROGRAM, "--ntasks=4", flag, limit_s=20)
    assert time.monotonic() - began < 20
    assert done.returncode != 0
    assert "trains with" not in done.stdout
    assert done.stderr.count("Traceback") <= 1, done.stderr
    return done.stderr


def assert_names_the_flag(text, protocol, reason):
    assert f"LaunchError: Slurm started 4 tasks in this step, {reason}" in text
    library = "Open MPI" if launch.is_open_mpi() else "MPICH"
    assert f"srun --mpi={protocol} ({library})" in text


def test_no_protocol(srun, protocol):
    reason = "but MPI sees a world of one rank"
    assert_names_the_flag(refused(srun, "--mpi=none"), protocol, reason)


def test_the_protocol_of_the_other_library(srun, protocol):
    wrong = "pmi2" if launch.is_open_mpi() else "pmix"
    reason = "but MPI sees a world of one rank"
    if wrong == "pmix":  # MPICH would end the process inside of MPI_Init
        reason = "which this MPI library cannot join, because it does not speak PMIx"
    text = refused(srun, f"--mpi={wrong}")
    assert_names_the_flag(text, protocol, reason)
    assert f"The flag was --mpi={wrong}." in text


def test_the_right_protocol(srun, protocol):
    done = srun(PROGRAM, "--ntasks=4", f"--mpi={protocol}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n") == ["trains with 4"] * 4 + [""]


def test_one_task_needs_no_protocol(cluster, srun):
    done = srun(PROGRAM, "--nodes=1", "--ntasks=1", "--mpi=none")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trains with 1\n"
