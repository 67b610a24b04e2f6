"""The arithmetic of splitting, as properties that hold for any sizes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat import sharding

counts = st.integers(0, 10_000)
sizes = st.integers(1, 1_000)


@given(counts, sizes)
def test_slices_of_ranks_cover_a_batch_in_rank_order(num_examples, size):
    end = 0
    for rank in range(size):
        part = sharding.slice_of_rank(num_examples, size, rank)
        assert part.start == end
        assert part.start <= part.stop <= num_examples
        end = part.stop
    assert end == num_examples


@given(counts, sizes, st.data())
def test_slice_of_rank_is_the_formula_of_the_contract(num_examples, size, data):
    rank = data.draw(st.integers(0, size - 1))
    share = -(-num_examples // size)
    expected = range(num_examples)[rank * share : min((rank + 1) * share, num_examples)]
    assert range(num_examples)[sharding.slice_of_rank(num_examples, size, rank)] == expected


@given(counts, sizes)
def test_num_batches(num_examples, batch_size):
    lengths = [
        len(range(num_examples)[i : i + batch_size]) for i in range(0, num_examples, batch_size)
    ]
    assert sharding.num_batches(num_examples, batch_size, False) == len(lengths)
    assert sharding.num_batches(num_examples, batch_size, True) == lengths.count(batch_size)


@given(counts, sizes)
def test_shards_and_files_partition(num_items, size):
    assert sum(sharding.shard_length(num_items, size, i) for i in range(size)) == num_items
    files = [file for rank in range(size) for file in sharding.files_of_rank(num_items, size, rank)]
    assert sorted(files) == list(range(num_items))
    for rank in range(min(size, 3)):
        assert all(file % size == rank for file in sharding.files_of_rank(num_items, size, rank))


@given(counts, sizes, st.integers(0, 500), st.integers(0, 500))
def test_partitions_supply_each_example_once(num_examples, batch_size, num_pieces, window_pieces):
    num_partitions = sharding.count_partitions(num_pieces, num_examples, batch_size, window_pieces)
    assert 1 <= num_partitions <= max(batch_size, 1)
    lengths = sharding.partition_lengths(num_examples, batch_size, num_partitions)
    assert len(lengths) == num_partitions
    assert min(lengths) >= 0
    assert sum(lengths) == num_examples
    bounds = sharding.partition_bounds(batch_size, num_partitions)
    assert bounds[0] == 0
    assert bounds[-1] == batch_size
    assert bounds == sorted(bounds)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 6, 8, 12, 24])
def test_partitions_do_not_cross_ranks_where_everything_divides(size):
    num_partitions = sharding.count_partitions(1_000, 100_000, 240, 1_000)
    bounds = set(sharding.partition_bounds(240, num_partitions))
    assert num_partitions % size == 0
    assert all(sharding.slice_of_rank(240, size, rank).start in bounds for rank in range(size))
