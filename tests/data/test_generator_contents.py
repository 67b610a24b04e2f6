"""Generators that give other elements on other ranks: every rank warns at the end of the pass."""

import itertools
import warnings

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import user_warnings
from mpistrat.errors import ScopeWarning

Dataset = ms.data.Dataset
SPEC = ms.data.ArraySpec((), "float64")


@pytest.fixture(autouse=True)
def _nothing_given_yet(monkeypatch):
    monkeypatch.setattr(user_warnings, "_given", set())


def warnings_of(strategy, dataset):
    """Return the warnings of two passes."""
    batches = strategy.distribute_dataset(dataset)
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", ScopeWarning)
        for _ in range(2):
            for _ in batches:
                pass
    return [str(each.message) for each in given if issubclass(each.category, ScopeWarning)]


def of_rank(rank):
    return Dataset.from_generator(lambda: np.arange(12.0) + rank, SPEC)


DIFFERENT = {
    "plain": lambda rank: of_rank(rank).batch(6),
    "mapped": lambda rank: of_rank(rank).map(lambda x: 2 * x).batch(6).prefetch(2),
    "taken": lambda rank: of_rank(rank).take(7).batch(2),
    "endless": lambda rank: (
        Dataset.from_generator(lambda: itertools.count(float(rank)), SPEC).take(6).batch(6)
    ),
    "below zip": lambda rank: Dataset.zip((of_rank(0), of_rank(rank))).map(lambda a, b: b).batch(6),
}


@pytest.mark.parametrize("kind", DIFFERENT)
def test_every_rank_warns_of_different_elements(strategy, size, kind):
    texts = warnings_of(strategy, DIFFERENT[kind](strategy.rank))
    assert len(texts) == (size > 1)
    for text in texts:
        assert "returned different elements on rank 0 and rank 1" in text
        assert "distribute_datasets_from_function" in text


@pytest.mark.parametrize("kind", DIFFERENT)
def test_no_rank_warns_of_equal_elements(strategy, kind):
    assert warnings_of(strategy, DIFFERENT[kind](3)) == []


def test_elements_of_one_rank_from_a_function_may_differ(strategy, rank):
    def make(context):
        return of_rank(context.input_pipeline_id).batch(2)

    with warnings.catch_warnings():
        warnings.simplefilter("error", ScopeWarning)
        assert len(list(strategy.distribute_datasets_from_function(make))) == 6
