"""The time of ranks, added up from made-up events."""

import pytest

from mpistrat.cli.rank_times import find_straggler, summarize


def span(rank, category, ts, dur, number=None):
    args = {} if number is None else {"channel": "ranks 0-2", "number": number}
    return {"ph": "X", "cat": category, "name": category, "ts": ts, "dur": dur, "pid": rank,
            "tid": 0, "args": args}  # fmt: skip


def of_rank(rank, wait, move=20):
    """Compute, wait and move up to 1000 us; then a checkpoint of 500 us, waiting within."""
    came = 1000 - wait - move
    return [
        span(rank, "run", 0, 1000),
        span(rank, "data", 0, 10),
        span(rank, "collective", came, wait + move, 0),
        span(rank, "wait", came, wait, 0),
        span(rank, "move", came + wait, move, 0),
        span(rank, "checkpoint", 1000, 500),
        span(rank, "wait", 1100, 300 if rank else 0, 1),
    ]


def test_each_moment_counts_once():
    waits = {0: 400, 1: 5, 2: 300}
    events = [each for rank, wait in waits.items() for each in of_rank(rank, wait)]
    times = summarize([{"ph": "M", "pid": 0, "name": "process_name"}, *events])
    assert [each.rank for each in times] == [0, 1, 2]
    for each in times:
        assert each.total_s == pytest.approx(1500e-6)
        assert sum(each.seconds.values()) == pytest.approx(each.total_s)
        assert each.seconds["waiting for ranks"] == pytest.approx(waits[each.rank] * 1e-6)
        assert each.seconds["moving data"] == pytest.approx(20e-6)
        assert each.seconds["waiting for data"] == pytest.approx(10e-6)
        assert each.seconds["checkpoints"] == pytest.approx(500e-6)
        assert each.seconds["computing"] == pytest.approx((970 - waits[each.rank]) * 1e-6)


@pytest.mark.parametrize("slow", range(3))
def test_the_rank_that_comes_last_is_the_straggler(slow):
    events = [each for rank in range(3) for each in of_rank(rank, 5 if rank == slow else 400)]
    times = summarize(events)
    straggler = find_straggler(times)
    assert straggler.rank == slow
    # Both of the others wait 395 us longer; what they wait within a checkpoint is another matter.
    assert straggler.others_waited_s == pytest.approx(790e-6)
    assert straggler.cause == "computing"
    assert straggler.longer_s == pytest.approx(395e-6)
    assert [each.times_last for each in times] == [int(rank == slow) for rank in range(3)]


def test_a_rank_alone_is_no_straggler():
    assert find_straggler(summarize(of_rank(0, 100))) is None
    assert find_straggler([]) is None


def test_what_reads_its_data_slowly():
    events = [
        *(span(rank, "data", 0, 900 if rank == 1 else 100) for rank in range(3)),
        *(span(rank, "wait", 900 if rank == 1 else 100, 1 if rank == 1 else 801, 7)
          for rank in range(3)),
    ]  # fmt: skip
    straggler = find_straggler(summarize(events))
    assert (straggler.rank, straggler.cause) == (1, "waiting for data")
    assert straggler.longer_s == pytest.approx(800e-6)
