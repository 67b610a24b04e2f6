"""Errors that are ignored: the same elements are left out at any number of ranks."""

import logging

import numpy as np
import pytest

from mpistrat.data import Dataset
from mpistrat.errors import DataError, EpochError

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


def test_rank_0_names_what_is_left_out(strategy, rank, caplog):
    with caplog.at_level(logging.WARNING, "mpistrat"):
        data = Dataset.range(NUM).map(decode).ignore_errors().batch(6)
        strategy.experimental_distribute_dataset(data)
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
    with pytest.raises((OSError, DataError, EpochError)):
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
