"""zip, concatenate, select, filter, window, enumerate and sample: results, specs and errors."""

import itertools

import numpy as np
import pytest

from mpistrat.data import ArraySpec, AutoShardPolicy, Dataset, example_rng
from mpistrat.errors import DataError
from mpistrat.values import localize


def count_to(n):
    return Dataset.from_generator(lambda: range(n), ArraySpec((), np.int64))


def numbers(dataset):
    return [int(element) for element in dataset]


def test_zip_of_nests():
    x, y = Dataset.from_arrays({"a": np.arange(5), "b": np.ones((5, 2))}), Dataset.range(3)
    dataset = Dataset.zip({"x": x, "y": [y, y.map(float)]})
    assert dataset.cardinality() == 3
    assert dataset.element_spec["x"]["b"] == ArraySpec((2,), np.float64)
    assert dataset.element_spec["y"][1] == ArraySpec((), np.float64)
    assert [int(e["x"]["a"]) for e in dataset] == [0, 1, 2]
    (batch,) = dataset.shuffle(0).batch(8)
    assert batch["x"]["a"].tolist() == batch["y"][0].tolist() == batch["y"][1].tolist()
    endless = Dataset.zip((y.repeat(), x.repeat()))
    assert endless.cardinality() == -1
    assert [int(i) for i, _ in endless.take(7)] == [0, 1, 2, 0, 1, 2, 0]
    assert [int(i) for i, _ in Dataset.zip((y.shuffle(0, window=2).repeat(), y.repeat(2)))] == [
        int(i) for i in y.shuffle(0, window=2).repeat(2)
    ]


def test_each_repetition_of_a_zip_shuffles_its_data_sets_anew():
    one = Dataset.range(20)
    pairs = [(int(a), int(b)) for a, b in Dataset.zip((one, one.shuffle(3))).repeat(2)]
    first, second = pairs[:20], pairs[20:]
    assert sorted(b for _, b in first) == sorted(b for _, b in second) == list(range(20))
    assert first != second
    batched = Dataset.zip((one, one.shuffle(3))).repeat(2).shuffle(1, window=35).batch(40)
    ((a, b),) = batched
    assert sorted(zip(a.tolist(), b.tolist(), strict=True)) == sorted(pairs)


@pytest.mark.parametrize("name", ["zip", "concatenate", "window", "sample_from_datasets"])
def test_batched_data_sets_are_refused(name):
    batched = Dataset.range(4).batch(2)
    calls = {
        "zip": lambda: Dataset.zip((batched, batched)),
        "concatenate": lambda: batched.concatenate(batched),
        "window": lambda: batched.window(2),
        "sample_from_datasets": lambda: Dataset.sample_from_datasets([batched, batched]),
    }
    with pytest.raises(ValueError, match=f"{name}.* batch its result"):
        calls[name]()


def test_other_arguments_that_are_no_data_sets():
    with pytest.raises(TypeError, match="zip needs datasets, not 3"):
        Dataset.zip((Dataset.range(2), 3))
    with pytest.raises(ValueError, match="at least one"):
        Dataset.zip(())
    with pytest.raises(TypeError, match="concatenate needs datasets"):
        Dataset.range(3).concatenate([1])
    with pytest.raises(ValueError, match="at least one"):
        Dataset.sample_from_datasets([])


def test_concatenation_needs_one_spec():
    spec = ArraySpec((None,), np.float64)
    ragged = Dataset.from_generator(lambda: [np.zeros(3)], spec)
    both = Dataset.from_arrays(np.ones((2, 2))).concatenate(ragged)
    assert both.element_spec == spec
    assert [len(x) for x in both] == [2, 2, 3]
    with pytest.raises(DataError, match=r"dataset 0 has .*int64.* dataset 1 .*float64"):
        Dataset.range(3).concatenate(Dataset.from_arrays(np.zeros(3)))
    later = Dataset.range(3).map(float).concatenate(Dataset.range(2))
    with pytest.raises(DataError, match="one element_spec"):
        list(later.batch(2))
    assert numbers(Dataset.range(0).map(abs).concatenate(Dataset.range(2))) == [0, 1]
    assert numbers(Dataset.range(2).repeat().concatenate(Dataset.range(9)).take(5)) == [
        0, 1, 0, 1, 0,
    ]  # fmt: skip


