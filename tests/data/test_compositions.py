"""Compositions of all transformations, compared with lists and NumPy, at any number of ranks."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat import nests
from mpistrat.data import ArraySpec, Dataset
from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.sources import RangeSource


class Chunked(RangeSource):
    """Rows that lie in chunks of several files, as those of from_hdf5."""

    layout = ChunkLayout(np.array([0, 4, 8, 11, 15, 19, 23]), 8)
    file_starts = np.array([11])
    is_of_files = True


def counting(n):
    return Dataset.from_generator(lambda: range(n), ArraySpec((), np.int64))


def plain(element):
    """Return an element as tuples of integers, which lists can hold."""
    if isinstance(element, tuple | list):
        return tuple(map(plain, element))
    return plain(element.tolist()) if isinstance(element, np.ndarray) else int(element)


def total(*element):
    return sum(int(np.sum(leaf)) for leaf in nests.flatten(element)[0])


def is_kept(*element):
    return total(*element) % 3 > 0


def bumped(*element):
    element = element[0] if len(element) == 1 else element
    return nests.map_nest(lambda leaf: leaf + 1, element)


def plain_bumped(element):
    return tuple(map(plain_bumped, element)) if isinstance(element, tuple) else element + 1


def arguments(element):
    return element if isinstance(element, tuple) else (element,)


def elements_of(dataset, pass_number=0):
    return [plain(e) for e in dataset._pipeline.elements(pass_number)]


# Each: what to do with a data set, and what the elements then are; ``None`` where a draw decides.
COUNTS = st.integers(0, 5)
SIZES = st.integers(1, 3)
STEPS = st.one_of(
    COUNTS.map(lambda n: ("take", lambda d: d.take(4 * n), lambda e: e[: 4 * n])),
    COUNTS.map(lambda n: ("skip", lambda d: d.skip(n), lambda e: e[n:])),
    SIZES.map(lambda n: ("shard", lambda d: d.shard(n, n - 1), lambda e: e[n - 1 :: n])),
    st.just(("repeat", lambda d: d.repeat(2), lambda e: None)),
    st.just(("map", lambda d: d.map(bumped), lambda e: [plain_bumped(x) for x in e])),
    COUNTS.map(lambda n: ("shuffle", lambda d: d.shuffle(n), lambda e: None)),
    COUNTS.map(lambda n: ("shuffle", lambda d: d.shuffle(n, window=n + 2), lambda e: None)),
    st.tuples(SIZES, SIZES, SIZES).map(
        lambda p: (
            "window",
            lambda d: d.window(*p, across_files=True),
            lambda e: [
                tuple(zip(*w)) if isinstance(w[0], tuple) and False else w
                for w in (
                    tuple(e[i : i + (p[0] - 1) * p[2] + 1 : p[2]])
                    for i in range(0, len(e) - (p[0] - 1) * p[2], p[1])
                )
            ],
        )
    ),
    COUNTS.map(
        lambda n: ("enumerate", lambda d: d.enumerate(n), lambda e: list(enumerate(e, n)))
    ),
    st.just(
        ("filter", lambda d: d.filter(is_kept), lambda e: [x for x in e if is_kept(*arguments(x))])
    ),
    st.just(("concatenate", lambda d: d.concatenate(d.skip(2)), lambda e: e + e[2:])),
    st.just(("zip", lambda d: Dataset.zip((d, d.skip(1))), lambda e: list(zip(e, e[1:])))),
    st.lists(st.integers(-4, 3), max_size=6).map(
        lambda i: ("select", lambda d: d.select(i), lambda e: [e[k] for k in i])
    ),
)
DEPTH = st.lists(STEPS, max_size=4)


def compose(source, steps, pass_number):
    """Return the data set after `steps`, each compared with the model, and its elements."""
    dataset, expected = source, elements_of(source, pass_number)
    names = []
    for name, apply, model in steps:
        if name == "select" and len(expected) < 4:
            continue
        if name == "window" and expected and isinstance(expected[0], tuple):
            continue  # of nests, tested by itself
        try:
            following = apply(dataset)
            found = elements_of(following, pass_number)
        except ValueError as refused:
            assert name == "filter"
            assert {"shuffle", "repeat"} & set(names) or "repeat" in str(refused)
            continue
        names.append(name)
        modelled = model(expected)
        if modelled is not None:
            assert found == modelled, names
        elif name == "shuffle":
            assert sorted(found) == sorted(expected)
        else:
            assert sorted(found) == sorted(2 * expected) or "shuffle" in names
        dataset, expected = following, found
    return dataset, expected


def global_batches(dataset, size, pass_number=0, start=0):
    """Return the batches of a pass from `start` on, put together from the parts of all ranks."""
    passes = [
        dataset._pipeline.elements(pass_number, start, size, rank) for rank in range(size)
    ]
    batches = []
    for parts in zip(*passes, strict=True):
        flat = [nests.flatten(part) for part in parts]
        leaves = [np.concatenate(column) for column in zip(*(f[0] for f in flat), strict=True)]
        batches.append(plain(nests.unflatten(flat[0][1], leaves)))
    return batches


def rows_of(batch):
    """Return the elements of a batch of plain tuples."""

    def depth(spec):
        return spec

    return depth(batch)


@settings(max_examples=150, deadline=None)
@given(DEPTH, st.integers(0, 2), st.sampled_from([0, 1, 23]))
def test_elements_are_those_of_the_model(steps, pass_number, length):
    compose(Dataset.range(length), steps, pass_number)


@settings(max_examples=60, deadline=None)
@given(DEPTH, st.integers(0, 1))
def test_generators_have_the_same_elements(steps, pass_number):
    steps = [step for step in steps if step[0] != "select"]
    of_rows, _ = compose(Dataset.range(23), steps, pass_number)
    if not any(name in ("shuffle", "filter") for name, *_ in steps):
        streamed = counting(23)
        for _, apply, _ in steps:
            if apply(streamed) is None:
                continue
        dataset, _ = compose(counting(23), steps, pass_number)
        assert elements_of(dataset, pass_number) == elements_of(of_rows, pass_number)


@settings(max_examples=150, deadline=None)
@given(
    DEPTH,
    st.sampled_from([Dataset.range(23), Dataset(Pipeline(Chunked(23))), counting(23)]),
    st.integers(1, 5),
    st.integers(0, 1),
)
def test_global_batches_are_the_same_at_any_number_of_ranks(steps, source, batch_size, number):
    if source._pipeline.source.is_stream:
        steps = [step for step in steps if step[0] != "select"]
    dataset, elements = compose(source, steps, number)
    batched = dataset.batch(batch_size)
    expected = global_batches(batched, 1, number)
    assert len(expected) == -(-len(elements) // batch_size)
    if not isinstance(source._pipeline.source, Chunked):
        unstacked = [plain(e) for e in batched.map(lambda *e: e)._pipeline.elements(number)]
        assert len(unstacked) == len(expected)
    for size in (2, 3, 4):
        assert global_batches(batched, size, number) == expected
        start = (len(expected) * size) // 5
        assert global_batches(batched, size, number, start) == expected[start:]
