"""``mpistrat run`` inside an allocation: srun with the right flag, and restarts in it."""

import sys

import pytest

from mpistrat.testing import launch
from tests import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(300)]

PROGRAM = """
import os, signal
import mpistrat as ms
strategy = ms.MPIStrategy(device="cpu")
resolver = strategy.cluster_resolver
restart = os.environ.get("MPISTRAT_RESTART", "0")
if resolver.task_id == 0:
    print(f"ranks {resolver.num_workers} nodes {len(set(resolver.hosts))} restart {restart}")
    print("launcher", resolver.launcher, "threads", os.environ["OMP_NUM_THREADS"], flush=True)
if restart == "0" and resolver.task_id == resolver.num_workers - 1:
    os.kill(os.getpid(), signal.SIGKILL)
strategy.reduce("sum", 1)
"""


@pytest.fixture
def program(tmp_path):
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def test_srun_starts_the_tasks_of_the_allocation_and_again_after_a_crash(
    cluster, protocol, program, tmp_path
):
    script = tmp_path / "job.sh"
    script.write_text(
        f"#!/bin/bash\nexport PYTHONPATH={ROOT}\nunset OMP_NUM_THREADS OPENBLAS_NUM_THREADS\n"
        f"exec {sys.executable} -m mpistrat run -v --restarts 1 {program}\n"
    )
    flags = ("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2")
    done = cluster.batch(*flags, str(script), limit_s=120, cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    for restart in (0, 1):
        assert f"ranks 2 nodes 2 restart {restart}" in done.stdout
    assert done.stdout.count("launcher slurm threads 2") == 2
    command = f"srun --mpi={protocol} --kill-on-bad-exit=0 --wait=60 --cpus-per-task=2"
    assert done.stdout.count(command) == 2  # with -v at each restart
    assert done.stdout.count("restart 1 of 1") == 1
    netmod = "" if launch.is_open_mpi() else "MPIR_CVAR_CH4_NETMOD=ofi"
    assert netmod in done.stdout


def test_the_number_of_ranks_may_be_smaller(cluster, program, tmp_path):
    command = [sys.executable, "-m", "mpistrat", "run", "-n", "1", "--restarts", "1", program]
    done = cluster.run(
        *("salloc", "--ntasks=3", "--nodes=1", *command),
        limit_s=60,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "ranks 1 nodes 1 restart 1" in done.stdout
    assert " --ntasks=1 " in done.stderr
