"""The cost model: it finds the constants that made-up times were made from."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tools.scaling.benchmark import predictions, rank_counts
from tools.scaling.model import TERMS, Constants, fit
from tools.scaling.work import COLLECTIVES, Work, all_reduce, package_all_reduce

PRICES = st.tuples(
    st.floats(1e-6, 1e-4),  # a call
    st.floats(1e-7, 1e-5),  # a message
    *[st.floats(1e-11, 1e-9)] * 2,  # a byte sent, reduced
)
SIZES = (8, 2**10, 2**16, 2**20, 2**24)


def works():
    for num_bytes in SIZES:
        yield Work(messages=2, bytes_sent=2 * num_bytes)
        yield Work(bytes_reduced=num_bytes)
        for num_ranks in (2, 4, 7):
            yield all_reduce(num_ranks, num_bytes)
            yield package_all_reduce(num_ranks, num_bytes)


@given(PRICES)
def test_known_constants_are_found_again(prices):
    constants = Constants(*prices)
    found = fit([(work, constants.predict_s(work)) for work in works()])
    assert dataclasses.astuple(found.constants) == pytest.approx(prices, rel=1e-3)
    assert found.relative_error < 1e-6


def test_noise_shows_in_the_error_and_moves_the_constants_little():
    prices = (2e-5, 1e-6, 1e-10, 2e-10)
    rng = np.random.default_rng(0)
    constants = Constants(*prices)
    samples = [
        (work, constants.predict_s(work) * (1 + 0.05 * rng.standard_normal()))
        for work in [*works()] * 5
    ]
    found = fit(samples)
    assert dataclasses.astuple(found.constants) == pytest.approx(prices, rel=0.2)
    assert 0.03 < found.relative_error < 0.07
    assert found.num_samples == len(samples)


def test_no_constant_is_negative():
    # Cheaper where more is sent: the free solution would have a negative price.
    samples = [(Work(1, 1, 10, 10), 1.0), (Work(1, 1, 20, 10), 0.5)]
    found = fit(samples)
    assert all(price >= 0 for price in dataclasses.astuple(found.constants))
    assert found.constants.sent_s_per_byte == 0


def test_a_price_that_no_sample_determines_is_named():
    with pytest.raises(ValueError, match="messages, bytes_sent.*Measure an operation"):
        fit([(Work(calls=1, bytes_reduced=1), 1.0)])


@pytest.mark.parametrize("times", [[], [0.0], [-1.0]])
def test_times_must_be_positive(times):
    with pytest.raises(ValueError, match="positive times"):
        fit([(Work(1, 1, 1, 1), seconds) for seconds in times])


def test_the_terms_add_up_and_the_longest_rules():
    constants = Constants(0, 2e-6, 1e-9, 1e-10)
    short, long = package_all_reduce(1024, 8), package_all_reduce(1024, 2**26)
    assert constants.ruling_term(short) == "latency"
    assert constants.ruling_term(long) == "bandwidth"
    for work in (short, long):
        assert sum(constants.terms(work).values()) == constants.predict_s(work)


@pytest.mark.parametrize("has_network", [False, True])
def test_predictions_name_every_term(has_network):
    rows = predictions(Constants(2e-5, 1e-6, 1e-10, 2e-10), has_network)
    links = ["as measured"] if has_network else ["as measured", "assumed network"]
    assert sorted({row["links"] for row in rows}) == links
    assert {row["num_nodes"] for row in rows} == {64, 1024}
    for row in rows:
        terms = {term: row[f"{term}_s"] for term in TERMS}
        assert sum(terms.values()) == pytest.approx(row["predicted_s"])
        assert max(terms, key=terms.get) == row["rules"]


@pytest.mark.parametrize("name", COLLECTIVES)
def test_one_rank_sends_no_message_to_itself_by_a_collective(name):
    if name.endswith(("end", "recv")):
        assert COLLECTIVES[name](1, 100) == Work(messages=1, bytes_sent=100)
        return
    for num_bytes in (8, 2**20):
        work = COLLECTIVES[name](1, num_bytes)
        assert (work.messages, work.bytes_sent) == (0, 0)


@given(st.integers(0, 10), st.integers(1, 2**30))
def test_all_reduce_on_powers_of_two(exponent, num_bytes):
    num_ranks = 2**exponent
    work = all_reduce(num_ranks, num_bytes)
    if num_bytes <= 2048:
        assert work == Work(0, exponent, exponent * num_bytes, exponent * num_bytes)
    else:
        share = num_bytes * (num_ranks - 1) / num_ranks
        assert work == Work(0, 2 * exponent, 2 * share, share)


@given(st.integers(2, 3000), st.sampled_from(sorted(COLLECTIVES)), st.integers(1, 2**24))
def test_more_ranks_never_send_less(num_ranks, name, num_bytes):
    cost = COLLECTIVES[name]
    fewer = cost(1 << (num_ranks.bit_length() - 1), num_bytes)
    assert cost(num_ranks, num_bytes).messages >= fewer.messages
    assert cost(num_ranks, num_bytes).bytes_sent >= fewer.bytes_sent


@given(st.integers(1, 10_000))
def test_rank_counts_double_up_to_the_size(size):
    counts = rank_counts(size)
    assert counts[-1] == size
    assert counts == sorted(set(counts))
    assert all(math.log2(count).is_integer() for count in counts[:-1])
    assert len(counts) == math.ceil(math.log2(size)) + 1
