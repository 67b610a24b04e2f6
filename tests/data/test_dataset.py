"""Transformations, iteration by itself, cardinality and element_spec."""

import itertools

import numpy as np
import pytest

from mpistrat.data import ArraySpec, AutoShardPolicy, Dataset
from mpistrat.errors import DataError

COUNTING = ArraySpec((), np.int64)


def count_to(n):
    return Dataset.from_generator(lambda: range(n), COUNTING)


@pytest.fixture(params=[Dataset.range, count_to], ids=["rows", "generator"])
def source(request):
    """A source that is read by row numbers, and one that only runs forwards."""
    return request.param


def numbers(dataset):
    return [int(element) for element in dataset]


def test_take_skip_shard_repeat_compose(source):
    assert numbers(source(5)) == [0, 1, 2, 3, 4]
    assert numbers(source(10).skip(2).shard(3, 1).take(2)) == [3, 6]
    assert numbers(source(3).repeat(2)) == [0, 1, 2, 0, 1, 2]
    assert numbers(source(3).repeat(2).skip(1).shard(2, 0)) == [1, 0, 2]
    assert numbers(source(3).repeat().take(7)) == [0, 1, 2, 0, 1, 2, 0]
    assert numbers(source(3).repeat(0)) == []
    assert numbers(source(0).repeat()) == []
    assert numbers(source(3).take(0)) == []
    assert numbers(source(3).skip(5)) == []


def test_batches(source):
    assert [b.tolist() for b in source(5).batch(2)] == [[0, 1], [2, 3], [4]]
    assert [b.tolist() for b in source(5).batch(2, drop_remainder=True)] == [[0, 1], [2, 3]]
    assert [b.tolist() for b in source(5).batch(9)] == [[0, 1, 2, 3, 4]]
    assert list(source(5).batch(9, drop_remainder=True)) == []
    assert [b.tolist() for b in source(3).repeat(2).batch(4)] == [[0, 1, 2, 0], [1, 2]]
    assert [b.tolist() for b in source(3).batch(2).repeat(2)] == [[0, 1], [2], [0, 1], [2]]
    assert [b.tolist() for b in source(7).batch(2).skip(1).shard(2, 0)] == [[2, 3], [6]]


def test_shuffle_is_a_permutation_that_depends_on_seed_and_pass(source):
    dataset = source(100).shuffle(seed=3)
    first, second = numbers(dataset), numbers(dataset)
    assert sorted(first) == sorted(second) == list(range(100))
    assert first != second
    assert numbers(source(100).shuffle(seed=3)) == first
    assert numbers(source(100).shuffle(seed=4)) != first
    fixed = source(100).shuffle(seed=3, reshuffle_each_iteration=False)
    assert numbers(fixed) == numbers(fixed)


def test_repeated_shuffles_reshuffle_where_asked(source):
    order = numbers(source(50).shuffle(0).repeat(2))
    assert sorted(order[:50]) == sorted(order[50:]) == list(range(50))
    assert order[:50] != order[50:]
    fixed = numbers(source(50).shuffle(0, reshuffle_each_iteration=False).repeat(2))
    assert fixed[:50] == fixed[50:]


def test_shuffle_stays_within_its_window(source):
    order = numbers(source(100).shuffle(0, window=10))
    assert order != list(range(100))
    for start in range(0, 100, 10):
        assert sorted(order[start : start + 10]) == list(range(start, start + 10))


def test_shuffling_batches_keeps_them_whole(source):
    batches = [b.tolist() for b in source(20).batch(5).shuffle(1)]
    assert sorted(batches) == [list(range(i, i + 5)) for i in range(0, 20, 5)]


def test_endless_data_need_a_window_to_be_shuffled():
    endless = Dataset.range(4).repeat()
    assert sorted(itertools.islice(endless.shuffle(0, window=4), 4)) == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="window"):
        next(iter(endless.shuffle(0)))


