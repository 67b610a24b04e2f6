"""Verdict: when a hang is reported, and what must be certain before; pure code on states."""

from dataclasses import replace

import pytest

from mpistrat.settings import settings
from mpistrat.watch.judge import Job
from mpistrat.watch.rank_links import Call, History, Made, Rank, Wait
from mpistrat.watch.verdict import Verdict

WORLD = "0:world.0"
CHANNEL = "3:steps"
AFTER_S, BUSY_S = 30.0, 300.0


def verdict(**changes):
    """Return a verdict, and the numbers of the questions that it asks."""
    questions = []
    limits = replace(
        settings(), watch_after_s=AFTER_S, watch_busy_after_s=BUSY_S, watch_report_only=False
    )
    return Verdict(replace(limits, **changes), questions.append), questions


def rank(number, call=None, **changes):
    """Return a rank that is connected, and has stood in `call` since 0 s."""
    found = Rank(number, pid=1000 + number, has_state=True, in_world=True, is_connected=True)
    found.version = found.history_version = found.lines_version = 1
    found.history = {WORLD: History(1, {1: Made("MPI_Barrier", -1, -1)})}
    if call is not None:
        found.calls = (replace(call, thread=found.pid),)
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def barrier(number):
    wait = Wait("MPI_Barrier", "collective", WORLD, number)
    return Call(0, "MPI_Barrier", "collective", (wait,))


def agreement(number, limit_s=None):
    wait = Wait("agreement on reduce", "collective", CHANNEL, number)
    return Call(0, wait.function, "agreement", (wait,), limit_s)


def members(ranks):
    return dict.fromkeys((WORLD, CHANNEL), frozenset(range(len(ranks))))


def left_behind(size):
    """Return ranks of which the last has left the program, and the others wait for it."""
    ranks = [rank(i, barrier(2)) for i in range(size - 1)]
    return [*ranks, rank(size - 1, left=("left", 0), is_connected=False)]


def look(found, ranks, now_s):
    return found.look(ranks, members(ranks), now_s)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_nothing_is_said_before_the_limit_and_before_all_have_answered(size):
    found, questions = verdict()
    ranks = left_behind(size)
    assert look(found, ranks, AFTER_S - 1) is None
    assert questions == []
    assert look(found, ranks, AFTER_S) is None
    assert questions == [1]
    for each in ranks[:-1]:
        assert look(found, ranks, AFTER_S + 1) is None
        each.answer = 1
    report = look(found, ranks, AFTER_S + 1)
    assert report.cause.kind == "ended"
    assert report.ends_job


def test_a_rank_that_answers_that_it_has_moved_takes_the_report_back():
    found, questions = verdict()
    ranks = left_behind(2)
    look(found, ranks, AFTER_S)
    ranks[0].changed_s, ranks[0].answer = AFTER_S, 1
    assert look(found, ranks, AFTER_S + 1) is None
    # It stands still again: all are asked again.
    assert look(found, ranks, 2 * AFTER_S) is None
    assert questions == [1, 2]


def test_ranks_that_do_not_answer_delay_the_report_ten_seconds():
    found, _ = verdict()
    ranks = left_behind(2)
    look(found, ranks, AFTER_S)
    assert look(found, ranks, AFTER_S + 9.9) is None
    assert look(found, ranks, AFTER_S + 10.1) is not None


@pytest.mark.parametrize("what", ["is_stopped", "is_bare"])
def test_nobody_waits_for_the_answer_of_a_rank_that_cannot_give_one(what):
    found, _ = verdict()
    ranks = [*left_behind(3), rank(3, barrier(2), **{what: True})]
    look(found, ranks, AFTER_S)
    ranks[0].answer = ranks[1].answer = 1
    assert look(found, ranks, AFTER_S + 1) is not None


def test_lines_of_an_earlier_call_are_waited_for():
    found, _ = verdict()
    ranks = left_behind(2)
    ranks[0].answer, ranks[0].lines_version = 1, 0
    look(found, ranks, AFTER_S)
    assert look(found, ranks, AFTER_S + 2) is None
    assert look(found, ranks, AFTER_S + 3) is not None


def test_a_history_of_an_earlier_call_proves_nothing():
    found, questions = verdict()
    ranks = left_behind(2)
    ranks[0].history_version = 0
    assert look(found, ranks, 100 * AFTER_S) is None
    assert questions == []


