"""Repeated reductions of one array by compiled code: arrays of all kinds, interruptions."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.collectives import fast_reduction
from mpistrat.testing import launch
from tests.devices import assert_array_equal
from tests.helpers import result_of


def all_reduce(strategy, array, **arguments):
    return result_of(
        strategy, lambda: ms.get_replica_context().all_reduce("sum", array, **arguments)
    )


@pytest.mark.parametrize("length", [0, 1, 100, 10_000, 300_000])
@pytest.mark.parametrize("dtype", ["i1", "u8", "f2", "f4", "f8", "c16"])
def test_every_call_gives_the_sum(strategy, rank, size, length, dtype):
    array = np.full(length, rank + 1, dtype)
    expected = np.full(length, sum(range(1, size + 1)), dtype)
    for _ in range(3):
        found = all_reduce(strategy, array)
        assert found.dtype == expected.dtype
        assert_array_equal(found, expected)
        assert_array_equal(array, np.full(length, rank + 1, dtype))


@pytest.mark.parametrize("shape", [(), (2, 3), (1, 0, 4)])
def test_shapes_stay(strategy, size, shape):
    for _ in range(3):
        found = all_reduce(strategy, np.ones(shape))
        assert np.shape(found) == shape
        assert_array_equal(found, np.full(shape, size))


@pytest.mark.fast
def test_an_interruption_before_the_call_is_that_error_and_leaves_it_usable(
    strategy, size, monkeypatch
):
    array = np.ones(5)
    all_reduce(strategy, array)

    def interrupted(*_):
        raise KeyboardInterrupt("now")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="now"):
        patch.setattr(fast_reduction._logger, "isEnabledFor", interrupted)
        all_reduce(strategy, array)
    assert_array_equal(all_reduce(strategy, array), np.full(5, size))


LATE = """
import os, time
import numpy as np
from mpi4py import MPI
import mpistrat as ms

comm = MPI.COMM_WORLD.Dup()
strategy, ones = ms.MPIStrategy(comm, device="cpu"), np.ones(3)
step = lambda: ms.get_replica_context().all_reduce("sum", ones)
for _ in range(2):
    strategy.run(step)
os.environ["MPISTRAT_TIMEOUT_S"] = "0.2"
again = ms.MPIStrategy(comm, device="cpu")
if strategy.rank == 1:
    time.sleep(1.5)
strategy.run(step)
"""


@pytest.mark.launches
def test_a_repeated_call_waits_as_long_as_its_channel_says_now():
    """Not as long as it said at the first call: another strategy may have set another limit."""
    done = launch.run(["-c", LATE], 2, 60)
    assert done.returncode != 0
    assert "timeout of 0.2 s" in done.stdout + done.stderr


@pytest.mark.mpi(min_size=2)
def test_ranks_whose_nests_have_equal_keys(strategy, rank):
    """What a rank has called before decides nothing: 1 and True are one key."""

    def step():
        replica = ms.get_replica_context()
        for key, same in ((1, True), (2, 2.0), ("a", np.str_("a"))):
            found = replica.all_reduce("sum", {same if rank == 0 else key: 1.0})
            assert found[key] == replica.num_replicas_in_sync

    for _ in range(2):
        strategy.run(step)
