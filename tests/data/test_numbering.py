"""Numbers of examples: what random numbers of a map belong to, wherever the example comes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.data import ArraySpec, Dataset, example_rng, example_rngs


def count_to(n):
    return Dataset.from_generator(lambda: range(n), ArraySpec((), np.int64))


def noisy(*element):
    return element[0], example_rng().random()


def draws(n, pass_number=0, map_number=0, seed=0, repetition=()):
    """Return what example 0, 1, ... gets in a map."""
    words = [(2**32 - 1, pass_number, 0, number, map_number, *repetition) for number in range(n)]
    sequences = [np.random.SeedSequence(seed, spawn_key=key) for key in words]
    return [np.random.Generator(np.random.PCG64(each)).random() for each in sequences]


def noise(dataset, pass_number=0):
    """Return the noise of each element, by the element."""
    return [(int(x), float(y)) for x, y in dataset._pipeline.elements(pass_number)]


@pytest.fixture(params=[Dataset.range, count_to], ids=["rows", "generator"])
def source(request):
    return request.param


def test_shuffles_leave_numbers_alone(source):
    expected = draws(20)
    plain = source(20).map(noisy)
    assert noise(plain) == list(enumerate(expected))
    for shuffled in (plain.shuffle(3), source(20).shuffle(3).map(noisy)):
        found = noise(shuffled)
        assert found != sorted(found)
        assert sorted(found) == list(enumerate(expected))
    assert sorted(noise(plain.shuffle(1), 4)) == list(enumerate(draws(20, 4)))


def test_numbers_are_those_of_the_data_set_that_is_mapped(source):
    expected = draws(40)
    skipped = source(20).skip(3).shard(2, 1)
    assert noise(skipped.map(noisy)) == [(4 + 2 * k, expected[k]) for k in range(8)]
    assert dict(noise(skipped.shuffle(0).map(noisy))) == {4 + 2 * k: expected[k] for k in range(8)}
    taken = noise(source(20).shuffle(2).take(5).map(noisy))
    assert taken == [(x, expected[x]) for x, _ in taken]


def test_numbers_of_views():
    expected = draws(60)
    rows = Dataset.range(20)
    assert noise(rows.select([7, 7, 2]).map(noisy)) == [
        (7, expected[0]), (7, expected[1]), (2, expected[2]),
    ]  # fmt: skip
    assert noise(rows.map(noisy).select([7, 7, 2])) == [(k, expected[k]) for k in (7, 7, 2)]
    odd = rows.filter(lambda x: x % 2)
    assert noise(odd.map(noisy)) == [(2 * k + 1, expected[k]) for k in range(10)]
    shuffled = rows.shuffle(5).filter(lambda x: x % 2).map(noisy)
    assert sorted(noise(shuffled)) == noise(odd.map(noisy))
    both = rows.shuffle(1).concatenate(rows.map(lambda x: x + 20).shuffle(2))
    assert noise(both.map(noisy)) != sorted(noise(both.map(noisy)))
    assert sorted(noise(both.map(noisy))) == list(enumerate(draws(40, map_number=1)))
    zipped = Dataset.zip((rows.shuffle(1), rows)).map(noisy)
    assert [y for _, y in noise(zipped)] == expected[:20]


def test_maps_of_several_data_sets_are_others():
    one = Dataset.range(6).map(lambda x: example_rng().random())
    pairs = list(Dataset.zip((one, one)))
    assert [(float(a), float(b)) for a, b in pairs] == list(
        zip(draws(6), draws(6, map_number=1), strict=True)
    )


def test_repetitions_draw_others_where_the_map_comes_before(source):
    before = noise(source(4).map(noisy).repeat(2))
    assert before == [
        *enumerate(draws(4, repetition=(0,))),
        *enumerate(draws(4, repetition=(1,))),
    ]
    after = [y for _, y in noise(Dataset.range(4).repeat(2).map(noisy))]
    assert after == draws(8)
    within = Dataset.zip((Dataset.range(4).map(lambda x: example_rng().random()),)).repeat(3)
    drawn = [float(y) for (y,) in within]
    assert len(set(drawn)) == 12
    batched = [float(y) for (part,) in within.shuffle(0, window=9).batch(5) for y in part]
    assert sorted(batched) == sorted(drawn)


def test_maps_of_batches_get_the_numbers_of_their_examples(source):
    def noisy_batch(x):
        return x, np.array([rng.random() for rng in example_rngs()])

    expected = draws(11)
    for x, y in source(11).shuffle(0).batch(4).shuffle(1, window=2).map(noisy_batch):
        assert y.tolist() == [expected[k] for k in x.tolist()]


@given(st.integers(0, 30), st.integers(1, 4), st.data())
def test_a_start_in_the_middle_gives_the_same(n, repetitions, data):
    dataset = Dataset.range(n).shuffle(1).map(noisy).repeat(repetitions).map(lambda x, y: (x, y))
    whole = noise(dataset)
    start = data.draw(st.integers(0, len(whole)))
    rest = [(int(x), float(y)) for x, y in dataset._pipeline.elements(0, start)]
    assert rest == whole[start:]