def test_map_of_examples_and_of_batches(source):
    doubled = source(4).map(lambda x: {"twice": 2 * x, "pair": np.array([x, x])})
    first = next(iter(doubled))
    assert first["twice"] == 0
    batches = list(doubled.batch(3))
    assert batches[1]["pair"].tolist() == [[3, 3]]
    summed = doubled.batch(3).map(lambda batch: batch["pair"].sum(axis=1, keepdims=True))
    assert [b.tolist() for b in summed] == [[[0], [2], [4]], [[6]]]
    assert numbers(source(6).map(lambda x: x + 1).shuffle(0).map(lambda x: -x).take(3)) == [
        -int(x) - 1 for x in source(6).shuffle(0).take(3)
    ]


def test_map_gets_the_items_of_a_tuple_as_arguments():
    dataset = Dataset.from_arrays((np.arange(3), np.ones((3, 2)))).map(lambda x, y: (x, y * x))
    assert [y.tolist() for _, y in dataset] == [[0, 0], [1, 1], [2, 2]]
    ((x, y),) = dataset.batch(3).map(lambda x, y: (x + 1, y))
    assert x.tolist() == [1, 2, 3]
    assert y.shape == (3, 2)


def test_map_results_that_do_not_stack():
    ragged = Dataset.range(3).map(lambda x: np.zeros(int(x))).batch(3)
    with pytest.raises(DataError, match=r"\(0,\) and \(1,\)"):
        list(ragged)
    with pytest.raises(DataError, match="None"):
        list(Dataset.range(3).map(lambda x: None).batch(3))


def test_map_hands_on_whatever_sources_give():
    rows = np.array([b"ab", b"c"]), np.array([1, 2], "M8[s]"), np.array(["x", "yz"])
    (batch,) = Dataset.from_arrays(rows).map(lambda *row: row).batch(2)
    assert [column.tolist() for column in batch] == [column.tolist() for column in rows]
    assert [column.dtype for column in batch] == [column.dtype for column in rows]
    with pytest.raises(DataError, match="masked_array"):
        list(Dataset.range(2).map(lambda x: np.ma.array([1], mask=True)).batch(2))


def test_map_results_have_the_dtype_of_the_first_example():
    grows = Dataset.range(4).map(lambda x: 1 if x < 2 else 2.5).batch(2)
    with pytest.raises(DataError, match=r"2\.5 of dtype float64 .* int64"):
        list(grows)
    narrows = Dataset.range(4).map(lambda x: 2.5 if x < 2 else 1).batch(2)
    assert [batch.dtype for batch in narrows] == [np.float64] * 2
    small = Dataset.range(3).map(lambda x: np.int8(1) if x < 2 else 300).batch(3)
    with pytest.raises(DataError, match="300 .* int8"):
        list(small)
    shuffled = Dataset.range(50).map(lambda x: np.float32(0) if x == 0 else float(x)).shuffle(0)
    assert {batch.dtype.name for batch in shuffled.batch(7)} == {"float32"}
    other = Dataset.range(3).map(lambda x: (x, x) if x else x).batch(3)
    with pytest.raises(DataError, match="for one element"):
        list(other)


@pytest.mark.parametrize(
    ("transform", "of_ten", "of_unknown", "of_endless"),
    [
        (lambda d: d, 10, -2, -1),
        (lambda d: d.take(3), 3, -2, 3),
        (lambda d: d.take(30), 10, -2, 30),
        (lambda d: d.skip(3), 7, -2, -1),
        (lambda d: d.skip(30), 0, -2, -1),
        (lambda d: d.shard(4, 1), 3, -2, -1),
        (lambda d: d.shard(4, 2), 2, -2, -1),
        (lambda d: d.repeat(3), 30, -2, -1),
        (lambda d: d.repeat(), -1, -1, -1),
        (lambda d: d.repeat(-1), -1, -1, -1),
        (lambda d: d.repeat(0), 0, 0, 0),
        (lambda d: d.batch(3), 4, -2, -1),
        (lambda d: d.batch(3, True), 3, -2, -1),
        (lambda d: d.shuffle(0, window=5).map(abs).prefetch(2), 10, -2, -1),
    ],
)
def test_cardinality(transform, of_ten, of_unknown, of_endless):
    assert transform(Dataset.range(10)).cardinality() == of_ten
    assert transform(count_to(10)).cardinality() == of_unknown
    assert transform(Dataset.range(10).repeat()).cardinality() == of_endless


