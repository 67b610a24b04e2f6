"""Ranks that disagree get an error everywhere, and the next strategy works again."""

import re
import threading

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.collectives.operations.broadcast import broadcast


def all_reduce(strategy, op, value):
    return strategy.run(lambda: ms.get_replica_context().all_reduce(op, value))


@pytest.mark.parametrize(
    ("common", "guilty"),
    [
        (lambda s: s.reduce("sum", 1), lambda s: s.reduce("max", 1)),
        (lambda s: s.reduce("sum", 1), lambda s: s.reduce("sum", 1.0)),
        (lambda s: s.reduce("sum", np.ones(2)), lambda s: s.reduce("sum", np.ones(3))),
        (lambda s: s.reduce("sum", [1, 1]), lambda s: s.reduce("sum", (1, 1))),
        (lambda s: s.reduce("sum", 1), lambda s: s.gather(np.ones(1), 0)),
        (lambda s: s.gather(np.ones((1, 1)), 0), lambda s: s.gather(np.ones((1, 1)), 1)),
        (lambda s: all_reduce(s, "sum", 1), lambda s: (s.run(int), all_reduce(s, "sum", 1))),
    ],
    ids=["op", "dtype", "shape", "structure", "kind", "axis", "number of runs"],
)
def test_disagreement_names_ranks_and_lines(strategy, others, size, common, guilty):
    with pytest.raises(ms.errors.CollectiveMismatchError) as caught:
        (common if others else guilty)(strategy)
    text = str(caught.value)
    assert f"rank {size - 1}:" in text
    assert "test_channel.py:" in text
    with pytest.raises(ms.errors.CollectiveError, match="different collective calls"):
        strategy.reduce("sum", 1)
    assert ms.MPIStrategy().reduce("sum", 1) == size


def test_one_bad_argument_is_the_builtin_error_there_and_a_mismatch_elsewhere(
    strategy, others, size
):
    expected = ms.errors.CollectiveMismatchError if others else ValueError
    with pytest.raises(expected) as caught:
        strategy.reduce("sum" if others else "foo", 1)
    if others:
        refused = rf"rank {size - 1}: +reduce refused its arguments \(ValueError"
        assert re.search(refused, str(caught.value))
    assert ms.MPIStrategy().reduce("sum", 1) == size


def test_an_exception_caught_on_one_rank_is_an_error_at_the_next_collective(strategy, others, size):
    def fn():
        if not others:
            raise ZeroDivisionError
        return 1

    if others:
        strategy.run(fn)
    else:
        with pytest.raises(ZeroDivisionError):
            strategy.run(fn)
    with pytest.raises(ms.errors.CollectiveError, match="ZeroDivisionError at test_channel.py"):
        strategy.reduce("sum", 1)


def test_together_raises_on_all_ranks_and_leaves_the_strategy_usable(strategy, rank, size):
    collectives = strategy.extended._collectives
    with pytest.raises(FileNotFoundError, match="no such"), collectives.all_or_none("work", "name"):
        if rank == size - 1:
            raise FileNotFoundError("no such thing")
    assert strategy.reduce("sum", 1) == size
    assert collectives.gather_json({"rank": rank}) == [{"rank": r} for r in range(size)]
    assert collectives.broadcast_json(rank, root=size - 1) == size - 1
    with collectives.call("broadcast") as call:
        assert (broadcast(call, np.full(3, rank), root=size - 1) == size - 1).all()


def test_a_missing_rank_is_a_timeout(strategy):
    collectives = strategy.extended._collectives
    options = ms.CommunicationOptions(timeout_seconds=0.5)
    assert collectives.call("anything", options=options).timeout_s == 0.5


def test_options_of_a_call_without_a_limit_leave_that_of_the_strategy():
    strategy = ms.MPIStrategy(communication_options=ms.CommunicationOptions(timeout_seconds=70))
    collectives = strategy.extended._collectives
    options = ms.CommunicationOptions(deterministic=True)
    assert collectives.call("anything", options=options).timeout_s == 70
    strategy.close()


def test_options_that_cannot_be_honoured_are_refused(strategy, size):
    implementation = ms.CommunicationImplementation
    for options, error in (
        (ms.CommunicationOptions(implementation=implementation.NCCL), ValueError),
        ("fast", TypeError),
        ({"bytes_per_pack": 1}, TypeError),
    ):
        with pytest.raises(error):
            strategy.extended.reduce_to("sum", 1, "cpu:0", options)
        with pytest.raises(error):
            ms.MPIStrategy(communication_options=options)
    with pytest.raises(TypeError, match="intracommunicator"):
        ms.MPIStrategy(comm=3)
    with pytest.raises(ValueError, match="Unknown device"):
        ms.MPIStrategy(device="tpu")
    assert strategy.reduce("sum", 1) == size


def test_a_strategy_over_some_ranks(rank, size):
    from mpi4py import MPI

    half = MPI.COMM_WORLD.Split(rank % 2, rank)
    strategy = ms.MPIStrategy(half)
    assert strategy.num_replicas_in_sync == half.size == len(range(rank % 2, size, 2))
    assert strategy.reduce("sum", rank) == sum(range(rank % 2, size, 2))


def test_two_strategies_in_another_order_are_noticed(strategy, others):
    second = ms.MPIStrategy()
    first, then = (strategy, second) if others else (second, strategy)
    with pytest.raises(ms.errors.CollectiveMismatchError, match=r" of strategy \d+ "):
        first.reduce("sum", 1)
        then.reduce("sum", 1)


def test_an_error_of_one_strategy_closes_the_others_which_name_it(strategy, others, size):
    second = ms.MPIStrategy(device="cpu")
    own, other = (each.extended._collectives.number for each in (strategy, second))
    with pytest.raises(ms.errors.CollectiveMismatchError, match="^The ranks made different"):
        strategy.reduce("sum" if others else "max", 1)
    with pytest.raises(ms.errors.CollectiveMismatchError, match="^The ranks made different"):
        strategy.reduce("sum", 1)
    with pytest.raises(ms.errors.CollectiveMismatchError) as caught:
        second.reduce("sum", 1)
    text = str(caught.value)
    assert text.startswith(f"Strategy {other} is closed, because strategy {own} is")
    assert f"The error of strategy {own} was:\nThe ranks made different collective calls:" in text
    assert "  test_channel.py:" in text


def test_an_error_of_a_strategy_leaves_those_on_other_communicators_open(strategy, others, size):
    from mpi4py import MPI

    second = ms.MPIStrategy(MPI.COMM_WORLD.Dup(), device="cpu")
    with pytest.raises(ms.errors.CollectiveMismatchError):
        strategy.reduce("sum" if others else "max", 1)
    assert second.reduce("sum", 1) == size


@pytest.mark.parametrize("op", ["mean", "max"])
def test_another_axis_is_noticed(strategy, others, op):
    with pytest.raises(ms.errors.CollectiveMismatchError, match="axis"):
        strategy.reduce(op, np.ones((2, 2)), axis=0 if others else 1)


def test_axis_none_and_an_axis_are_different(strategy, others):
    with pytest.raises(ms.errors.CollectiveMismatchError):
        strategy.reduce("max", np.ones(()) if others else np.ones(2), axis=None if others else 0)


def test_a_second_thread_is_refused_while_one_is_in_a_collective(strategy, size):
    seen = []

    def use():
        try:
            strategy.reduce("sum", 1)
        except ms.errors.ContextError as error:
            seen.append(str(error))

    with strategy.extended._collectives.call("reduce"):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    assert "another thread" in seen[0]
    assert strategy.reduce("sum", 1) == size
