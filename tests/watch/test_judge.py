"""Judgement and cause: pure code on the states of ranks."""

import json

import pytest

from mpistrat.watch.cause import find_cause
from mpistrat.watch.hang_report import Report
from mpistrat.watch.judge import Job
from mpistrat.watch.rank_links import ANY, CLASSES, Call, History, Made, Place, Rank, Wait

WORLD = "0:world.0"
LONG_AGO_S, NOW_S = 0.0, 100.0


def rank(number, call=None, history=(), **changes):
    """Return a rank whose main thread is in `call`."""
    found = Rank(number, pid=1000 + number, has_state=True, in_world=True, changed_s=LONG_AGO_S)
    if call is not None:
        function, kind, *waits = call
        found.calls = (Call(found.pid, function, kind, tuple(waits)),)
    found.history = {WORLD: History(len(history), dict(enumerate(history, 1)))}
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def collective(number, function="MPI_Barrier", group=WORLD):
    return (function, "collective", Wait(function, "collective", group, number))


def receive(peer, tag=0):
    return ("MPI_Recv", "receive", Wait("MPI_Recv", "receive", WORLD, peer=peer, tag=tag))


def send(peer, tag=0):
    return ("MPI_Send", "send", Wait("MPI_Send", "send", WORLD, peer=peer, tag=tag))


FINALIZE = ("MPI_Finalize", "finalize")


def made(*functions, root=-1, size=-1):
    return [Made(each, root, size) for each in functions]


def job(*ranks):
    return Job(list(ranks), {WORLD: frozenset(range(len(ranks)))})


def cause_of(*ranks):
    found = job(*ranks)
    needs = found.stuck(NOW_S)
    return find_cause(found, needs) if needs else None


@pytest.mark.parametrize("size", [2, 3, 5])
def test_ranks_in_one_collective_are_left_to_the_library(size):
    ranks = [rank(i, collective(1), made("MPI_Barrier")) for i in range(size)]
    assert not job(*ranks).stuck(NOW_S)


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_rank_outside_mpi_may_always_come(size):
    ranks = [rank(i, collective(1), made("MPI_Barrier")) for i in range(size - 1)]
    late = rank(size - 1)
    assert not job(*ranks, late).stuck(NOW_S)
    assert job(*ranks, late).held_up_by_busy(NOW_S).keys() == set(range(size - 1))


@pytest.mark.parametrize("size", [3, 5])
def test_one_step_fewer(size):
    ranks = [rank(i, collective(2), made("MPI_Barrier", "MPI_Barrier")) for i in range(size - 1)]
    cause = cause_of(*ranks, rank(size - 1, FINALIZE, made("MPI_Barrier")))
    assert (cause.kind, cause.odd) == ("ended", {size - 1})


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"root": 1, "size": 8}, "different roots"),
        ({"root": 0, "size": 16}, "different lengths"),
    ],
)
def test_arguments_that_differ(changes, kind):
    ranks = [rank(i, collective(1, "MPI_Bcast"), made("MPI_Bcast", root=0, size=8)) for i in (0, 1)]
    cause = cause_of(*ranks, rank(2, collective(1, "MPI_Bcast"), made("MPI_Bcast", **changes)))
    assert (cause.kind, cause.odd) == (kind, {2})


def test_only_history_shows_a_rank_that_is_ahead():
    first = [rank(i, collective(1), made("MPI_Barrier")) for i in range(2)]
    cause = cause_of(*first, rank(2, collective(2), made("MPI_Bcast", "MPI_Barrier")))
    assert (cause.kind, cause.odd) == ("different collectives", {2})
    assert "call 1 of the communicator" in cause.sentence


def test_messages_that_fit_are_at_work():
    assert not job(rank(0, send(1, 4)), rank(1, receive(0, 4))).stuck(NOW_S)
    assert not job(rank(0, send(1, 4)), rank(1, receive(ANY, ANY))).stuck(NOW_S)
    assert cause_of(rank(0, send(1, 4)), rank(1, receive(0, 5))).kind == "unmatched message"
    assert cause_of(rank(0, send(1)), rank(1, send(0))).kind == "cycle"


def test_a_pending_receive_serves_a_send():
    wanted = Wait("MPI_Irecv", "ireceive", WORLD, peer=0, tag=4)
    other = rank(1, collective(1), made("MPI_Barrier"), pending=(wanted,))
    assert not job(rank(0, send(1, 4)), other).stuck(NOW_S)


def test_one_of_several_requests_may_be_done():
    """Rank 0 may have what rank 1 sent, and waits for rank 2, which computes."""
    waits = [Wait("MPI_Irecv", "ireceive", WORLD, peer=peer) for peer in (1, 2)]
    found = job(rank(0, ("MPI_Waitall", "wait", *waits)), rank(1, receive(0)), rank(2))
    assert not found.stuck(NOW_S)


@pytest.mark.parametrize("state", ["is_stopped", "left", "lost_s"])
def test_ranks_that_never_come(state):
    value = {"is_stopped": True, "left": ("left", 0), "lost_s": 1.0}[state]
    gone = rank(2, **{state: value, "is_first_lost": True})
    ranks = [rank(i, collective(1), made("MPI_Barrier")) for i in range(2)]
    cause = cause_of(*ranks, gone)
    assert cause.kind == {"is_stopped": "stopped", "left": "ended", "lost_s": "died"}[state]
    assert cause.odd == {2}


def test_a_request_that_is_not_known_proves_nothing():
    assert not job(rank(0, ("MPI_Wait", "wait", None)), rank(1, FINALIZE)).stuck(NOW_S)


def test_a_thread_that_may_go_on_saves_its_rank():
    both = rank(0, collective(1), made("MPI_Barrier"))
    both.calls += (Call(7, "MPI_Recv", "receive", (receive(1)[2],)),)
    other = rank(1, FINALIZE)
    assert job(both, other).stuck(NOW_S)
    other.calls += (Call(8, "MPI_Send", "send", (send(0)[2],)),)
    assert not job(both, other).stuck(NOW_S)


@pytest.mark.parametrize("size", [3, 1000])
def test_the_report_has_each_rank_once_and_40_lines_at_most(size):
    ranks = [
        rank(
            i,
            collective(1),
            made("MPI_Barrier"),
            lines={1000 + i: Place("a.py", i, "comm.Barrier")},
        )
        for i in range(size - 1)
    ]
    found = job(*ranks, rank(size - 1, FINALIZE, is_at_end=True))
    needs = found.stuck(NOW_S)
    report = Report(find_cause(found, needs), found.ranks, frozenset(needs), 30.0, True)
    text = report.text()
    assert len(text.splitlines()) <= 40
    assert f"ranks 0-{size - 1} of {size}" in text.splitlines()[0]
    assert "MPI_Finalize)  <- odd" in text
    values = json.loads(json.dumps(report.json()))
    assert sorted(r for group in values["groups"] for r in group["ranks"]) == list(range(size))
    assert values["odd"] == [size - 1]
    assert values["kind"] == "ended"


def test_classes_are_those_of_the_recorder():
    from pathlib import Path

    import mpistrat

    header = Path(mpistrat.__file__).parent / "native" / "recorder" / "recorder.h"
    names = header.read_text().split("enum class_of_function {")[1].split("}")[0]
    assert len(names.split(",")) == len(CLASSES)
