"""Parameter-server jobs inside an allocation, on one node and two, that lose a worker."""

import sys

import pytest

from mpistrat.testing import launch
from tests import ROOT

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(120)]

PROGRAM = """
import os, sys, time
import numpy as np
import mpistrat as ms
strategy = ms.ParameterServerStrategy()
with strategy.scope():
    counter = ms.Variable(np.int64(0), name="counter")
def work(number):
    time.sleep(0.01)
    if strategy.rank == 3 and number > 20:
        os.kill(os.getpid(), 9)
    counter.assign_add(1, read_value=False)
    return number
if strategy.cluster_resolver.task_type != "chief":
    strategy.serve()
    sys.exit()
resolver = strategy.cluster_resolver
print("ranks", strategy.size, "nodes", len(set(resolver.hosts)))
print("tolerant:", strategy.is_fault_tolerant)
coordinator = ms.coordinator.ClusterCoordinator(strategy)
values = [coordinator.schedule(work, (number,)) for number in range(100)]
coordinator.join()
assert coordinator.fetch(values) == list(range(100))
print("total", counter.numpy())
strategy.close()
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_a_lost_worker_is_one_worker_less(cluster, tmp_path, nodes):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = ["salloc", f"--nodes={nodes}", f"--ntasks-per-node={4 // nodes}", "--ntasks=4"]
    command += [sys.executable, "-m", "mpistrat", "run", "--fault-tolerant"]
    # A node claims more cores than this machine may have.
    command += ["--oversubscribe", program] if nodes == 1 else [program]
    done = cluster.run(*command, limit_s=60, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    if not launch.is_open_mpi():
        assert done.returncode == 2, done.stderr
        assert "--fault-tolerant needs Open MPI" in done.stderr
        return
    assert f"ranks 4 nodes {nodes}\ntolerant: True\ntotal 100" in done.stdout, done.stderr
    assert done.stderr.count("is lost") == 1, done.stderr
    assert "The worker 2 (rank 3 on " in done.stderr
