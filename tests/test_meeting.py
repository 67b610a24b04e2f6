"""Meetings without ranks: turns, errors, and the threads that carry members."""

import gc
import itertools
import threading

import pytest

from mpistrat.meeting import Meeting


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

    def not_met(members):
        return LookupError(f"{sum(each.request is None for each in members)} have ended")

    return Meeting(turns, not_met), turns


def carriers():
    return [each for each in threading.enumerate() if each.name.startswith("mpistrat-replica-")]


def total(given):
    return [sum(given)] * len(given)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_members_take_turns_and_meet(size):
    meeting, turns = make()
    results = meeting.run([lambda n=n: meeting.meet("sum", n, total) for n in range(size)])
    assert results == [size * (size - 1) // 2] * size
    # Each until it meets, then what they have met for, then each to its end.
    assert [turn for turn, _ in itertools.groupby(turns.all)] == [*range(size), None, *range(size)]
    assert not meeting.is_busy
    meeting.close()


def test_threads_are_kept_and_end_with_the_meeting():
    others = carriers()  # of strategies of other tests: they may end meanwhile
    meeting, _ = make()
    for _ in range(3):
        meeting.run([threading.get_ident] * 4)
        threads = [each for each in carriers() if each not in others]
        assert len(threads) == 3
    names = meeting.run([threading.get_ident] * 4)
    assert names == meeting.run([threading.get_ident] * 4)
    assert names[0] == threading.get_ident()
    del meeting, _  # nobody has closed it
    gc.collect()
    for each in threads:
        each.join(10)
        assert not each.is_alive()


def test_threads_that_the_system_refuses(monkeypatch):
    meeting, _ = make()
    start = threading.Thread.start
    allowed = [True, False]

    def refuse(thread):
        if not allowed.pop(0):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match=r"4 replicas, which need 3 threads, .* gives 1 \(can't"):
        meeting.run([int] * 4)
    assert not meeting.is_busy
    monkeypatch.undo()
    assert meeting.run([int] * 4) == [0] * 4
    meeting.close()


class Stopped(BaseException):
    """No `Exception`."""


@pytest.mark.parametrize("error", [ValueError, Stopped, SystemExit, StopIteration, GeneratorExit])
@pytest.mark.parametrize("guilty", [0, 1, 3])
@pytest.mark.parametrize("phase", [0, 1, 2])
def test_an_error_of_one_ends_all(error, guilty, phase):
    meeting, _ = make()
    raised, begun, ended, caught = error("mine"), [], [], []

    def member(number):
        begun.append(number)
        try:
            for each in range(3):
                if (number, each) == (guilty, phase):
                    raise raised
                meeting.meet("sum", 1, total)
        except Exception as found:
            if found is not raised:
                caught.append(found)
            raise
        finally:
            ended.append(number)

    with pytest.raises(error) as found:
        meeting.run([lambda n=n: member(n) for n in range(4)])
    assert found.value is raised
    assert sorted(begun) == sorted(ended) == list(range(guilty + 1 if phase == 0 else 4))
    assert caught == []
    assert meeting.run([int] * 4) == [0] * 4
    meeting.close()


def test_a_member_that_swallows_its_end():
    meeting, _ = make()

    def stubborn():
        while True:
            try:
                return meeting.meet("sum", 1, total)
            except BaseException as error:
                if isinstance(error, RuntimeError):  # a ContextError
                    return None

    def fails():
        raise KeyError("mine")

    with pytest.raises(KeyError):
        meeting.run([stubborn, fails])
    assert meeting.run([int] * 2) == [0] * 2
    meeting.close()


def test_members_that_meet_a_different_number_of_times():
    meeting, _ = make()

    def member(number):
        for _ in range(2 if number == 1 else 1):
            meeting.meet("sum", 1, total)

    with pytest.raises(LookupError, match="2 have ended"):
        meeting.run([lambda n=n: member(n) for n in range(3)])
    meeting.close()