def test_element_spec():
    nest = {"a": np.zeros((4, 2), np.float32), "b": (np.zeros(4, ">i2"),)}
    dataset = Dataset.from_arrays(nest)
    one = {"a": ArraySpec((2,), "float32"), "b": (ArraySpec((), np.int16),)}
    assert dataset.element_spec == one
    assert dataset.batch(3).element_spec["a"] == ArraySpec((None, 2), np.float32)
    assert dataset.batch(3, drop_remainder=True).element_spec["a"] == ArraySpec((3, 2), np.float32)
    mapped = dataset.map(lambda e: e["a"].astype(np.float64).sum())
    assert mapped.element_spec == ArraySpec((), np.float64)
    assert mapped.batch(3).element_spec == ArraySpec((None,), np.float64)
    assert dataset.batch(3).map(lambda e: e["a"]).element_spec == ArraySpec((None, 2), "float32")
    with pytest.raises(DataError, match="empty"):
        _ = mapped.take(0).element_spec


def test_elements_are_copies():
    array = np.zeros(4)
    for batch in Dataset.from_arrays(array).batch(2):
        batch += 1
    assert not array.any()


@pytest.mark.parametrize("name", ["batch", "prefetch", "take", "skip", "repeat", "shuffle"])
def test_arguments_that_are_no_integers(name):
    with pytest.raises(TypeError, match=r"2\.0"):
        getattr(Dataset.range(3), name)(2.0)
    with pytest.raises(TypeError, match="True"):
        getattr(Dataset.range(3), name)(True)
    getattr(Dataset.range(3), name)(np.int32(2))


@pytest.mark.parametrize(
    "make",
    [
        lambda: Dataset.range(-1),
        lambda: Dataset.range(3).batch(0),
        lambda: Dataset.range(3).batch(-1),
        lambda: Dataset.range(3).take(-1),
        lambda: Dataset.range(3).repeat(-2),
        lambda: Dataset.range(3).shuffle(-1),
        lambda: Dataset.range(3).shuffle(0, window=0),
        lambda: Dataset.range(3).prefetch(0),
        lambda: Dataset.range(3).shard(2, 2),
        lambda: Dataset.range(3).shard(0, 0),
    ],
)
def test_arguments_out_of_range(make):
    with pytest.raises(ValueError, match="must be"):
        make()


def test_numbers_beyond_all_data():
    huge = 10**30
    assert numbers(Dataset.range(3).take(huge)) == [0, 1, 2]
    assert numbers(Dataset.range(3).shard(huge, 2)) == [2]
    assert numbers(Dataset.range(3).skip(huge).repeat(huge)) == []
    (batch,) = Dataset.range(3).shuffle(huge, window=huge).batch(huge).prefetch(huge)
    assert sorted(batch) == [0, 1, 2]
    assert Dataset.range(3).repeat(huge).cardinality() == 3 * huge
    with pytest.raises(ValueError, match="at most"):
        Dataset.range(huge)


def test_other_bad_arguments():
    with pytest.raises(TypeError, match="drop_remainder.*'no'"):
        Dataset.range(3).batch(2, drop_remainder="no")
    with pytest.raises(TypeError, match="reshuffle_each_iteration.*1"):
        Dataset.range(3).shuffle(0, 1)
    with pytest.raises(TypeError, match="function"):
        Dataset.range(3).map(3)
    with pytest.raises(TypeError, match="AutoShardPolicy"):
        Dataset.range(3).with_options(auto_shard_policy="DATA")
    assert Dataset.range(3).with_options(auto_shard_policy=AutoShardPolicy.OFF).cardinality() == 3


