"""Rank, size, barriers and objects, in cross-replica and in replica context."""

import threading
import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError, ContextError
from mpistrat.testing import launch
from tests.helpers import result_of


class Unpicklable:
    def __reduce__(self):
        raise OSError("no such state")


class FailsToLoad:
    """Pickles everywhere, and loads nowhere but on rank 0."""

    def __reduce__(self):
        return _load, ()


def _load():
    if launch.rank_and_size()[0]:
        raise KeyError("this rank has no such thing")


def test_short_names_say_the_same_as_the_long_ones(strategy, rank, size):
    resolver = strategy.cluster_resolver
    short = (strategy.rank, strategy.size, strategy.local_rank, strategy.is_chief)
    assert short == (rank, size, resolver.local_rank, strategy.extended.should_save_summary)
    assert strategy.run(lambda: strategy.rank).values == (rank,)
    for alone in (ms.OneDeviceStrategy(), ms.get_strategy()):
        assert (alone.rank, alone.size, alone.local_rank, alone.is_chief) == (0, 1, 0, True)


def everywhere(strategy, replica_call, strategy_call):
    """Return what a call gives in replica context, in a scope, in a merge_fn and outside."""
    with strategy.scope():
        in_scope = strategy_call(strategy)
    merged = []
    strategy.run(
        lambda: ms.get_replica_context().merge_call(
            lambda strategy: merged.append(strategy_call(strategy))
        )
    )
    in_replica = result_of(strategy, lambda: replica_call(ms.get_replica_context()))
    return [in_replica, in_scope, *merged, strategy_call(strategy)]


def test_a_barrier_is_left_when_all_have_come(strategy, rank, size):
    def late(barrier):
        def call(owner):
            time.sleep(0.05 * rank)
            came = time.time()
            barrier(owner)
            return came, time.time()

        return call

    barrier = late(lambda owner: owner.barrier())
    for came_and_left in everywhere(strategy, barrier, barrier):
        times = strategy.gather_objects(came_and_left)
        assert max(came for came, _ in times) <= min(left for _, left in times)


def test_an_object_of_one_rank_reaches_all(strategy, rank, size):
    for root in range(size):
        sent = {"rank": rank, 3: [None, "text", {1, 2}], "array": np.arange(1000 * (rank + 1))}

        def broadcast(owner, root=root, sent=sent):
            return owner.broadcast_object(sent if rank == root else threading.Lock(), root)

        for received in everywhere(strategy, broadcast, broadcast):
            assert received["rank"] == root
            assert received[3] == sent[3]
            assert received["array"].size == 1000 * (root + 1)
            assert received["array"] is not sent["array"]


def test_objects_of_all_ranks_in_rank_order(strategy, rank, size):
    sent = [rank] * (10 * rank)
    lists = everywhere(
        strategy,
        lambda replica: replica.all_gather_object(sent),
        lambda strategy: strategy.gather_objects(sent),
    )
    assert lists == [[[r] * (10 * r) for r in range(size)]] * 4
    assert lists[0][rank] is not sent


def test_an_object_of_a_mebibyte_travels_whole(strategy, rank, size):
    blobs = strategy.gather_objects(bytes([rank]) * 2**20)
    assert [set(blob) for blob in blobs] == [{r} for r in range(size)]
    assert strategy.broadcast_object(blobs, size - 1) == blobs


@pytest.mark.parametrize(
    ("root", "error", "text"),
    [
        (1.0, TypeError, "root must be an integer"),
        ("0", TypeError, "root must be an integer"),
        (True, TypeError, "root must be an integer"),
        (-1, ValueError, "root must be at least 0"),
        (99, ValueError, "root must be at most"),
    ],
)
def test_a_bad_root_is_refused_and_the_strategy_stays_usable(strategy, size, root, error, text):
    with pytest.raises(error, match=text):
        strategy.broadcast_object(1, root)
    with pytest.raises(error, match=text):
        result_of(strategy, lambda: ms.get_replica_context().broadcast_object(1, root))
    assert strategy.gather_objects(1) == [1] * size


