"""Ranks that stop while devices reduce, with the stand-in for CuPy."""

from pathlib import Path

import pytest

from mpistrat.testing import launch

STANDIN = Path(__file__).parents[1] / "standin"
PROGRAM = """
import ctypes, os, signal, sys
import mpistrat as ms
strategy = ms.MPIStrategy(device="gpu")
assert not strategy.extended._collectives.capabilities.why_not_nccl
xp = strategy.extended.xp
import cupy.cuda.nccl
def stop(*arguments):
    os.kill(os.getpid(), signal.SIGSTOP)
def hang(communicator):
    ctypes.PyDLL(None).sleep(1000)  # with the interpreter's lock, as CuPy holds it
if strategy.rank == 1:
    cupy.cuda.nccl.NcclCommunicator.allReduce = stop
elif sys.argv[1] != "abort":
    instead = {"no end": lambda communicator: None, "hangs": hang}[sys.argv[1]]
    cupy.cuda.nccl.NcclCommunicator.abort = instead
def reduced():
    return ms.get_replica_context().start_all_reduce("sum", xp.ones(1000, dtype="f4")).wait()
def step():
    print("the number is", float(reduced()[0]))
try:
    strategy.run(step)
except ms.errors.CollectiveTimeoutError as error:
    print("raised", type(error).__name__, str(error).partition(chr(10))[0], flush=True)
    try:
        link = strategy.extended._collectives.capabilities.link
        link.all_reduce(ms.ReduceOp.SUM, xp.ones(3), xp.ones(3))
    except ms.errors.CollectiveTimeoutError:
        print("raised again", flush=True)
    raise
print("came to the end")
"""


@pytest.mark.launches
@pytest.mark.parametrize("way", ["abort", "no end", "hangs"])
def test_a_stopped_rank_ends_a_wait_on_the_device(tmp_path, way):
    env = {
        "PYTHONPATH": str(STANDIN),
        "FAKE_CUPY_GPUS": "2",
        "MPISTRAT_TIMEOUT_S": "3",
        "MPISTRAT_EXIT_GRACE_S": "1",
    }
    done = launch.run(["-c", PROGRAM, way], 2, 60, cwd=tmp_path, env=env)
    output = done.stdout + done.stderr
    assert done.returncode != 0
    assert "came to the end" not in output
    assert "the number is" not in output
    assert ("raised CollectiveTimeoutError The data awaited" in output) == (way == "abort")
    assert ("raised again" in output) == (way == "abort")
    assert ("in abort" if way == "hangs" else "rank 1") in output
