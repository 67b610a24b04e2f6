"""Fault injection: the grammar, and the faults that leave the process alive."""

import itertools
import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.faults import Fault, read_fault, read_faults

CALLS = 3


@pytest.fixture
def last(strategy):
    return strategy.num_replicas_in_sync - 1


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("delay:2.5", ("delay", 2.5, None, None, 0)),
        ("delay:2.5@rank=1,collective=7", ("delay", 2.5, 1, 7, 0)),
        (" jitter:0.002@seed=5 ", ("jitter", 0.002, None, None, 5)),
        ("kill@collective=1", ("kill", None, None, 1, 0)),
        ("stop@collective=3,rank=2", ("stop", None, 2, 3, 0)),
        ("corrupt@collective=3", ("corrupt", None, None, 3, 0)),
        ("corrupt:62@collective=3", ("corrupt", 62, None, 3, 0)),
        ("raise:KeyError@collective=3", ("raise", KeyError, None, 3, 0)),
        ("raise:DataError@collective=3", ("raise", ms.errors.DataError, None, 3, 0)),
        ("exit@collective=3", ("exit", 0, None, 3, 0)),
        ("_exit:7@collective=3", ("_exit", 7, None, 3, 0)),
    ],
)
def test_a_fault_is_read(text, fault):
    assert read_fault(text) == Fault(*fault, text.strip())


def test_several_faults_are_read():
    kinds = [fault.kind for fault in read_faults("jitter:1;kill@collective=1; ;delay:3;")]
    assert kinds == ["jitter", "kill", "delay"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("explode", "there is no fault 'explode'"),
        ("kill", "kill needs collective=K"),
        ("kill:9@collective=1", "kill takes no argument"),
        ("kill@collective=0", "collective cannot be '0'"),
        ("kill@collective=two", "collective cannot be 'two'"),
        ("kill@collective=1,rank=-1", "rank cannot be '-1'"),
        ("kill@collective=1,collective=2", "takes rank, collective once each"),
        ("kill@collective=1,seed=2", "takes rank, collective once each"),
        ("kill@collective", "collective cannot be ''"),
        ("delay", "delay needs an argument"),
        ("delay:soon", "the argument of delay cannot be 'soon'"),
        ("delay:-1", "cannot be '-1'"),
        ("delay:nan", "cannot be 'nan'"),
        ("delay:inf", "cannot be 'inf'"),
        ("jitter:1@collective=3", "takes rank, seed once each"),
        ("raise:Nothing@collective=1", "cannot be 'Nothing'"),
        ("raise:print@collective=1", "cannot be 'print'"),
        ("raise:UnicodeDecodeError@collective=1", "cannot be 'UnicodeDecodeError'"),
        ("exit:300@collective=1", "cannot be '300'"),
        ("corrupt:top@collective=1", "cannot be 'top'"),
        ("corrupt:-1@collective=1", "cannot be '-1'"),
    ],
)
def test_bad_faults_say_why(strategy, text, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        ms.testing.inject(text, strategy=strategy)
    assert repr(text) in str(caught.value)
    assert "Write delay:SECONDS" in str(caught.value)


def test_bad_arguments_of_inject(strategy):
    with pytest.raises(TypeError, match="a string or an exception, not 3"):
        ms.testing.inject(3, collective=1)
    with pytest.raises(ValueError, match="collective=K"):
        ms.testing.inject(KeyError("x"), strategy=strategy)
    size = strategy.num_replicas_in_sync
    with pytest.raises(ValueError, match=f"is for rank {size}, but there are only rank"):
        ms.testing.inject("kill", rank=size, collective=1, strategy=strategy)


def test_a_bad_setting_is_an_error_on_every_rank_and_changes_nothing(strategy, monkeypatch):
    for text, reason in (("explode", "no fault"), ("delay:1@rank=99", "is for rank 99")):
        monkeypatch.setenv("MPISTRAT_FAULT", text)
        with pytest.raises(ValueError, match=reason):
            ms.MPIStrategy()
        monkeypatch.delenv("MPISTRAT_FAULT")
    assert strategy.reduce("sum", 1) == strategy.num_replicas_in_sync


@pytest.mark.parametrize("collective", range(1, CALLS + 1))
def test_a_delay_comes_at_its_collective_on_its_rank(strategy, rank, last, collective):
    with ms.testing.inject("delay:0.1", last, collective, strategy=strategy) as injection:
        calls = []
        for _ in range(CALLS):
            began = time.monotonic()
            strategy.reduce("sum", 1)
            calls.append((began, time.monotonic()))
        assert injection.is_done is (rank == last)
    # All wait for the last rank, because a reduction ends nowhere before all have come.
    delayed = strategy.extended._collectives.gather_json(calls[collective - 1])
    assert all(ended - delayed[last][0] > 0.09 for _, ended in delayed)


def test_a_delay_without_a_number_comes_at_every_collective(strategy):
    began = time.monotonic()
    with ms.testing.inject("delay:0.03", strategy=strategy):
        for _ in range(CALLS):
            strategy.reduce("sum", 1)
    assert time.monotonic() - began > 0.029 * CALLS
    assert strategy.extended._collectives.channel.on_collective is None


def test_jitter_is_drawn_from_its_seed(strategy, rank, monkeypatch):
    def draw(seed):
        sleeps = []
        with monkeypatch.context() as patch:
            patch.setattr(time, "sleep", sleeps.append)
            with ms.testing.inject("jitter:0.5", seed=seed, strategy=strategy):
                channel = strategy.extended._collectives.channel
                for number in range(5):
                    channel.on_collective(number)
        return sleeps

    first, again, other = draw(1), draw(1), draw(2)
    assert first == again != other
    assert all(0 <= each <= 0.5 for each in first)
    of_ranks = strategy.extended._collectives.gather_json(first)
    assert all(a != b for a, b in itertools.combinations(of_ranks, 2))


class OwnError(Exception):
    pass


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        ("raise:KeyError", KeyError),
        (OwnError("lost"), OwnError),
        ("exhaust", MemoryError),
        ("exit:3", SystemExit),
    ],
)
def test_what_all_ranks_raise_and_catch_leaves_the_strategy_usable(strategy, fault, error):
    ms.testing.inject(fault, collective=2, strategy=strategy)
    assert strategy.reduce("sum", 1) == strategy.num_replicas_in_sync
    with pytest.raises(error):
        strategy.reduce("sum", 1)
    assert strategy.reduce("sum", 1) == strategy.num_replicas_in_sync
    assert strategy.extended._collectives.channel.on_collective is None


