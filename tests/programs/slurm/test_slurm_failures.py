"""One task that fails, leaves or is killed ends the whole step, as under mpiexec."""

import time

import pytest

from mpistrat.testing import launch

pytestmark = [pytest.mark.slurm, pytest.mark.timeout(200)]

START = """
import os, sys, time
import mpistrat as ms
"""
PRELUDE = (
    START
    + """
strategy = ms.MPIStrategy()
rank, size = strategy.cluster_resolver.task_id, strategy.num_replicas_in_sync
strategy.reduce("sum", 1)
print("began at", time.time(), flush=True)
def step(x):
    return ms.get_replica_context().all_reduce("sum", x)
"""
)
LIMIT_S = 10
"""How long a step may go on after the ranks have met, with the two seconds that Slurm waits."""


def fail(srun, protocol, program, *flags):
    """Run `program` on four ranks, and return its standard error once it has failed in time."""
    # Where UCX has noticed before us that a rank is gone, MPICH crashes in the MPI_Test of those
    # who are left: it goes on with the request of a send that has failed.
    for _ in range(3):
        done = srun(PRELUDE + program, "--ntasks=4", f"--mpi={protocol}", *flags)
        ended = time.time()
        assert done.returncode != 0, done.stdout
        began = [float(line.split()[-1]) for line in done.stdout.split("\n") if line]
        assert began  # not all: Slurm may kill a rank before it has brought us its line
        assert ended - max(began) < LIMIT_S
        if "Segmentation fault" not in done.stderr:
            break
    return done.stderr


def one_traceback(text):
    # What Slurm itself adds.
    ours = [line for line in text.split("\n") if line and not line.startswith(("srun:", "slurms"))]
    assert len(ours) <= 40, text
    assert text.count("Traceback") == 1, text
    return text


def test_an_exception_in_step_on_one_rank(srun, protocol):
    program = """
def failing_step(x):
    if rank == 1:
        raise ZeroDivisionError("the loss is gone")
    return step(x)
strategy.run(failing_step, args=(1.0,))
"""
    text = one_traceback(fail(srun, protocol, program))
    assert "rank 1 of 4 failed at program.py:14:" in text
    assert "ZeroDivisionError: the loss is gone" in text


def test_a_rank_that_skips_a_collective(srun, protocol):
    program = 'if rank != 2:\n    strategy.run(step, args=(1.0,))\nstrategy.reduce("sum", 1)\n'
    text = one_traceback(fail(srun, protocol, program))
    assert "CollectiveMismatchError: The ranks made different collective calls:" in text
    assert 'reduce("sum"' in text
    assert "  program.py:13" in text


def test_a_rank_that_leaves_early(srun, protocol):
    program = "if rank == 3:\n    sys.exit(0)\nstrategy.run(step, args=(1.0,))\n"
    assert "CollectiveError: rank 3 ended" in one_traceback(fail(srun, protocol, program))


def test_a_rank_that_fails_before_its_first_strategy(srun, protocol):
    program = (
        'if os.environ["SLURM_PROCID"] == "1":\n    raise KeyError("early")\nms.MPIStrategy()\n'
    )
    began = time.monotonic()
    done = srun(START + program, "--ntasks=4", f"--mpi={protocol}")
    assert done.returncode != 0
    assert time.monotonic() - began < 20
    assert "KeyError: 'early'" in one_traceback(done.stderr)


@pytest.mark.parametrize("flags", [[], ["--kill-on-bad-exit=1"]], ids=["as it is", "killing"])
@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_is_killed(srun, protocol, rank, flags):
    program = f"if rank == {rank}:\n    os.kill(os.getpid(), 9)\nstrategy.run(step, args=(1.0,))\n"
    text = fail(srun, protocol, program, *flags)
    assert "Killed" in text
    if flags or launch.is_open_mpi():
        # Slurm is faster than those who are left: it was asked, or has lost a client of PMIx.
        assert text.count("Traceback") <= 1
    else:
        assert f"rank {rank} ended, so all_reduce at program.py:10 can never complete" in text
        assert "has ended without a word" in one_traceback(text)


@pytest.mark.parametrize("rank", [0, 3])
def test_a_rank_that_is_killed_while_the_others_end(srun, protocol, rank):
    if launch.is_open_mpi():
        pytest.skip("Slurm is faster: it has lost a client of PMIx")
    program = f"if rank == {rank}:\n    os.kill(os.getpid(), 9)\n"
    text = fail(srun, protocol, program, "--kill-on-bad-exit=0")
    assert text.count("has ended without a word") == 1, text
    assert f"rank {rank} ended, so the end of the program can never complete" in text
