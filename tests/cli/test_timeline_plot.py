"""Strips of `mpistrat timeline --plot`: which ranks share one, their order, and what they show."""

import numpy as np
import pytest

from mpistrat.cli.rank_times import CATEGORIES, COMPUTING, segments, summarize
from mpistrat.cli.timeline_plot import fold


def span(rank, category, ts, dur, number=None):
    args = {} if number is None else {"channel": "all", "number": number}
    return {"ph": "X", "cat": category, "name": category, "ts": ts, "dur": dur, "pid": rank,
            "tid": 0, "args": args}  # fmt: skip


def steps(rank, computing_us, num_steps=10, period_us=1000):
    """Return spans of a rank that computes so long in each step, and waits for the rest."""
    return [
        span(rank, "wait", number * period_us + computing_us, period_us - computing_us, number)
        for number in range(num_steps)
    ] + [span(rank, "run", 0, num_steps * period_us)]


def folded(computing_us):
    of_ranks = {rank: steps(rank, us) for rank, us in enumerate(computing_us)}
    return fold(of_ranks, summarize([each for spans in of_ranks.values() for each in spans]))


def test_like_ranks_share_a_strip_and_the_slowest_is_on_top():
    strips = folded([300] * 37 + [990] + [300] * 18 + [600] * 200)
    assert [strip.label for strip in strips] == [
        "rank 37",
        "ranks 56-255 (200)",
        "ranks 0-36, 38-55 (55)",
    ]
    waited = [strip.others_waited_s for strip in strips]
    assert waited[0] > 0
    assert waited[1:] == [0, 0]


def test_256_different_ranks_fit_on_a_page_and_the_slowest_stays_alone():
    rng = np.random.default_rng(0)
    strips = folded([*rng.integers(100, 900, 255), 980])
    assert strips[0].ranks == [255]
    assert len(strips) <= 16
    assert sorted(rank for strip in strips for rank in strip.ranks) == list(range(256))
    assert all(len(strip.label) <= 40 for strip in strips)


@pytest.mark.parametrize("num_steps", [10, 1000])
def test_a_strip_shows_the_share_of_each_category(num_steps):
    spans = steps(0, 250, num_steps)
    (strip,) = fold({0: spans}, summarize(spans))
    shares = dict(
        zip((COMPUTING, "move", "data", "save", "wait"), strip.shares.mean(0), strict=True)
    )
    assert shares[COMPUTING] == pytest.approx(0.25, abs=1e-6)
    assert shares["wait"] == pytest.approx(0.75, abs=1e-6)
    assert strip.shares.sum(axis=1) == pytest.approx(1)


def test_segments_have_no_gaps_and_count_each_moment_once():
    spans = [span(0, "data", 0, 10), span(0, "wait", 5, 10), span(0, "run", 0, 30)]
    assert list(segments(spans)) == [
        (0, 5, CATEGORIES["data"]),
        (5, 10, CATEGORIES["data"]),
        (10, 15, CATEGORIES["wait"]),
        (15, 30, COMPUTING),
    ]