def test_from_arrays_refuses_what_does_not_fit():
    with pytest.raises(DataError, match="a: 3, b: 4"):
        Dataset.from_arrays({"a": np.zeros(3), "b": np.zeros(4)})
    with pytest.raises(DataError, match="0-d"):
        Dataset.from_arrays([1, 2])
    with pytest.raises(DataError, match="empty"):
        Dataset.from_arrays(())
    with pytest.raises(DataError, match="object"):
        Dataset.from_arrays(np.array([None]))
    with pytest.raises(DataError, match="'x' is masked.*filled"):
        Dataset.from_arrays({"x": np.ma.array([1, 2], mask=[0, 1])})


def test_from_generator_checks_and_casts_its_elements():
    spec = {"x": ArraySpec((None,), np.float32), "y": ArraySpec((), np.int8)}

    def batches_of(*elements):
        return list(Dataset.from_generator(lambda: elements, spec).batch(2))

    (batch,) = batches_of({"x": [1.0, 2.0], "y": 3} | {"x": np.ones(2)}, {"x": np.zeros(2), "y": 4})
    assert batch["x"].dtype == np.float32
    assert batch["y"].dtype == np.int8
    with pytest.raises(DataError, match=r"'x' of element 0 .*\(2, 2\)"):
        batches_of({"x": np.ones((2, 2)), "y": 3})
    with pytest.raises(DataError, match=r"'y' of element 0 .*float64"):
        batches_of({"x": np.ones(2), "y": 3.5})
    with pytest.raises(DataError, match=r"'y' of element 1 is 300"):
        batches_of({"x": np.ones(2), "y": 3}, {"x": np.ones(2), "y": 300})
    with pytest.raises(DataError, match="element_spec"):
        batches_of((np.ones(2), 3))
    with pytest.raises(DataError, match=r"\(1,\) and \(2,\)"):
        batches_of({"x": np.ones(1), "y": 3}, {"x": np.ones(2), "y": 3})
    with pytest.raises(TypeError, match="ArraySpec"):
        Dataset.from_generator(list, np.float32)
    with pytest.raises(TypeError, match="function"):
        Dataset.from_generator([1, 2], COUNTING)
    with pytest.raises(TypeError, match="object"):
        Dataset.from_generator(list, ArraySpec((), object))
    with pytest.raises(DataError, match="returned 3 of type int"):
        list(Dataset.from_generator(lambda: 3, COUNTING))
    with pytest.raises(DataError, match="does not fit"):
        list(Dataset.from_generator(lambda: [np.ma.array(1, mask=True)], COUNTING))


def test_a_generator_that_is_used_up_is_no_empty_pass():
    once = (number for number in range(3))
    dataset = Dataset.from_generator(lambda: once, COUNTING)
    assert numbers(dataset) == [0, 1, 2]
    with pytest.raises(DataError, match="used up"):
        list(dataset)


@pytest.mark.parametrize(
    ("value", "dtype", "fits"),
    [
        (255, "u1", True),
        (-1, "u1", False),
        (2**63, "i8", False),
        (2**64, "u8", False),
        (True, "i1", True),
        (1, "?", False),
        (3, "f4", True),
        (0.1, "f4", True),
        (1e300, "f4", False),
        (np.inf, "f4", True),
        ("ab", "U1", False),
        ("a", "U3", True),
        (b"ab", "S1", False),
        (1j, "f8", False),
    ],
)
def test_generated_values_survive_or_are_refused(value, dtype, fits):
    dataset = Dataset.from_generator(lambda: [value], ArraySpec((), dtype)).batch(1)
    if fits:
        ((element,),) = (batch,) = dataset
        assert batch.dtype == dtype
        assert np.isclose(element, value) if dtype == "f4" else element == value
    else:
        with pytest.raises(DataError, match="does not fit"):
            list(dataset)


def test_array_spec_values():
    assert ArraySpec([2, None], "float32") == ArraySpec((2, None), np.float32)
    assert repr(ArraySpec((2, None), "float32")) == "ArraySpec((2, None), float32)"
    with pytest.raises(ValueError, match="-1"):
        ArraySpec((-1,), "int8")
    with pytest.raises(TypeError):
        ArraySpec((1.5,), "int8")