def test_shuffles_within_a_concatenation():
    one, two = Dataset.range(9).shuffle(0), Dataset.range(20).skip(9).shuffle(1)
    expected = numbers(one) + numbers(two)
    assert numbers(one.concatenate(two)) == expected
    assert numbers(one.concatenate(two).skip(4)) == expected[4:]


def test_select_takes_what_numpy_takes():
    dataset = Dataset.range(6).skip(1)
    assert numbers(dataset.select(np.array([4, -5, 0, 0], np.int8))) == [5, 1, 1, 1]
    assert numbers(dataset.select([])) == []
    assert numbers(dataset.select(np.arange(5) % 2 == 0)) == [1, 3, 5]
    with pytest.raises(IndexError, match=r"index 5 at position 1 .* 5 elements.*\[-5, 4\]"):
        dataset.select([0, 5, 99])
    with pytest.raises(IndexError, match="-6"):
        dataset.select([-6])
    with pytest.raises(IndexError, match="mask has 4 entries, but the dataset has 5"):
        dataset.select([True] * 4)
    for wrong in ([0.0], [[1]], "ab", 3):
        with pytest.raises(TypeError, match="select needs"):
            dataset.select(wrong)
    with pytest.raises(ValueError, match="generator"):
        count_to(3).select([0])
    with pytest.raises(ValueError, match="before repeat"):
        dataset.repeat().select([0])


def test_indices_are_copied():
    indices = np.array([1, 2])
    dataset = Dataset.range(4).select(indices)
    indices[:] = 0
    assert numbers(dataset) == [1, 2]


def test_selected_and_sampled_batches():
    batches = Dataset.range(7).batch(2)
    assert [b.tolist() for b in batches.select([3, 0, -1])] == [[6], [0, 1], [6]]
    drawn = [b.tolist() for b in batches.sample([0, 1, 1, 0], 9)]
    assert len(drawn) == 9
    assert {tuple(each) for each in drawn} == {(2, 3), (4, 5)}
    with pytest.raises(IndexError, match="index 4"):
        list(batches.select([4]))


def test_filter_sees_what_map_made():
    calls = []

    def is_even(x):
        calls.append(int(x))
        return x % 2 == 0

    dataset = Dataset.range(8).map(lambda x: x + 1).filter(is_even)
    assert repr(dataset).startswith("<Dataset range(8).map")
    assert not calls
    assert dataset.cardinality() == 4
    assert numbers(dataset.shuffle(0).repeat(2)) != numbers(dataset.repeat(2))
    assert numbers(dataset) == [2, 4, 6, 8]
    assert calls == list(range(1, 9))  # once for all passes
    pairs = Dataset.zip((Dataset.range(4), Dataset.range(4)))
    assert [int(a) for a, _ in pairs.filter(lambda a, b: a + b > 3)] == [2, 3]


def test_filter_by_fields():
    rows = {"x": np.arange(6), "y": np.arange(6) % 2, "z": np.zeros(6)}
    dataset = Dataset.from_arrays(rows)
    assert [int(e["x"]) for e in dataset.filter(lambda y: y == 1, fields="y")] == [1, 3, 5]
    both = dataset.filter(lambda x, y: x > 2 and y, fields=("x", "y"))
    assert [int(e["x"]) for e in both] == [3, 5]
    mapped = dataset.map(lambda e: (e["x"], -e["x"])).filter(lambda a: a < -3, fields=[1])
    assert [int(a) for a, _ in mapped] == [4, 5]
    zipped = Dataset.zip((Dataset.range(9), dataset)).filter(lambda e: e["y"], fields=1)
    assert [int(a) for a, _ in zipped] == [1, 3, 5]
    for wrong in ("w", 7):
        with pytest.raises(ValueError, match=f"field {wrong!r}.*'x', 'y', 'z'"):
            list(dataset.filter(bool, fields=wrong))


