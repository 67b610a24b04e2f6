"""Positions within a pass of every transformation, which go on at another number of ranks."""

import itertools
import json

import h5py
import numpy as np
import pytest

import mpistrat as ms
from mpistrat import nests
from mpistrat.data import ArraySpec, Dataset, Field, Ragged, example_rng
from mpistrat.values import localize

NUM = 60


def noisy(x, n):
    return x, n + int(example_rng().integers(1000)) * NUM


def broken(x, n):
    if n % 7 == 3:
        raise OSError("truncated")
    return x, n


class Source:
    chunk_rows = 7

    def __len__(self):
        return NUM

    def read(self, numbers):
        return numbers[:, None] * [[1.0, 2.0]], numbers


def counted():
    for n in range(NUM):
        yield np.full(n % 4, n), n


STREAM = Dataset.from_generator(counted, (ArraySpec((None,), "i8"), ArraySpec((), "i8")))

DATA_SETS = {
    "patterns": lambda d: d.shuffle(1).ragged_batch(8),
    "zip": lambda d: Dataset.zip((d, Dataset.range(NUM).shuffle(2))).shuffle(1).ragged_batch(8),
    "concatenate": lambda d: d.concatenate(d.skip(40)).shuffle(3).ragged_batch(8),
    "select": lambda d: d.select(np.arange(-1, -50, -2)).shuffle(3).ragged_batch(4),
    "filter": lambda d: d.filter(lambda n: n % 3 > 0, fields=1).shuffle(4).ragged_batch(8),
    "window": lambda d: d.map(lambda x, n: n).window(4, stride=2).shuffle(0).batch(6),
    "padded_batch": lambda d: d.shuffle(5).padded_batch(8, ((4,), ())),
    "unbatch": lambda d: d.shuffle(5).padded_batch(8, ((4,), ())).unbatch().ragged_batch(5),
    "batch of batches": lambda d: d.map(lambda x, n: n).shuffle(5).batch(4).batch(3),
    "sample": lambda d: d.sample(np.arange(NUM) % 5, 70, seed=3).ragged_batch(8),
    "mixture": lambda d: Dataset.sample_from_datasets([d, d.shuffle(1)], [1, 2]).ragged_batch(8),
    "enumerate": lambda d: d.enumerate().shuffle(2).ragged_batch(8).enumerate(3),
    "random map": lambda d: d.shuffle(2).map(noisy, 1, num_parallel_calls=2).ragged_batch(8),
    "cache": lambda d: d.map(noisy, num_parallel_calls=2).cache().shuffle(2).ragged_batch(8),
    "ignore_errors": lambda d: d.map(broken).ignore_errors(False).shuffle(2).ragged_batch(8),
    "source": lambda _: Dataset.from_source(Source()).shuffle(1).batch(8),
    "generator": lambda _: STREAM.shuffle(1, window=20).ragged_batch(8),
    "repeat": lambda d: d.shuffle(1).repeat(2).ragged_batch(16),
}


@pytest.fixture
def path(strategy, rank, mpi_tmp_path):
    path = mpi_tmp_path / "data.h5"
    if rank == 0:
        with h5py.File(path, "w") as file:
            for number in range(NUM):
                file[f"g/{number}/x"] = np.full(number % 4, number)
                file[f"g/{number}"].attrs["label"] = number
    strategy.barrier()
    return path


def rows_of(batch):
    """Return the leaves of a rank's batch as lists, an entry for each example."""
    leaves, _ = nests.flatten(localize(batch))
    return [leaf.to_list() if isinstance(leaf, Ragged) else leaf.tolist() for leaf in leaves]


def whole(strategy, batches, count=None):
    """Return what `count` batches, or all that follow, hold over all ranks."""
    own = [rows_of(batch) for batch in itertools.islice(batches, count)]
    return [
        [
            # A number of a batch is the same on all ranks.
            list(itertools.chain(*leaf)) if isinstance(leaf[0], list) else leaf[0]
            for leaf in zip(*parts, strict=True)
        ]
        for parts in zip(*strategy.gather_objects(own), strict=True)
    ]


@pytest.mark.parametrize("name", DATA_SETS)
def test_the_rest_of_a_pass_at_another_number_of_ranks(strategy, path, name):
    label = Field("g/*", attribute="label")
    one = ms.OneDeviceStrategy("cpu:0")

    def distributed(by):
        dataset = DATA_SETS[name](Dataset.from_hdf5(path, ("g/*/x", label)))
        return by.experimental_distribute_dataset(dataset)

    alone = distributed(one)
    first, second = whole(one, alone), whole(one, alone)
    assert len(first) > 3
    for before, after in ((strategy, one), (one, strategy)):
        begun = distributed(before)
        assert whole(before, begun, 3) == first[:3]
        state = json.loads(json.dumps(begun.state_dict()))
        assert state["batch"] == 3
        resumed = distributed(after)
        resumed.load_state_dict(state)
        assert whole(after, resumed) == first[3:]
        assert whole(after, resumed) == second
