"""Ranks that stop while devices reduce, with the stand-in for CuPy."""

from pathlib import Path

import pytest

from mpistrat.testing import launch

STANDIN = Path(__file__).parents[1] / "standin"
PROGRAM = """
import os, signal, sys
import mpistrat as ms
strategy = ms.MPIStrategy(device="gpu")
assert not strategy.extended._collectives.capabilities.why_not_nccl
xp = strategy.extended.xp
def stop(*arguments):
    os.kill(os.getpid(), signal.SIGSTOP)
if strategy.rank == 1:
    import cupy.cuda.nccl
    cupy.cuda.nccl.NcclCommunicator.allReduce = stop
def step():
    handle = ms.get_replica_context().start_all_reduce("sum", xp.ones(1000, dtype="f4"))
    return float(handle.wait()[0])
strategy.run(step)
print("came to the end")
"""


@pytest.mark.launches
def test_a_stopped_rank_ends_the_job_that_waits_on_the_device(tmp_path):
    env = {
        "PYTHONPATH": str(STANDIN),
        "FAKE_CUPY_GPUS": "2",
        "MPISTRAT_TIMEOUT_S": "3",
        "MPISTRAT_EXIT_GRACE_S": "1",
    }
    done = launch.run(["-c", PROGRAM], 2, 60, cwd=tmp_path, env=env)
    assert done.returncode != 0
    assert "The data awaited" in (done.stdout + done.stderr)
    assert "rank 1" in (done.stdout + done.stderr)
    assert "came to the end" not in (done.stdout + done.stderr)
