"""Threads of replicas, without ranks: turns, errors, and how long the threads live."""

import gc
import itertools
import threading

import pytest

from mpistrat.replicas.replica_threads import ReplicaThreads


class Turns:
    """Notes whose turn it was."""

    def __init__(self):
        self.all = []

    @property
    def turn(self):
        return self.all[-1]

    @turn.setter
    def turn(self, number):
        self.all.append(number)


def make():
    turns = Turns()

    def disagreement(calls):
        return LookupError(f"{sum(each.request is None for each in calls)} have ended")

    return ReplicaThreads(turns, disagreement), turns


def kept_threads():
    return [each for each in threading.enumerate() if each.name.startswith("mpistrat-replica-")]


def total(given):
    return [sum(given)] * len(given)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_replicas_take_turns_and_wait_for_each_other(size):
    replicas, turns = make()
    results = replicas.run([lambda n=n: replicas.meet("sum", n, total) for n in range(size)])
    assert results == [size * (size - 1) // 2] * size
    # Each until it waits, then the common work, then each to its end.
    assert [turn for turn, _ in itertools.groupby(turns.all)] == [*range(size), None, *range(size)]
    assert not replicas.is_busy
    replicas.close()


def test_threads_are_kept_and_end_with_their_owner():
    others = kept_threads()  # of strategies of other tests: they may end meanwhile
    replicas, _ = make()
    for _ in range(3):
        replicas.run([threading.get_ident] * 4)
        threads = [each for each in kept_threads() if each not in others]
        assert len(threads) == 3
    names = replicas.run([threading.get_ident] * 4)
    assert names == replicas.run([threading.get_ident] * 4)
    assert names[0] == threading.get_ident()
    del replicas, _  # nobody has closed it
    gc.collect()
    for each in threads:
        each.join(10)
        assert not each.is_alive()


def test_threads_that_the_system_refuses(monkeypatch):
    replicas, _ = make()
    start = threading.Thread.start
    allowed = [True, False]

    def refuse(thread):
        if not allowed.pop(0):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(
        RuntimeError, match=r"4 replicas, which need 3 threads, .* allows 1 \(can't"
    ):
        replicas.run([int] * 4)
    assert not replicas.is_busy
    monkeypatch.undo()
    assert replicas.run([int] * 4) == [0] * 4
    replicas.close()


class Stopped(BaseException):
    """No `Exception`."""


@pytest.mark.parametrize("error", [ValueError, Stopped, SystemExit, StopIteration, GeneratorExit])
@pytest.mark.parametrize("guilty", [0, 1, 3])
@pytest.mark.parametrize("phase", [0, 1, 2])
def test_an_error_of_one_ends_all(error, guilty, phase):
    replicas, _ = make()
    raised, begun, ended, caught = error("mine"), [], [], []

    def replica(number):
        begun.append(number)
        try:
            for each in range(3):
                if (number, each) == (guilty, phase):
                    raise raised
                replicas.meet("sum", 1, total)
        except Exception as found:
            if found is not raised:
                caught.append(found)
            raise
        finally:
            ended.append(number)

    with pytest.raises(error) as found:
        replicas.run([lambda n=n: replica(n) for n in range(4)])
    assert found.value is raised
    assert sorted(begun) == sorted(ended) == list(range(guilty + 1 if phase == 0 else 4))
    assert caught == []
    assert replicas.run([int] * 4) == [0] * 4
    replicas.close()


def test_a_replica_that_ignores_its_cancellation():
    replicas, _ = make()

    def stubborn():
        while True:
            try:
                return replicas.meet("sum", 1, total)
            except BaseException as error:
                if isinstance(error, RuntimeError):  # a ContextError
                    return None

    def fails():
        raise KeyError("mine")

    with pytest.raises(KeyError):
        replicas.run([stubborn, fails])
    assert replicas.run([int] * 2) == [0] * 2
    replicas.close()


def test_replicas_that_wait_a_different_number_of_times():
    replicas, _ = make()

    def replica(number):
        for _ in range(2 if number == 1 else 1):
            replicas.meet("sum", 1, total)

    with pytest.raises(LookupError, match="2 have ended"):
        replicas.run([lambda n=n: replica(n) for n in range(3)])
    replicas.close()
