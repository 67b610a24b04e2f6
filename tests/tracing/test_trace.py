"""Clock fit of two ranks, by the collectives that they have in common."""

import math

from hypothesis import given
from hypothesis import strategies as st

from mpistrat.tracing.trace import fit_clock

US = 1_000
MS = 1_000_000
S = 1_000_000_000

delays = st.integers(0, 50 * MS)
latencies = st.integers(1 * US, 300 * US)


@st.composite
def jobs(draw):
    """True times of the collectives of two ranks, and the clock of the second one."""
    now = draw(st.integers(0, 1000 * S))
    meetings = []
    for _ in range(draw(st.integers(3, 40))):
        came = [now + draw(delays), now + draw(delays)]
        knew = [max(came) + draw(latencies), max(came) + draw(latencies)]
        meetings.append(list(zip(came, knew, strict=True)))
        now = max(knew) + draw(st.integers(0, 3 * S))
    offset = draw(st.integers(-(10**6) * S, 10**6 * S))
    drift = draw(st.floats(-2e-6, 2e-6))
    return meetings, lambda time: round(time * (1 + drift)) + offset


@given(jobs())
def test_corrected_times_are_within_the_error(job):
    meetings, clock = job
    reference = {i: first for i, (first, _) in enumerate(meetings)}
    own = {i: (clock(a), clock(b)) for i, (_, (a, b)) in enumerate(meetings)}
    fit = fit_clock(reference, own, is_same=False)
    assert math.isfinite(fit.error_ns)
    start, end = meetings[0][0][0], meetings[-1][1][1]
    drift_ns = abs((clock(end) - end) - (clock(start) - start))
    truths = [clock(time) - time for _, (time, _) in meetings]
    errors = [
        abs(fit.offset_at(clock(time)) - truth)
        for (_, (time, _)), truth in zip(meetings, truths, strict=True)
    ]
    # Both learn of an agreement within the largest latency.
    assert max(errors) <= 300 * US + drift_ns
    assert min(errors) <= fit.error_ns + drift_ns


@given(st.lists(st.integers(0, 20), min_size=1), st.integers(0, 5 * MS))
def test_a_drift_is_followed(gaps_s, wobble):
    times = [sum(gaps_s[: i + 1]) * S + i * wobble for i in range(len(gaps_s))]
    reference = {i: (time, time + 10 * US) for i, time in enumerate(times)}
    drift = 50e-6
    own = {i: (round(a * (1 + drift)), round(b * (1 + drift))) for i, (a, b) in reference.items()}
    fit = fit_clock(reference, own, is_same=False)
    widest_ns = max(5 * S, (times[-1] - times[0]) / 64)
    for i, (came, _) in reference.items():
        corrected = own[i][0] - fit.offset_at(own[i][0])
        assert abs(corrected - came) <= drift * 2 * widest_ns + 10 * US


def test_ranks_of_one_node_read_one_clock():
    reference = {0: (0, 100), 1: (200, 300)}
    own = {0: (70, 101), 1: (210, 330)}
    fit = fit_clock(reference, own, is_same=True)
    assert (fit.offset_at(0), fit.offset_at(10**9), fit.error_ns) == (0, 0, 0)


def test_one_clock_that_cannot_be_one_is_corrected():
    reference = {0: (0, 100), 1: (200, 300)}
    own = {i: (a + 10**6, b + 10**6) for i, (a, b) in reference.items()}
    fit = fit_clock(reference, own, is_same=True)
    assert abs(fit.offset_at(10**6) - 10**6) <= fit.error_ns <= 100


def test_ranks_that_never_met_are_left_alone():
    fit = fit_clock({0: (0, 1)}, {1: (0, 1)}, is_same=False)
    assert fit.offset_at(5) == 0
    assert fit.error_ns == math.inf
