"""A handle of start_all_reduce that nobody waits for."""

import time

import pytest

from mpistrat.testing import launch

pytestmark = pytest.mark.launches

PROGRAM = """
import numpy as np
import mpistrat as ms
strategy = ms.MPIStrategy(device="cpu")
rank = strategy.cluster_resolver.task_id
def step(drops, goes_on):
    replica = ms.get_replica_context()
    handle = replica.start_all_reduce("sum", np.ones(10))
    if not drops:
        handle.wait()
    del handle
    if goes_on:
        replica.all_reduce("sum", 1)
"""
WORDS = "The handle that start_all_reduce at program.py:8 returned was dropped without wait()"


def run(tmp_path, call):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + f"strategy.run(step, args=({call}))\n")
    return launch.run([program], 3, 30)


@pytest.mark.quick
def test_the_next_collective_raises(tmp_path):
    done = run(tmp_path, "True, True")
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1
    assert f"CollectiveError: {WORDS} on rank 0 of 3. Keep it" in done.stderr
    assert "ranks 0-2 of 3 failed at program.py:13" in done.stderr


def test_one_rank_that_drops_its_handle_ends_the_job(tmp_path):
    began = time.monotonic()
    done = run(tmp_path, "rank == 1, True")
    assert time.monotonic() - began < 25
    assert done.returncode != 0
    assert done.stderr.count("Traceback") == 1
    assert f"CollectiveError: {WORDS} on rank 1 of 3. Keep it" in done.stderr


def test_the_others_are_told_where_one_rank_catches_the_error(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        PROGRAM
        + """
import time
def catch():
    try:
        step(rank == 1, True)
    except ms.errors.CollectiveError as error:
        print(error, flush=True)
strategy.run(catch)
if rank == 1:
    time.sleep(50)
"""
    )
    # At the next collective, or at the end where MPI never got the data of the one that dropped it.
    told = ("rank 1 left, so all_reduce at program.py:13 can never", "rank 1 left: The handle")
    end = time.monotonic() + 30
    launched = launch.Launched([program], 3)
    try:
        while not any(each in launched.stdout() + launched.stderr() for each in told):
            assert time.monotonic() < end, launched.stdout() + launched.stderr()
            time.sleep(0.1)
    finally:
        launched.kill()


def test_it_is_said_where_no_collective_follows(tmp_path):
    done = run(tmp_path, "True, False")
    assert done.stderr == f"mpistrat: ranks 0-2: {WORDS}. Keep it, and call wait() on every rank.\n"


def test_who_waits_hears_nothing(tmp_path):
    done = run(tmp_path, "False, True")
    assert (done.returncode, done.stderr) == (0, "")