def test_what_one_rank_raises_closes_the_strategy_on_all(strategy, rank, last):
    if last == 0:
        pytest.skip("needs two ranks that can disagree")
    with ms.testing.inject(OwnError("lost"), last, 1, strategy=strategy):
        if rank == last:
            with pytest.raises(OwnError, match="lost"):
                strategy.reduce("sum", 1)
    with pytest.raises(ms.errors.CollectiveMismatchError, match=f"rank {last}: +gather"):
        strategy.gather(np.ones(1), 0) if rank == last else strategy.reduce("sum", 1)


def test_a_fault_that_is_taken_back_does_not_happen(strategy):
    injection = ms.testing.inject("raise:KeyError", collective=1, strategy=strategy)
    injection.remove()
    injection.remove()
    assert strategy.reduce("sum", 1) == strategy.num_replicas_in_sync
    assert not injection.is_done


def test_the_strategy_is_that_of_the_scope_or_of_all_ranks(strategy):
    own = ms.OneDeviceStrategy("cpu:0")
    with own.scope():
        ms.testing.inject("raise:KeyError", collective=1)
    with pytest.raises(KeyError):
        own.reduce("sum", 1)
    ms.testing.inject("raise:IndexError", collective=1)
    with pytest.raises(IndexError):
        strategy.reduce("sum", 1)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "complex128"])
@pytest.mark.parametrize("options", [{}, {"deterministic": True}, {"wire_dtype": "float16"}])
def test_a_corrupt_bit_makes_replicas_drift(rank, last, dtype, options):
    options = ms.CommunicationOptions(**options)
    strategy = ms.MPIStrategy(device="cpu", communication_options=options)
    expected = np.full(3, last + 1, dtype)
    ms.testing.inject("corrupt", last, 1, strategy=strategy)
    results = [strategy.reduce("sum", np.ones(3, dtype)) for _ in range(2)]
    assert (results[0].tobytes() == expected.tobytes()) is (rank != last)
    assert results[1].tobytes() == expected.tobytes()


def test_integers_are_not_corrupted(strategy, rank, last):
    ms.testing.inject("corrupt", last, 1, strategy=strategy)
    assert strategy.gather(np.array([rank]), 0).tolist() == list(range(last + 1))
    floats = strategy.gather(np.ones(1, np.float32), 0).tolist()
    assert floats == ([-1, *[1] * last] if rank == last else [1] * (last + 1))


def test_drift_is_found(strategy, last):
    if last == 0:
        pytest.skip("one replica agrees with itself")
    with strategy.scope():
        total = ms.VariableAggregation.SUM
        weight = ms.Variable(np.zeros(4), name="weight", aggregation=total)
    with ms.testing.inject("corrupt:63", last, 1, strategy=strategy):
        strategy.run(lambda: weight.assign_add(np.ones(4)))
    # Of two replicas, neither is in the majority: the first one is named first.
    with pytest.raises(ms.errors.ReplicaDriftError, match=f"rank {last}: a different value"):
        strategy.extended.assert_replicas_agree(weight)