def test_filters_that_cannot_be_evaluated():
    dataset = Dataset.range(6)
    with pytest.raises(ValueError, match="before batch"):
        dataset.batch(2).filter(bool)
    with pytest.raises(ValueError, match="before repeat"):
        dataset.repeat(2).filter(bool)
    with pytest.raises(TypeError, match="function"):
        dataset.filter(3)
    noisy = dataset.map(lambda x: x + example_rng().random())
    with pytest.raises(ValueError, match="example_rng.*before that map"):
        list(noisy.filter(lambda x: x > 2))
    spec = ArraySpec((), np.int64)
    streamed = Dataset.from_generator(lambda: range(6), spec)
    noisy = streamed.map(lambda x: x + example_rng().random()).filter(lambda x: x > 2)
    with pytest.raises(ValueError, match="example_rng"):
        list(noisy)
    for unsteady in (dataset.sample(np.ones(6)), dataset.shuffle(0).take(3)):
        with pytest.raises(ValueError, match="different elements in each epoch"):
            list(unsteady.filter(bool))
    with pytest.raises(ValueError, match=r"shape \(2,\) for element 0"):
        list(Dataset.from_arrays(np.ones((3, 2))).filter(lambda x: x > 0))


def test_windows_of_nests():
    x = np.arange(20).reshape(10, 2)
    dataset = Dataset.from_arrays({"x": x, "y": np.arange(10.0)}).window(3, stride=2, dilation=2)
    assert dataset.element_spec == {
        "x": ArraySpec((3, 2), np.int64),
        "y": ArraySpec((3,), np.float64),
    }
    assert dataset.cardinality() == 3
    expected = [x[first : first + 5 : 2].tolist() for first in (0, 2, 4)]
    assert [e["x"].tolist() for e in dataset] == expected
    ((batch),) = dataset.batch(4)
    assert batch["x"].tolist() == expected
    assert [w.tolist() for w in Dataset.range(4).repeat().window(3, 3).take(3)] == [
        [0, 1, 2], [3, 0, 1], [2, 3, 0],
    ]  # fmt: skip
    assert [w.tolist() for w in Dataset.range(4).window(2).window(2).take(1)] == [[[0, 1], [1, 2]]]
    assert list(Dataset.range(2).window(3)) == []
    for wrong in ({"size": 0}, {"size": 2, "stride": 0}, {"size": 2, "dilation": -1}):
        with pytest.raises(ValueError, match="must be"):
            Dataset.range(3).window(**wrong)


def test_numbers_of_batches_have_no_dimension(all_ranks):
    dataset = Dataset.range(10).batch(4).enumerate(start=5)
    assert dataset.element_spec == (ArraySpec((), np.int64), ArraySpec((None,), np.int64))
    for size in (1, 2, 3, 4):
        for distributed in all_ranks(dataset, size):
            found = [localize(element) for element in distributed]
            assert [number.tolist() for number, _ in found] == [5, 6, 7]
            assert all(number.shape == () for number, _ in found)
            assert distributed.element_spec[0] == ArraySpec((), np.int64)
    off = dataset.with_options(auto_shard_policy=AutoShardPolicy.OFF)
    assert [localize(n).tolist() for n, _ in all_ranks(off, 2)[1]] == [5, 6, 7, 8, 9]
    twice = Dataset.range(5).batch(2).enumerate().map(lambda n, x: (n, x + n)).enumerate(7)
    assert [(int(m), int(n), x.tolist()) for m, (n, x) in twice] == [
        (7, 0, [0, 1]), (8, 1, [3, 4]), (9, 2, [6]),
    ]  # fmt: skip
    stacked = Dataset.range(8).batch(2, True).enumerate().batch(2)
    assert [(n.tolist(), x.shape) for n, x in stacked] == [([0, 1], (2, 2)), ([2, 3], (2, 2))]
    shuffled = Dataset.range(8).batch(2).enumerate().shuffle(0).repeat(2)
    assert all(x.tolist() == [2 * n, 2 * n + 1] for n, x in shuffled)


