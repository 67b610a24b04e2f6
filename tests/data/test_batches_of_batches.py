"""Batches of batches are those of a plain list, and ranks divide the outermost ones."""

import os

import h5py
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.data.spec import fits
from mpistrat.errors import DataError
from mpistrat.values import localize
from tests.devices import assert_array_equal

SIZES = st.lists(st.tuples(st.integers(1, 5), st.booleans()), min_size=2, max_size=3)


def grouped(items, batch_size, drop_remainder):
    """Return lists of `batch_size` of the `items`."""
    starts = range(0, len(items), batch_size)
    groups = [items[start : start + batch_size] for start in starts]
    return [group for group in groups if len(group) == batch_size or not drop_remainder]


def is_ragged(batch):
    return len({len(part) for part in batch if isinstance(part, list)}) > 1 or any(
        is_ragged(part) for part in batch if isinstance(part, list)
    )


def sources(num_examples, folder):
    path = folder / f"{os.getpid()}-{num_examples}.h5"
    if not path.exists():
        with h5py.File(path, "w") as file:
            file.create_dataset("x", data=np.arange(num_examples), chunks=(3,), maxshape=(None,))
    spec = ms.data.ArraySpec((), np.int64)
    return [
        ms.data.Dataset.range(num_examples),
        ms.data.Dataset.from_hdf5(path, "x"),
        ms.data.Dataset.from_generator(lambda: iter(range(num_examples)), spec),
    ]


@settings(max_examples=40)
@given(num_examples=st.integers(1, 40), batches=SIZES, mapped=st.integers(-1, 3))
def test_any_batches_are_those_of_a_list(num_examples, batches, mapped, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    expected = list(range(num_examples))
    for batch_size, drops in batches:
        expected = grouped(expected, batch_size, drops)
    for dataset in sources(num_examples, folder):
        for level, (batch_size, drops) in enumerate(batches):
            if mapped == level:
                dataset = dataset.map(lambda x: x + 100)
            dataset = dataset.batch(batch_size, drops)
        offset = 100 if 0 <= mapped < len(batches) else 0
        if any(map(is_ragged, expected)):
            with pytest.raises(DataError, match="equally long"):
                list(dataset)
            continue
        found = [element.tolist() for element in dataset]
        assert found == [(np.array(each) + offset).tolist() for each in expected]
        if expected:
            spec = dataset.element_spec
            assert all(fits(spec, element) for element in dataset)


def steps(path):
    """Return shuffled examples as batches of 4, of which 3 make a global batch."""
    dataset = ms.data.Dataset.from_hdf5(path, "x").shuffle(seed=3)
    return dataset.map(lambda x: 2 * x).batch(4, drop_remainder=True).batch(3)


def test_ranks_divide_the_outermost_batches(strategy, rank, size, shared_tmp_path):
    path = shared_tmp_path / "x.h5"
    if rank == 0:
        with h5py.File(path, "w") as file:
            file["x"] = np.arange(50)
    strategy.barrier()
    whole = list(steps(path))
    assert [batch.shape for batch in whole] == [(3, 4)] * 4
    share = -(-3 // size)
    dataset = strategy.experimental_distribute_dataset(steps(path))
    batches = iter(dataset)
    for batch in whole[:2]:
        part = localize(next(batches))
        # A rank without a batch knows the shape of one.
        assert part.shape[1:] == (4,)
        assert part.tolist() == batch[rank * share : (rank + 1) * share].tolist()
    other = strategy.experimental_distribute_dataset(steps(path))
    other.load_state_dict(dataset.state_dict())
    rest = [strategy.gather(element, axis=0) for element in other]
    assert_array_equal(rest, whole[2:])


def test_batches_of_other_lengths_are_an_error_on_every_rank(strategy, rank, size):
    dataset = ms.data.Dataset.range(10).batch(4).batch(3)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    with pytest.raises(DataError, match="batches of 2 and of 4 elements"):
        next(batches)


def test_random_numbers_of_examples_do_not_depend_on_the_number_of_ranks(strategy, rank, size):
    def noisy(x):
        return x * 0 + np.int64(ms.data.example_rng().integers(2**40))

    def noisy_batch(x):
        return x + np.array([rng.integers(2**40) for rng in ms.data.example_rngs()])

    dataset = ms.data.Dataset.range(24).map(noisy, seed=1).batch(4).map(noisy_batch).batch(3)
    whole = list(dataset)
    assert len({number for batch in whole for number in batch.ravel().tolist()}) == 24
    distributed = strategy.experimental_distribute_dataset(dataset)
    found = [strategy.gather(element, axis=0) for element in distributed]
    assert_array_equal(found, whole)


def test_policy_off_splits_the_outermost_batch_size(strategy, rank, size):
    dataset = ms.data.Dataset.range(48).batch(2).batch(2 * size)
    options = dataset.with_options(auto_shard_policy=ms.data.AutoShardPolicy.OFF)
    first = localize(next(iter(strategy.experimental_distribute_dataset(options))))
    assert first.tolist() == [[0, 1], [2, 3]]
