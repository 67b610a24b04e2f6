"""An order that starts in the middle of a pass is the rest of the whole one; its arithmetic."""

import itertools
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.data.order import ENDLESS, ChunkLayout, Order
from mpistrat.data.pipeline import Prefetch
from mpistrat.data.sources.memory import GeneratorSource, RangeSource
from mpistrat.data.spec import ArraySpec
from mpistrat.data.transformations.batch import Batch
from mpistrat.data.transformations.repeat import Repeat
from mpistrat.data.transformations.shuffle import Partitions, Shuffle
from mpistrat.data.transformations.take import Shard, Skip, Take
from mpistrat.sharding import slice_of_rank

_LIMIT = 60
"""Items compared of an endless pass."""


class Chunked(RangeSource):
    """Rows that lie in chunks, as those of a file."""

    layout = ChunkLayout(np.array([0, 3, 6, 7, 11, 14]), 8)


def counting(n):
    return GeneratorSource(lambda: range(n), ArraySpec((), np.int64))


SOURCES = st.sampled_from([RangeSource(14), RangeSource(0), Chunked(14), counting(14), counting(0)])
COUNTS = st.integers(0, 9)
BEFORE = st.one_of(
    st.builds(Take, st.integers(0, 20)),
    st.builds(Skip, COUNTS),
    st.builds(lambda n, i: Shard(n, i % n), st.integers(1, 4), COUNTS),
    st.builds(Repeat, st.one_of(st.none(), st.integers(0, 3))),
    st.builds(Shuffle, COUNTS, st.booleans(), st.integers(1, 9)),
    st.just(Prefetch(2)),
)
TRANSFORMATIONS = st.tuples(
    st.lists(BEFORE, max_size=3),
    st.lists(st.builds(Batch, st.integers(1, 6), st.booleans()), max_size=1),
    st.lists(BEFORE, max_size=2),
).map(lambda parts: tuple(itertools.chain(*parts)))


def is_slow_to_find_empty(order):
    """Return whether taking one item might take for ever: a selection of nothing, endlessly."""
    every = order.transformations
    lengths = [Order(order.source, every[:n]).length for n in range(len(every) + 1)]
    return ENDLESS in lengths and order.source.num_examples < 0


def format_detail(item):
    return tuple(map(format_detail, item)) if np.ndim(item) else int(np.asarray(item))


def items(order, start):
    blocks = order.blocks((2,), None, start)
    flat = itertools.chain.from_iterable(blocks)
    return [format_detail(item) for item in itertools.islice(flat, _LIMIT)]


@given(SOURCES, TRANSFORMATIONS, st.integers(0, 50))
def test_a_later_start_gives_the_rest(source, transformations, start):
    order = Order(source, transformations)
    if is_slow_to_find_empty(order):
        return
    flat = itertools.chain.from_iterable(order.blocks((2,), None))
    expected = [format_detail(item) for item in itertools.islice(flat, start + _LIMIT)][start:]
    assert items(order, start) == expected


@pytest.mark.parametrize(
    "transformations",
    [
        (Batch(3, False),),
        (Repeat(None), Batch(3, False)),
        (Shuffle(0, True, None), Repeat(None), Batch(64, True)),
        (Repeat(None), Shuffle(0, True, 50), Skip(10**9), Shard(10, 3), Batch(10, False)),
    ],
)
def test_a_start_far_away_takes_no_time(transformations):
    source = RangeSource(10**15 if len(transformations) == 1 else 1000)
    begun = time.perf_counter()
    block = next(Order(source, transformations).blocks((0,), None, 10**8))
    assert len(block)
    assert time.perf_counter() - begun < 1.0


counts = st.integers(0, 10_000)
sizes = st.integers(1, 1_000)


@given(counts, sizes)
def test_num_batches(num_examples, batch_size):
    lengths = [
        len(range(num_examples)[i : i + batch_size]) for i in range(0, num_examples, batch_size)
    ]
    assert Batch(batch_size, False).length(num_examples) == len(lengths)
    assert Batch(batch_size, True).length(num_examples) == lengths.count(batch_size)


@given(counts, sizes)
def test_shards_partition(num_items, size):
    assert sum(Shard(size, index).length(num_items) for index in range(size)) == num_items


@given(counts, sizes, st.integers(0, 500), st.integers(0, 500))
def test_partitions_supply_each_example_once(num_examples, batch_size, num_pieces, window_pieces):
    partitions = Partitions.plan(num_pieces, num_examples, batch_size, window_pieces)
    assert 1 <= partitions.count <= max(batch_size, 1)
    lengths = partitions.lengths(num_examples)
    assert len(lengths) == partitions.count
    assert min(lengths) >= 0
    assert sum(lengths) == num_examples
    bounds = partitions.bounds(batch_size)
    assert bounds[0] == 0
    assert bounds[-1] == batch_size
    assert bounds == sorted(bounds)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12, 24])
def test_partitions_do_not_cross_ranks_where_everything_divides(size):
    partitions = Partitions.plan(1_000, 100_000, 240, 1_000)
    bounds = set(partitions.bounds(240))
    assert partitions.count % size == 0
    assert all(slice_of_rank(240, size, rank).start in bounds for rank in range(size))