def test_the_other_context_is_told_its_twin(strategy, size):
    calls = {
        "barrier": lambda: strategy.barrier(),
        "broadcast_object": lambda: strategy.broadcast_object(1),
        "all_gather_object": lambda: strategy.gather_objects(1),
    }

    def fn():
        for twin, call in calls.items():
            with pytest.raises(ContextError, match=rf"get_replica_context\(\)\.{twin}\(\) instead"):
                call()
        return ms.get_replica_context()

    replica = result_of(strategy, fn)
    for twin, call in (
        ("barrier", lambda: replica.barrier()),
        ("broadcast_object", lambda: replica.broadcast_object(1)),
        ("gather_objects", lambda: replica.all_gather_object(1)),
    ):
        with strategy.scope(), pytest.raises(ContextError, match=rf"strategy\.{twin}"):
            call()
    with ms.OneDeviceStrategy().scope(), pytest.raises(ContextError, match="mixed or nested"):
        strategy.barrier()
    assert strategy.gather_objects(1) == [1] * size


def test_ranks_agree_on_the_root(strategy, rank, others):
    with pytest.raises(CollectiveMismatchError, match=r"broadcast_object.*from rank 0"):
        strategy.broadcast_object(1, 0 if others else 1)


def test_a_barrier_is_no_other_collective(strategy, others):
    with pytest.raises(CollectiveMismatchError, match=r"(?s)barrier.*gather_objects"):
        strategy.barrier() if others else strategy.gather_objects(1)


def test_what_cannot_be_pickled_on_all_ranks_leaves_the_strategy_usable(strategy, size):
    message = "gather_objects sends objects as pickle.*Unpicklable.*no such state"
    with pytest.raises(TypeError, match=message):
        strategy.gather_objects(Unpicklable())
    with pytest.raises(TypeError, match="broadcast_object sends objects as pickle"):
        strategy.broadcast_object(lambda: 1, strategy.rank)
    assert strategy.gather_objects(1) == [1] * size


@pytest.mark.parametrize("in_run", [False, True])
def test_what_cannot_be_pickled_on_one_rank_is_an_error_on_all(strategy, others, size, in_run):
    value = 1 if others else Unpicklable()
    error = CollectiveMismatchError if others else TypeError
    message = rf"rank {size - 1}.*refused.*TypeError.*Unpicklable" if others else "no such state"
    with pytest.raises(error, match=rf"(?s){message}"):
        if in_run:
            strategy.run(lambda: ms.get_replica_context().all_gather_object(value))
        else:
            strategy.gather_objects(value)


def test_what_one_rank_cannot_load_is_an_error_on_all(strategy, others):
    with pytest.raises(KeyError, match="no such thing"):
        strategy.broadcast_object(FailsToLoad())
    assert strategy.gather_objects(1) == [1] * strategy.size


PROGRAM = """
import mpistrat as ms
ms.print("before the first strategy")
strategy = ms.MPIStrategy(device="cpu")
ms.print("outside", "of every scope", sep=" - ")
with strategy.scope():
    ms.print("in a scope")
    strategy.run(lambda: ms.print("in run"))
with ms.OneDeviceStrategy().scope():
    ms.print("alone")
assert strategy.gather_objects(strategy.rank) == list(range(strategy.size))
assert strategy.broadcast_object(strategy.rank, strategy.size - 1) == strategy.size - 1
strategy.barrier()
from mpi4py import MPI
half = ms.MPIStrategy(MPI.COMM_WORLD.Split(strategy.rank % 2), device="cpu")
strategy.barrier()
with half.scope():
    ms.print("half", strategy.rank % 2, end="!\\n")
"""


@pytest.mark.launches
@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("checks", ["on", "off"])
def test_print_prints_on_rank_0_alone(tmp_path, ranks, checks):
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    result = launch.run([script], ranks, 60, env={"MPISTRAT_CHECKS": checks})
    assert result.returncode == 0, result.stderr
    halves = ["half 0!", "half 1!"][:ranks]
    lines = ["before the first strategy", "outside - of every scope", "in a scope", "in run"]
    assert sorted(result.stdout.split("\n")) == sorted([*lines, "alone", *halves, ""])
