"""The smoke test under srun, with the right flag and with the wrong one."""

import sys

import pytest

from tests.programs.slurm.cluster import NETWORK

pytestmark = pytest.mark.slurm


def smoke(cluster, folder, flag):
    command = ["srun", "--nodes=2", "--ntasks=4", f"--mpi={flag}", sys.executable]
    variables = {**NETWORK, "MPISTRAT_OVERSUBSCRIBE": "on"}
    return cluster.run(
        *command, "-m", "mpistrat.testing", "smoke", limit_s=90, cwd=folder, env=variables
    )


def test_it_passes_on_two_nodes(cluster, protocol, tmp_path):
    done = smoke(cluster, tmp_path, protocol)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "4 ranks found each other" in done.stdout
    assert "smoke: all is well on 4 ranks" in done.stdout


def test_lonely_copies_are_no_job(cluster, tmp_path):
    done = smoke(cluster, tmp_path, "none")
    assert done.returncode != 0
    assert "all is well" not in done.stdout
    assert "--mpi=" in done.stderr
