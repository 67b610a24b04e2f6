"""Compositions of all transformations, compared with lists, at any number of ranks."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat import nests
from mpistrat.data import ArraySpec, Dataset
from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.sources.memory import RangeSource

LENGTH = 23


class Chunked(RangeSource):
    """Rows that lie in chunks of two files, as those of from_hdf5."""

    layout = ChunkLayout(np.array([0, 4, 8, 11, 15, 19, LENGTH]), 8)
    file_starts = np.array([11])
    is_of_files = True


def counting(n):
    return Dataset.from_generator(lambda: range(n), ArraySpec((), np.int64))


SOURCES = {
    "rows": Dataset.range(LENGTH),
    "chunks": Dataset(Pipeline(Chunked(LENGTH))),
    "generator": counting(LENGTH),
    "nothing": Dataset.range(0),
}


def plain(element):
    """Return an element as tuples of integers, which can be compared."""
    if isinstance(element, np.ndarray):
        element = element.tolist()
    return tuple(map(plain, element)) if isinstance(element, tuple | list) else int(element)


def total(*element):
    return sum(int(np.sum(leaf)) for leaf in nests.flatten(element)[0])


def is_kept(*element):
    return total(*element) % 3 > 0


def bumped(*element):
    return nests.map_nest(lambda leaf: leaf + 1, element if len(element) > 1 else element[0])


def plain_bumped(element):
    return tuple(map(plain_bumped, element)) if isinstance(element, tuple) else element + 1


def elements_of(dataset, pass_number=0):
    return [plain(e) for e in dataset._pipeline.elements(pass_number)]


def windows(elements, size, stride, dilation):
    span = (size - 1) * dilation + 1
    firsts = range(0, len(elements) - span + 1, stride)
    return [tuple(elements[first : first + span : dilation]) for first in firsts]


# Each: its name, what it does to a data set, and to a list; ``None`` where a draw decides.
COUNTS, SIZES = st.integers(0, 5), st.integers(1, 3)


def in_batches(elements, size, drop_remainder=False):
    batches = [elements[n : n + size] for n in range(0, len(elements), size)]
    return batches[:-1] if drop_remainder and batches and len(batches[-1]) < size else batches


# What stands between batch and unbatch: its name, and what it does to a list of batches.
OF_BATCHES = st.one_of(
    COUNTS.map(lambda n: ("take", lambda d: d.take(n), lambda b: b[:n])),
    SIZES.map(lambda n: ("skip", lambda d: d.skip(n), lambda b: b[n:])),
    SIZES.map(lambda n: ("shard", lambda d: d.shard(n, 0), lambda b: b[::n])),
    st.just(("repeat", lambda d: d.repeat(2), lambda b: b + b)),
    st.just(("prefetch", lambda d: d.prefetch(2), lambda b: b)),
    st.just(("map", lambda d: d.map(bumped), lambda b: [list(map(plain_bumped, e)) for e in b])),
    COUNTS.map(lambda n: ("shuffle", lambda d: d.shuffle(n), None)),
    st.lists(st.integers(-2, 1), max_size=4).map(
        lambda i: ("select", lambda d: d.select(i), lambda b: [b[k] for k in i])
    ),
    st.tuples(SIZES, COUNTS).map(
        lambda p: (
            "batches of batches",
            lambda d: d.batch(p[0]).take(p[1]).unbatch(),
            lambda b: b[: p[0] * p[1]],
        )
    ),
)
BATCHES = {
    "batch": lambda d, size: d.batch(size),
    "whole": lambda d, size: d.batch(size, drop_remainder=True),
    "padded": lambda d, size: d.padded_batch(size),
    "ragged": lambda d, size: d.ragged_batch(size),
}


def taken_apart(options):
    """Return the step that batches, rearranges the batches and takes them apart."""
    kind, size, steps = options
    inner = [step[0] for step in steps]
    name = " ".join(["unbatch", *({"select", "shuffle", "map"} & set(inner))])

    def fitting(elements):
        """Yield the steps that can be taken, each with the batches after it."""
        batches = in_batches(elements, size, kind == "whole")
        for each, apply, model in steps:
            if each == "select" and len(batches) < 2:
                continue
            if each == "batches of batches" and (
                "map" in inner or "shuffle" in inner or len(set(map(len, batches))) > 1
            ):
                continue
            batches = batches if model is None else model(batches)
            yield apply, batches

    def apply(dataset):
        elements = elements_of(dataset)
        dataset = BATCHES[kind](dataset, size)
        for each, _ in fitting(elements):
            dataset = each(dataset)
        return dataset.unbatch()

    def model(elements):
        batches = in_batches(elements, size, kind == "whole")
        for _, after in fitting(elements):
            batches = after
        return list(itertools.chain.from_iterable(batches))

    return name, apply, None if "shuffle" in inner else model


TAKEN_APART = st.tuples(
    st.sampled_from(list(BATCHES)), st.integers(2, 6), st.lists(OF_BATCHES, max_size=3)
).map(taken_apart)

STEPS = st.one_of(
    COUNTS.map(lambda n: ("take", lambda d: d.take(4 * n), lambda e: e[: 4 * n])),
    COUNTS.map(lambda n: ("skip", lambda d: d.skip(n), lambda e: e[n:])),
    SIZES.map(lambda n: ("shard", lambda d: d.shard(n, n - 1), lambda e: e[n - 1 :: n])),
    st.just(("repeat", lambda d: d.repeat(2), None)),
    st.just(("map", lambda d: d.map(bumped), lambda e: list(map(plain_bumped, e)))),
    COUNTS.map(lambda n: ("shuffle", lambda d: d.shuffle(n), None)),
    COUNTS.map(lambda n: ("shuffle", lambda d: d.shuffle(n, window=n + 2), None)),
    st.tuples(SIZES, SIZES, SIZES).map(
        lambda p: ("window", lambda d: d.window(*p, across_files=True), lambda e: windows(e, *p))
    ),
    COUNTS.map(lambda n: ("enumerate", lambda d: d.enumerate(n), lambda e: list(enumerate(e, n)))),
    st.just(
        (
            "filter",
            lambda d: d.filter(lambda *x: is_kept(*x)),
            lambda e: list(filter(is_kept, e)),
        )
    ),
    st.just(("concatenate", lambda d: d.concatenate(d.skip(2)), lambda e: e + e[2:])),
    st.just(
        (
            "zip",
            lambda d: Dataset.zip((d, d.skip(1))),
            lambda e: list(itertools.pairwise(e)),
        )
    ),
    st.lists(st.integers(-4, 3), max_size=6).map(
        lambda i: ("select", lambda d: d.select(i), lambda e: [e[k] for k in i])
    ),
    COUNTS.map(lambda n: ("sample", lambda d: d.sample(np.arange(1, 5), 9, n), None)),
    COUNTS.map(
        lambda n: (
            "mix",
            lambda d: Dataset.sample_from_datasets([d, d.map(bumped)], [1, 2], n),
            None,
        )
    ),
)


def repeated(*element):
    """Return an array of 0 to 3 rows for an element."""
    return np.full(total(*element) % 4, total(*element))


def plain_rows(elements):
    return [total(e) for e in elements for _ in range(total(e) % 4)]


ROWS = st.sampled_from(
    [
        ("rows", lambda d: d.map(repeated).unbatch(), plain_rows),
        ("rows", lambda d: d.flat_map(repeated, num_parallel_calls=2), plain_rows),
    ]
)
DEPTH = st.lists(st.one_of(STEPS, TAKEN_APART, ROWS), max_size=5)


def fits(name, source, names, elements):
    """Return whether a step can be taken, and its model compares."""
    if source == "generator" and (name == "sample" or "select" in name):
        return False
    if name.startswith("unbatch") and "window" in names:
        return False
    if name == "window":  # of tuples is a tuple of windows, which another test compares
        return not {"zip", "enumerate"} & set(names)
    return len(elements) == 4 if name == "sample" else name != "select" or len(elements) >= 4


def compose(source, steps, pass_number):
    """Return the data set after `steps`, each compared with the model, and its elements."""
    dataset, names = SOURCES[source], []
    expected = elements_of(dataset, pass_number)
    for name, apply, model in steps:
        if not fits(name, source, names, expected):
            continue
        try:
            following = apply(dataset)
            found = elements_of(following, pass_number)
        except ValueError:  # where other steps before it leave no fixed set of elements
            are_drawn = {"shuffle", "repeat", "sample"} & set(names)
            is_undefined = name in ("filter", "rows") and are_drawn
            if not (is_undefined or any("unbatch" in n and "shuffle" in n for n in names)):
                raise
            continue
        names.append(name)
        if model is not None:
            assert found == model(expected), names
        elif name == "shuffle":
            assert sorted(found) == sorted(expected), names
        elif name == "repeat":
            assert len(found) == 2 * len(expected), names
        else:
            others = set(expected)
            for _ in range(3 if name == "mix" or "map" in name else 0):
                others |= set(map(plain_bumped, others))
            assert set(found) <= others, names
        assert elements_of(following, pass_number) == found
        dataset, expected = following, found
    return dataset, expected


def global_batches(dataset, size, pass_number=0, start=0):
    """Return the batches of a pass from `start` on, put together from the parts of all ranks."""
    passes = [dataset._pipeline.elements(pass_number, start, size, rank) for rank in range(size)]
    batches = []
    for parts in zip(*passes, strict=True):
        flat = [nests.flatten(part) for part in parts]
        leaves = [np.concatenate(column) for column in zip(*(f[0] for f in flat), strict=True)]
        batches.append([leaf.tolist() for leaf in leaves])
    return batches


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(list(SOURCES)), DEPTH, st.integers(0, 2))
def test_elements_are_those_of_the_model(source, steps, pass_number):
    compose(source, steps, pass_number)


@settings(max_examples=40, deadline=None)
@given(DEPTH, st.integers(0, 1))
def test_generators_have_the_elements_of_rows(steps, pass_number):
    steps = [step for step in steps if step[0] not in ("sample", "filter", "rows")]
    steps = [step for step in steps if "select" not in step[0]]
    _, of_rows = compose("rows", steps, pass_number)
    _, streamed = compose("generator", steps, pass_number)
    assert streamed == of_rows


@settings(max_examples=50, deadline=None)
@given(st.sampled_from(list(SOURCES)), DEPTH, st.integers(1, 5), st.integers(0, 1))
def test_global_batches_are_the_same_at_any_number_of_ranks(source, steps, batch_size, number):
    dataset, elements = compose(source, steps, number)
    batched = dataset.batch(batch_size)
    expected = global_batches(batched, 1, number)
    assert len(expected) == -(-len(elements) // batch_size)
    if source != "chunks" and elements:  # where the order does not depend on the batch size
        columns = [
            list(itertools.chain.from_iterable(batch[leaf] for batch in expected))
            for leaf in range(len(expected[0]))
        ]
        flat = [nests.flatten(e)[0] for e in dataset._pipeline.elements(number)]
        rows = [[np.asarray(leaf).tolist() for leaf in example] for example in flat]
        assert columns == [list(column) for column in zip(*rows, strict=True)]
    for size in (2, 3, 4):
        assert global_batches(batched, size, number) == expected
        start = len(expected) * size // 5
        assert global_batches(batched, size, number, start) == expected[start:]


@given(st.integers(0, 3), st.integers(2, 6), st.sampled_from(list(BATCHES)), st.integers(0, 2))
def test_batches_that_were_shuffled_stay_together(seed, size, kind, number):
    dataset = BATCHES[kind](Dataset.range(LENGTH), size).shuffle(seed).unbatch()
    found = elements_of(dataset, number)
    batches = in_batches(list(range(LENGTH)), size, kind == "whole")
    assert dataset.cardinality() == len(found) == sum(map(len, batches))
    while found:
        batch = next(b for b in batches if b[0] == found[0])
        assert found[: len(batch)] == batch
        batches.remove(batch)
        found = found[len(batch) :]
    assert not batches


def test_what_is_left_of_shuffled_batches_may_differ_in_length():
    dataset = Dataset.range(LENGTH).batch(5).shuffle(0).take(2).unbatch()
    assert dataset.cardinality() == -2
    assert {len(elements_of(dataset, number)) for number in range(20)} == {8, 10}
    for combine in (
        lambda: list(Dataset.zip((dataset, dataset))),
        lambda: list(dataset.concatenate(dataset)),
        lambda: list(dataset.enumerate()),
        lambda: list(dataset.window(2)),
    ):
        with pytest.raises(ValueError, match="different number of elements in each epoch"):
            combine()
    whole = Dataset.range(LENGTH).batch(5, drop_remainder=True).shuffle(0).take(2).unbatch()
    assert whole.cardinality() == len(list(whole.enumerate())) == 10


def test_batches_that_were_enumerated_are_not_taken_apart():
    for dataset in (Dataset.range(9).batch(2), Dataset.range(9).batch(2).shuffle(0)):
        with pytest.raises(ValueError, match="Call enumerate after unbatch, or before batch"):
            dataset.enumerate().unbatch()
    numbered = Dataset.range(9).enumerate().batch(2).take(3).unbatch()
    assert [plain(e) for e in numbered] == [(n, n) for n in range(6)]


@pytest.mark.parametrize("source", ["rows", "chunks", "nothing"])
def test_a_shuffle_of_nothing_gives_nothing(source):
    data = SOURCES[source]
    for empty in (
        data.take(0),
        data.skip(LENGTH),
        data.shard(LENGTH + 1, LENGTH),
        data.filter(lambda x: False),
        data.select([]),
        data.batch(5).take(0).unbatch(),
    ):
        for shuffled in (empty.shuffle(0), empty.shuffle(0).repeat(2), empty.shuffle(0, window=3)):
            assert shuffled.cardinality() == len(list(shuffled)) == 0
            for size in (1, 3):
                assert global_batches(shuffled.batch(2), size) == []
