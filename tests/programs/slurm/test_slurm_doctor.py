"""`mpistrat doctor` under srun and in a batch script."""

import json
import re
import sys

import pytest

from mpistrat.testing import launch
from tests.programs.slurm.cluster import NETWORK, NODES

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]

DOCTOR = (sys.executable, "-m", "mpistrat", "doctor")


def srun(cluster, *arguments, cwd):
    return cluster.run("srun", *arguments, limit_s=60, cwd=cwd, env=NETWORK)


def test_ranks_that_find_each_other(cluster, protocol, tmp_path):
    layout = ("--nodes=2", "--ntasks=4", "--ntasks-per-node=3", f"--mpi={protocol}")
    done = srun(cluster, *layout, *DOCTOR, "--json", "--folder", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(done.stdout)
    assert report["healthy"]
    assert [each["node"] for each in report["ranks"]] == [NODES[0]] * 3 + [NODES[1]]
    seen = {each["topic"]: each["seen"] for each in report["findings"]}
    said = f"Slurm started 4 tasks, MPI sees 4 by --mpi={protocol}, on 2 nodes (n1, n2)"
    assert seen["launcher"] == said
    assert "on 2 nodes" in seen["folder"]


@pytest.mark.parametrize("flag", ["none", "other"])
def test_a_wrong_flag_is_reported_once_and_the_right_one_named(cluster, protocol, flag, tmp_path):
    other = "pmi2" if launch.is_open_mpi() else "pmix"
    wrong = f"--mpi={other if flag == 'other' else flag}"
    done = srun(cluster, "--nodes=2", "--ntasks=4", wrong, *DOCTOR, cwd=tmp_path)
    assert done.returncode != 0
    assert "Traceback" not in done.stderr
    assert len(re.findall("PROBLEM +launcher +Slurm started 4 tasks", done.stdout)) == 1
    assert f"srun --mpi={protocol} (" in done.stdout


def test_a_batch_script_without_srun_is_sound(cluster, tmp_path):
    done = cluster.batch(
        "--ntasks=2", f"--wrap={' '.join(DOCTOR)} --folder {tmp_path}", cwd=tmp_path
    )
    assert done.returncode == 0, done.stdout
    assert "none inside of a batch job: one rank" in done.stdout
