"""Filters on ranks: evaluated together and once, agreed, and refused on all where one fails."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.errors import DataError
from mpistrat.values import localize
from tests import devices


def test_each_rank_evaluates_a_share_once(strategy, rank, size, numbered):
    seen = []

    def is_kept(label):
        seen.append(int(label))
        return label % 3 == 0

    dataset = ms.data.Dataset.from_hdf5(numbered(50, chunk=7), {"image": "image", "n": "label"})
    kept = dataset.filter(is_kept, fields="n")
    batches = strategy.experimental_distribute_dataset(kept.batch(4))
    share = -(-50 // size)
    assert seen == list(range(50))[rank * share : (rank + 1) * share]
    assert batches.cardinality() == 5
    found = [localize(element) for element in batches]
    assert all((e["image"] == e["n"][:, None]).all() for e in found)
    found = strategy.gather_objects([e["n"].tolist() for e in found])
    assert sorted(n for one in found for part in one for n in part) == list(range(0, 50, 3))
    again = strategy.experimental_distribute_dataset(kept.shuffle(0).batch(5))
    assert len(list(again)) == 4
    assert len(seen) == len(range(50)[rank * share : (rank + 1) * share])


def test_filters_of_filters(strategy):
    dataset = ms.data.Dataset.range(40).filter(lambda x: x % 2).map(lambda x: x + 1)
    both = ms.data.Dataset.zip((dataset.filter(lambda x: x > 9), ms.data.Dataset.range(99)))
    batches = strategy.experimental_distribute_dataset(both.filter(lambda x, n: n % 2).batch(3))
    found = [strategy.gather(x, axis=0).tolist() for x, _ in batches]
    assert np.concatenate(found).tolist() == list(range(12, 42, 4))


def test_a_filter_that_fails_on_one_rank(strategy):
    def fails(x):
        if x == 19:
            raise KeyError("row 19 has no label")
        return True

    dataset = ms.data.Dataset.range(20).filter(fails).batch(4)
    with pytest.raises(KeyError, match="row 19 has no label"):
        strategy.experimental_distribute_dataset(dataset)
    assert strategy.experimental_distribute_dataset(ms.data.Dataset.range(4).batch(2))


def test_a_random_map_before_a_filter_is_refused_on_all(strategy):
    noisy = ms.data.Dataset.range(20).map(lambda x: x + ms.data.example_rng().random())
    with pytest.raises(ValueError, match="example_rng"):
        strategy.experimental_distribute_dataset(noisy.filter(lambda x: x > 3).batch(2))


@pytest.mark.parametrize(
    ("make", "difference"),
    [
        (lambda d, n: d.select([0, n]), "select by int64 indices"),
        (lambda d, n: d.select(np.arange(12) != n), "select by bool indices"),
        (lambda d, n: d.sample(np.arange(12) + n), "sample by weights"),
        (lambda d, n: d.window(2 + n), r"int64 \(2,\).*int64 \(3,\)"),
        (lambda d, n: d.enumerate(n), "from 0 .* from 1"),
        (lambda d, n: ms.data.Dataset.zip((d, d.shuffle(n))), "seed=0.*seed=1"),
        (
            lambda d, n: ms.data.Dataset.sample_from_datasets([d.repeat()] * 2, [1, 1 + n]),
            r"weights=\[1.0, 1.0\].*weights=\[1.0, 2.0\]",
        ),
        (lambda d, n: d.concatenate(d.skip(n).take(9)), "Skip.*count=0.*Skip.*count=1"),
        (lambda d, n: evaluated(d.filter(lambda x: x > n)), "11 examples.* 10 examples"),
        (lambda d, n: d.filter(lambda x: x > 3) if n else d, "Batch.*no more steps"),
    ],
)
def test_one_rank_with_another_composition(strategy, rank, size, make, difference):
    if size == 1:
        pytest.skip("needs two ranks that differ")
    dataset = make(ms.data.Dataset.range(12), int(rank == size - 1)).batch(4)
    with pytest.raises(DataError, match=difference):
        strategy.experimental_distribute_dataset(dataset)
    assert strategy.experimental_distribute_dataset(ms.data.Dataset.range(4).batch(2))


def evaluated(dataset):
    assert dataset.cardinality() > 0
    return dataset


def test_an_index_out_of_range_on_files_is_an_error_on_all(strategy, numbered):
    dataset = ms.data.Dataset.from_hdf5(numbered(10), "label").select([3, 10])
    with pytest.raises(IndexError, match="index 10 at position 1"):
        strategy.experimental_distribute_dataset(dataset.batch(2))


def test_filters_of_data_of_each_rank(strategy, rank, size):
    def make(context):
        assert context.input_pipeline_id == rank
        own = ms.data.Dataset.range(10 * (rank + 1)).skip(10 * rank)
        return own.filter(lambda x: x % 2 == rank % 2).batch(3)

    batches = strategy.distribute_datasets_from_function(make)
    found = [n for element in batches for n in localize(element).tolist()]
    assert found == list(range(10 * rank + rank % 2, 10 * (rank + 1), 2))


def test_a_composition_on_ranks(strategy, numbered):
    rows = ms.data.Dataset.from_hdf5(numbered(60, chunk=7), ("image", "label"))
    other = ms.data.Dataset.range(99).shuffle(2)
    dataset = ms.data.Dataset.zip((rows.filter(lambda x: x % 3, fields=1), other)).window(2)
    dataset = dataset.select(np.arange(0, 39, 2)).shuffle(1).batch(7).enumerate()
    whole = list(dataset._pipeline.elements(0))
    batches = strategy.experimental_distribute_dataset(dataset)
    for (number, ((_, label), n)), (k, ((_, labels), ns)) in zip(batches, whole, strict=True):
        assert devices.on_host(localize(number)) == k
        assert strategy.gather(label, axis=0).tolist() == labels.tolist()
        assert strategy.gather(n, axis=0).tolist() == ns.tolist()
