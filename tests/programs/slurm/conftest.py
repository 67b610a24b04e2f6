"""The cluster that the tests run on, and the programs that they start there."""

import sys

import pytest

from mpistrat.testing import launch
from tests.programs.slurm.cluster import NETWORK, Cluster, missing_programs


def pytest_addoption(parser):
    parser.addoption(
        "--require-slurm", action="store_true", help="fail, not skip, where Slurm is not installed"
    )


@pytest.fixture(scope="session")
def protocol():
    """Return what ``srun --mpi`` must be for the MPI library of this environment."""
    return "pmix" if launch.is_open_mpi() else "pmi2"


@pytest.fixture(scope="session")
def cluster(request, protocol):
    """Return a running cluster of the nodes n1 and n2."""

    def give_up(reason):
        required = request.config.getoption("--require-slurm", default=False)
        (pytest.fail if required else pytest.skip)(reason)

    if missing := missing_programs():
        give_up(f"there is no {', '.join(missing)}: install the packages slurm-wlm and munge")
    with Cluster() as cluster:
        protocols = cluster.run("srun", "--mpi=list")
        if protocol not in (protocols.stdout + protocols.stderr).split():
            give_up(f"srun does not know --mpi={protocol}: install the package libpmix-dev")
        yield cluster
        left = set(cluster.pids())
    assert not left & set(cluster.pids())


@pytest.fixture
def srun(cluster, tmp_path):
    """Return a function that runs the text of a program with srun, on two nodes."""

    def run(program, *flags, limit_s=60, **variables):
        script = tmp_path / "program.py"
        script.write_text(program)
        command = ["srun", "--nodes=2", *flags, sys.executable, script]
        variables = {**NETWORK, "MPISTRAT_WAIT_NOTICE_S": "20", **variables}
        return cluster.run(*command, limit_s=limit_s, cwd=tmp_path, env=variables)

    return run
