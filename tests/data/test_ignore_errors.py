"""Errors that are ignored: the same elements are left out at any number of ranks."""

import logging

import numpy as np
import pytest

from mpistrat.data import Dataset
from mpistrat.errors import CollectiveError, DataError

NUM = 41
BROKEN = {0, 7, 8, 23, 40}


def decode(x):
    if int(x) in BROKEN:
        raise OSError(f"image {int(x)} is truncated")
    return np.full(3, x)


@pytest.mark.parametrize("is_cached", [False, True])
def test_batches_are_full_and_the_same_at_any_number_of_ranks(strategy, size, is_cached):
    data = Dataset.range(NUM).map(decode, num_parallel_calls=2)
    data = (data.cache() if is_cached else data).ignore_errors(log_warning=False)
    batches = strategy.experimental_distribute_dataset(data.shuffle(3).batch(6))
    assert batches.cardinality() == NUM // 6
    for _ in range(2):
        found = [strategy.gather(batch, axis=0)[:, 0].tolist() for batch in batches]
        assert [len(each) for each in found] == [6] * 6
        assert sorted(n for each in found for n in each) == sorted(set(range(NUM)) - BROKEN)


@pytest.mark.parametrize("is_cached", [False, True])
def test_rank_0_names_what_is_left_out(strategy, rank, caplog, is_cached):
    with caplog.at_level(logging.WARNING, "mpistrat"):
        data = Dataset.range(NUM).map(decode).ignore_errors()
        data = data.cache("1 MiB") if is_cached else data
        strategy.experimental_distribute_dataset(data.batch(6))
    texts = [each.getMessage() for each in caplog.records if "ignore_errors" in each.getMessage()]
    assert len(texts) == (rank == 0)
    for text in texts:
        assert "5 of 41" in text
        assert "element 7 (OSError: image 7 is truncated)" in text


def test_nothing_is_logged_where_all_is_well(caplog):
    with caplog.at_level(logging.WARNING, "mpistrat"):
        assert len(list(Dataset.range(5).map(lambda x: x).ignore_errors())) == 5
    assert not caplog.records


def test_later_errors_are_raised(strategy, size):
    data = Dataset.range(NUM).ignore_errors().map(decode).batch(2)
    with pytest.raises((OSError, DataError, CollectiveError)):
        for batch in strategy.experimental_distribute_dataset(data.skip(3)):
            strategy.gather(batch, axis=0)


def test_where_it_does_not_go():
    with pytest.raises(ValueError, match="before batch"):
        Dataset.range(4).batch(2).ignore_errors()
    with pytest.raises(TypeError, match="log_warning"):
        Dataset.range(4).ignore_errors(log_warning=1)


def test_no_element_can_be_made():
    def fail(x):
        raise ValueError("never")

    assert list(Dataset.range(3).map(fail).ignore_errors(log_warning=False)) == []


@pytest.mark.parametrize("method", ["cache", "ignore_errors"])
@pytest.mark.parametrize("batch", ["batch", "padded_batch", "ragged_batch"])
@pytest.mark.parametrize("num_examples", [1, 3])
def test_no_rank_has_an_element(strategy, method, batch, num_examples):
    data = Dataset.range(num_examples).map(lambda x: decode(x * 0))
    data = data.cache("1 MiB") if method == "cache" else data
    data = data.ignore_errors(log_warning=False).cache("1 MiB").shuffle(0)
    batches = strategy.experimental_distribute_dataset(getattr(data, batch)(4))
    assert batches.cardinality() == 0
    assert list(batches) == []


@pytest.mark.parametrize("batch", ["batch", "padded_batch", "ragged_batch"])
def test_some_ranks_get_nothing_after_a_data_set_without_elements(strategy, batch):
    nothing = Dataset.range(3).filter(lambda x: False).map(lambda x: x + 1)
    for data in (nothing.concatenate(Dataset.range(3)), Dataset.range(3).concatenate(nothing)):
        batches = strategy.experimental_distribute_dataset(getattr(data, batch)(1))
        assert [strategy.gather(each, axis=0).tolist() for each in batches] == [[0], [1], [2]]


def test_elements_that_other_passes_do_not_have_are_refused_by_name():
    with pytest.raises(ValueError, match="^ignore_errors is evaluated once for all epochs"):
        list(Dataset.range(8).sample(np.ones(8)).ignore_errors().batch(2))
