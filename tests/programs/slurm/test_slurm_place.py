"""What `Strategy.cluster_resolver` says under Slurm."""

import json
import sys

import pytest

from mpistrat.testing import launch
from tests.programs.slurm.cluster import NODES

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]

# Each rank prints one line at once, so that the lines do not mix.
PROGRAM = """
import json, os, sys
import numpy as np
import mpistrat as ms
strategy = ms.MPIStrategy()
place = strategy.cluster_resolver
facts = {
    "task_id": place.task_id,
    "num_workers": place.num_workers,
    "hosts": place.hosts,
    "local_rank": place.local_rank,
    "launcher": place.launcher,
    "node": os.environ["SLURMD_NODENAME"],
    "gathered": strategy.gather(np.array([place.task_id]), axis=0).tolist(),
}
sys.stdout.write(json.dumps(facts) + "\\n")
"""


def places(text):
    """Return what the ranks have printed, in their order."""
    lines = [json.loads(line) for line in text.split("\n") if line.startswith("{")]
    return sorted(lines, key=lambda facts: (facts["num_workers"], facts["task_id"]))


def expected(tasks_per_node, launcher):
    """Return what ranks that fill one node after the other must say of themselves."""
    size = sum(tasks_per_node)
    pairs = [(node, k) for node, n in zip(NODES, tasks_per_node, strict=True) for k in range(n)]
    return [
        {
            "task_id": rank,
            "num_workers": size,
            "hosts": [node for node, n in zip(NODES, tasks_per_node, strict=True) if n],
            "local_rank": local_rank,
            "launcher": launcher,
            "node": node,
            "gathered": list(range(size)),
        }
        for rank, (node, local_rank) in enumerate(pairs)
    ]


@pytest.mark.parametrize("tasks_per_node", [(2, 2), (3, 1)])
def test_each_task_of_srun_knows_its_place(srun, protocol, tasks_per_node):
    # The first node gets as many tasks as it may, and the second one the rest.
    layout = (f"--ntasks={sum(tasks_per_node)}", f"--ntasks-per-node={tasks_per_node[0]}")
    done = srun(PROGRAM, *layout, f"--mpi={protocol}")
    assert done.returncode == 0, done.stderr
    assert places(done.stdout) == expected(tasks_per_node, "slurm")


def test_inside_a_batch_job_mpiexec_is_the_launcher_and_a_lone_python_has_none(cluster, tmp_path):
    (tmp_path / "program.py").write_text(PROGRAM)
    commands = f"set -e; {sys.executable} program.py; mpiexec -n 3 {sys.executable} program.py"
    # Slurm tells the script that the job has three tasks, which is no reason to miss any.
    layout = ("--nodes=2", "--ntasks=3", "--ntasks-per-node=2")
    done = cluster.batch(*layout, f"--wrap={commands}", cwd=tmp_path)
    assert done.returncode == 0, done.stdout
    launcher = "openmpi" if launch.is_open_mpi() else "mpich"
    lone, *together = places(done.stdout)
    assert [lone] == expected((1, 0), "none")
    assert together == expected((2, 1), launcher)
