"""Random numbers in functions given to map: the same for an example, wherever it is made."""

import itertools
import json

import numpy as np
import pytest

from mpistrat.data import ArraySpec, AutoShardPolicy, Dataset, example_rng, example_rngs
from mpistrat.errors import ContextError
from mpistrat.values import localize


def noisy(x):
    return {"x": x, "noise": example_rng().random()}


def noisy_batch(element):
    rngs = example_rngs()
    assert len(rngs) == len(element["x"])
    return element | {"more": np.array([rng.random() for rng in rngs], np.float64)}


def of_rows(n):
    return Dataset.range(n)


def of_a_generator(n):
    return Dataset.from_generator(lambda: range(n), ArraySpec((), np.int64))


def joined(parts):
    """Return one nest of a global batch from those of all ranks."""
    return {key: np.concatenate([part[key] for part in parts]).tolist() for key in parts[0]}


@pytest.mark.parametrize("make", [of_rows, of_a_generator])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_any_number_of_ranks_draws_the_same(all_ranks, make, is_resumed):
    def dataset():
        source = make(23).shuffle(5).map(noisy, seed=3).repeat(2).skip(1).prefetch(2)
        return source.batch(6).map(noisy_batch).map(lambda batch: batch)

    expected = [{key: value.tolist() for key, value in batch.items()} for batch in dataset()]
    drawn = [noise for batch in expected for noise in batch["noise"] + batch["more"]]
    assert len(set(drawn)) == 2 * 45
    state = None
    for size in (1, 2, 3, 4, 7):
        ranks = all_ranks(dataset(), size)
        if is_resumed and state:
            for distributed in ranks:
                distributed.load_state_dict(json.loads(state))
        first = 3 if is_resumed and state else 0
        iterators = [iter(distributed) for distributed in ranks]
        for number, parts in enumerate(zip(*iterators, strict=True), first):
            assert joined([localize(part) for part in parts]) == expected[number]
            if number == 2:
                state = json.dumps(ranks[-1].state_dict())
        assert number == len(expected) - 1


def test_what_a_stream_depends_on():
    def draws(dataset, num_passes=1):
        return [
            tuple(np.ravel(element).tolist())
            for element in itertools.chain.from_iterable(dataset for _ in range(num_passes))
        ]

    def two(x):
        assert example_rng() is example_rng()
        return example_rng().random(2)

    base = draws(Dataset.range(5).map(two))
    assert draws(Dataset.range(5).map(two)) == base
    assert draws(Dataset.range(5).map(two).batch(5))[0] == sum(base, ())
    others = [
        draws(Dataset.range(5).map(two, seed=1)),
        draws(Dataset.range(5).map(abs).map(two)),
        draws(Dataset.range(5).map(two), num_passes=2)[5:],
    ]
    assert len({number for each in [base, *others] for pair in each for number in pair}) == 40


def test_ranks_with_data_of_their_own_draw_numbers_of_their_own(all_ranks, numbered):
    paths = [numbered(6, name=f"{i}.h5") for i in range(2)]
    dataset = Dataset.from_hdf5(paths, "label").map(noisy).batch(4)
    by_file = all_ranks(dataset.with_options(auto_shard_policy=AutoShardPolicy.FILE), 2)
    drawn = [localize(element)["noise"].tolist() for rank in by_file for element in rank]
    assert len(set(itertools.chain(*drawn))) == 12
    off = all_ranks(dataset.with_options(auto_shard_policy=AutoShardPolicy.OFF), 2)
    first, second = ([localize(e)["noise"].tolist() for e in rank] for rank in off)
    assert first == second


def test_streams_exist_inside_map_alone():
    for ask in (example_rng, example_rngs):
        with pytest.raises(ContextError, match=f"{ask.__name__}.*Dataset.map"):
            ask()
    with pytest.raises(ContextError, match="example_rngs"):
        list(Dataset.range(4).batch(2).map(lambda x: x + example_rng().random()))
    with pytest.raises(ContextError, match="Dataset.map"):  # the one before has been left
        example_rng()
    (pair,) = Dataset.range(2).map(lambda x: example_rngs()[0].random()).batch(2)
    assert len(set(pair.tolist())) == 2
    with pytest.raises(TypeError, match="seed"):
        Dataset.range(2).map(abs, seed=1.5)
    with pytest.raises(ValueError, match="seed"):
        Dataset.range(2).map(abs, seed=-1)