def test_a_death_is_told_once_and_before_the_limit():
    found, _ = verdict()
    ranks = [rank(0, barrier(2)), rank(1, lost_s=1.0, is_first_lost=True, is_connected=False)]
    assert look(found, ranks, 1.9) is None
    report = look(found, ranks, 2.1)
    assert report.cause.kind == "died"
    assert not report.ends_job
    assert look(found, ranks, 3) is None


def test_ranks_in_a_debugger_may_stand_still():
    found, questions = verdict()
    ranks = left_behind(3)
    ranks[1].tracer = 77
    assert look(found, ranks, 100 * AFTER_S) is None
    assert questions == []


def test_before_the_first_rank_has_come_nothing_is_said():
    found, questions = verdict()
    assert found.look([], {}, 100 * BUSY_S) is None
    assert questions == []


def disagreeing(limit_s):
    """Return two ranks in an agreement, and one that has made fewer and waits in a barrier."""
    ranks = [rank(i, agreement(2, limit_s), agreed={CHANNEL: History(2, {})}) for i in range(2)]
    return [*ranks, rank(2, barrier(2), agreed={CHANNEL: History(1, {})})]


def test_an_agreement_ends_by_its_own_limit_first():
    found, questions = verdict()
    ranks = disagreeing(60.0)
    assert look(found, ranks, 60 + 9.9) is None
    assert questions == []
    look(found, ranks, 60 + 10.1)
    assert questions == [1]


def test_an_agreement_without_a_limit_is_judged_as_a_collective():
    found, questions = verdict()
    ranks = disagreeing(None)
    look(found, ranks, AFTER_S)
    assert questions == [1]
    for each in ranks:
        each.answer = 1
    report = look(found, ranks, AFTER_S + 1)
    assert report.stuck == {0, 1, 2}


def test_an_agreement_that_all_have_made_is_at_work():
    ranks = [rank(i, agreement(2), agreed={CHANNEL: History(2, {})}) for i in range(3)]
    assert not Job(ranks, members(ranks)).stuck(1000.0)


def partitioned(is_open):
    wait = Wait("MPI_Wait", "isend", WORLD, peer=1, tag=4, is_open=is_open)
    return Call(0, "MPI_Wait", "wait", (wait,))


def test_only_the_program_can_fill_partitions():
    """A fitting receive does not help a send whose partitions are not all ready."""
    wanted = Wait("MPI_Wait", "ireceive", WORLD, peer=0, tag=4)
    receive = Call(0, "MPI_Wait", "wait", (wanted,))
    assert not Job([rank(0, partitioned(False)), rank(1, receive)], members("ab")).stuck(1000.0)
    assert Job([rank(0, partitioned(True)), rank(1, receive)], members("ab")).stuck(1000.0)


def test_a_persistent_request_that_is_not_started_needs_nothing():
    waits_for_none = Call(0, "MPI_Wait", "wait", ())
    assert not Job([rank(0, waits_for_none), rank(1, barrier(2))], members("ab")).stuck(1000.0)


def test_a_rank_that_computes_is_named_after_the_longer_limit():
    found, questions = verdict()
    ranks = [rank(0, barrier(2)), rank(1)]
    assert look(found, ranks, BUSY_S - 1) is None
    assert questions == []
    look(found, ranks, BUSY_S)
    ranks[0].answer = ranks[1].answer = 1
    assert look(found, ranks, BUSY_S + 1).cause.kind == "busy"


def test_without_a_longer_limit_ranks_may_compute_for_ever():
    found, _ = verdict(watch_busy_after_s=None)
    assert look(found, [rank(0, barrier(2)), rank(1)], 1000 * BUSY_S) is None


def test_where_calls_cannot_be_seen_only_lines_count():
    found, _ = verdict()
    ranks = [rank(i, is_bare=True) for i in range(2)]
    assert look(found, ranks, BUSY_S - 1) is None
    report = look(found, ranks, BUSY_S)
    assert report.cause.kind == "busy"
    assert "cannot be seen" in report.note


def test_a_job_that_is_only_reported_goes_on():
    found, _ = verdict(watch_report_only=True)
    ranks = left_behind(2)
    ranks[0].answer = 1
    look(found, ranks, AFTER_S)
    assert not look(found, ranks, AFTER_S + 1).ends_job