def test_samples_balance_and_depend_on_seed_and_pass():
    label = np.repeat([0, 1, 2], [80, 15, 5])
    weights = np.where(label == 1, 0.0, 1 / np.bincount(label)[label])
    dataset = Dataset.from_arrays(label).sample(weights, num_examples=2000, seed=3)
    first, second = numbers(dataset), numbers(dataset)
    counts = np.bincount(first, minlength=3)
    assert counts[1] == 0
    assert abs(counts[0] - 1000) < 100
    assert first != second
    assert numbers(Dataset.from_arrays(label).sample(weights, 2000, seed=3)) == first
    assert numbers(Dataset.from_arrays(label).sample(weights, 2000, seed=4)) != first
    assert dataset.cardinality() == 2000
    flat = itertools.chain.from_iterable(dataset.batch(7)._pipeline.elements(0))
    assert [int(x) for x in flat] == first
    repeated = numbers(Dataset.range(9).sample(np.ones(9)).repeat(2))
    assert repeated[:9] != repeated[9:]
    for wrong in ([-1, 2, 3], [0, 0, 0], [np.nan, 1, 1], [[1, 1, 1]], [1, 1]):
        with pytest.raises(ValueError, match="weights"):
            Dataset.range(3).sample(wrong)


def test_mixtures_end_where_asked():
    short, long = Dataset.range(5), Dataset.range(100).skip(50)
    mixed = numbers(Dataset.sample_from_datasets([short, long], [1, 1], seed=2))
    drawn = [x for x in mixed if x < 50]
    assert drawn == list(range(5))
    assert [x for x in mixed if x >= 50] == list(range(50, 50 + len(mixed) - 5))
    both = Dataset.sample_from_datasets([short, long], [1, 1], 2, stop_on_empty=False)
    assert both.cardinality() == 55
    assert numbers(both)[: len(mixed)] == mixed
    assert sorted(numbers(both)) == [*range(5), *range(50, 100)]
    endless = Dataset.sample_from_datasets([short.repeat(), long.repeat()], [3, 1])
    assert endless.cardinality() == -1
    far = numbers(endless.skip(40_000).take(1000))
    assert 650 < sum(x < 50 for x in far) < 850
    assert far == numbers(endless.take(41_000))[40_000:]
    ends = Dataset.sample_from_datasets([short, long.repeat()], [1, 1])
    assert ends.cardinality() > 5
    with pytest.raises(ValueError, match="weight for each of 2"):
        Dataset.sample_from_datasets([short, long], [1])


def test_streams_of_nests():
    pairs = Dataset.zip((count_to(5), Dataset.range(9).map(float)))
    assert pairs.cardinality() == -2
    assert [(int(a), float(b)) for a, b in pairs] == [(i, float(i)) for i in range(5)]
    windows = [tuple(map(np.ndarray.tolist, w)) for w in pairs.window(2, stride=3)]
    assert windows == [([0, 1], [0.0, 1.0]), ([3, 4], [3.0, 4.0])]
    kept = pairs.filter(lambda b: b > 2, fields=1).shuffle(0, window=2).batch(3)
    assert [sorted(a.tolist()) for a, _ in kept] == [[3, 4]]


def test_shuffle_refuses_the_buffer_of_tf_data():
    with pytest.raises(TypeError, match=r"no buffer_size.*shuffle\(seed=0\)"):
        Dataset.range(3).shuffle(buffer_size=1000)
    with pytest.raises(TypeError, match="buffer_size"):
        Dataset.range(3).shuffle(buffer_size=1000, seed=3)
