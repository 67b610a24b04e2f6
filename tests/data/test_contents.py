"""Contents of arrays, compared when a dataset is distributed, and datasets without a batch."""

import warnings

import numpy as np
import pytest

from mpistrat.data import AutoShardPolicy, Dataset
from mpistrat.errors import DataError, ScopeWarning

TEXTS = np.array(["a", "b", "c", "d"])


def sources(rank):
    """Return datasets whose contents depend on `rank`, by what they are made of."""
    own = np.arange(8.0)
    own[-1] += rank
    return {
        "array": lambda: Dataset.from_arrays(own),
        "list of a dict": lambda: Dataset.from_arrays({"x": np.arange(8), "y": own}),
        "bytes": lambda: Dataset.from_arrays(np.array([b"a", b"b"] if rank else [b"a", b"c"])),
        "text": lambda: Dataset.from_arrays(TEXTS if rank else TEXTS[::-1]),
        "fields": lambda: Dataset.from_arrays(np.array([(1, rank)], [("a", "i1"), ("b", "i8")])),
        "mapped": lambda: Dataset.from_arrays(own).map(lambda x: x).shuffle(seed=1),
        "zip": lambda: Dataset.zip((Dataset.from_arrays(np.arange(8)), Dataset.from_arrays(own))),
        "concatenate": lambda: Dataset.range(8).map(float).concatenate(Dataset.from_arrays(own)),
        "cached": lambda: Dataset.from_arrays(own).cache(),
        "filtered": lambda: Dataset.from_arrays(own).filter(lambda x: x >= 0),
    }


@pytest.mark.parametrize("kind", sources(0))
@pytest.mark.parametrize("policy", [AutoShardPolicy.AUTO, AutoShardPolicy.OFF])
def test_contents_that_differ_are_refused_on_every_rank(strategy, rank, size, kind, policy):
    def distribute(which):
        dataset = sources(which)[kind]().batch(4).with_options(auto_shard_policy=policy)
        return strategy.distribute_dataset(dataset)

    assert [distribute(1) for _ in range(2)]
    if size > 1:
        with pytest.raises(DataError, match="contents with digest"):
            distribute(min(rank, 1))
    assert distribute(0) is not None  # the strategy is still usable


def test_data_of_each_ranks_own_come_from_a_function(strategy, rank):
    batches = strategy.distribute_datasets_from_function(
        lambda context: Dataset.from_arrays(np.full(2, float(rank))).batch(2)
    )
    for batch in batches:
        assert np.asarray(batch).tolist() == [rank] * 2


EMPTY = {
    "remainder": lambda: Dataset.range(3).batch(100, drop_remainder=True),
    "filter": lambda: Dataset.range(3).filter(lambda x: x < 0).batch(2),
    "take": lambda: Dataset.range(3).take(0).batch(2),
}


@pytest.mark.parametrize("kind", EMPTY)
@pytest.mark.parametrize("is_own", [False, True])
def test_a_dataset_without_a_batch_warns_once(strategy, size, kind, is_own):
    if is_own:
        batches = strategy.distribute_datasets_from_function(lambda context: EMPTY[kind]())
    else:
        batches = strategy.distribute_dataset(EMPTY[kind]())
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always", ScopeWarning)
        for _ in range(2):
            for _ in batches:
                raise AssertionError("there is a batch")
    assert [each.category for each in given] == [ScopeWarning] * (size > 1)
    assert all("has no batch at all" in str(each.message) for each in given)


def test_a_pass_that_was_restored_at_its_end_does_not_warn(strategy):
    batches = strategy.distribute_dataset(Dataset.range(4).batch(4))
    assert len(list(batches)) == 1
    assert len(list(batches)) == 1
