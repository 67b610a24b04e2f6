"""The trial of `mpistrat.cuda_awareness` from inside a step of Slurm."""

import json
import sys

import pytest

from tests.programs.slurm.cluster import NETWORK

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]

# Host memory takes the place of the GPU's; the claim is made up.
PROGRAM = """
import json, sys
from mpistrat.arrays import Device
from mpistrat.cuda_awareness.trial import cuda_awareness
from mpistrat.cuda_awareness import Evidence
from mpistrat.cuda_awareness.trial import try_exchange
from mpistrat.mpi.world import open_world
found = cuda_awareness(
    open_world(None),
    Device("gpu"),
    gather=lambda comm: [Evidence(True, "a claim")],
    attempt=lambda index: try_exchange(index, "host"),
)
sys.stdout.write(json.dumps([found.answer.name, found.reasons]) + "\\n")
"""


def test_children_of_a_task_are_no_tasks(srun, protocol):
    done = srun(PROGRAM, "--ntasks=3", "--ntasks-per-node=2", f"--mpi={protocol}", limit_s=60)
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("[")]
    assert len(found) == 3
    assert all(each == found[0] for each in found)
    answer, reasons = found[0]
    assert answer == "PROVED", reasons
    assert "between 2 processes has passed: host memory" in reasons[-1]


def test_the_exchange_runs_between_nodes_by_hand(cluster, protocol):
    program = [sys.executable, "-m", "mpistrat.cuda_awareness", "--memory", "host"]
    done = cluster.run("srun", "--nodes=2", "-n2", f"--mpi={protocol}", *program, env=NETWORK)
    assert done.returncode == 0, done.stderr
    reports = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert [report["exchange"] for report in reports] == ["begun", "passed"]
    assert reports[-1]["num_processes"] == 2
