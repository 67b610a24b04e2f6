"""The arithmetic of splitting, as properties that hold for any sizes."""

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


@given(st.lists(st.integers(0, 50)))
def test_consecutive_slices(lengths):
    slices = sharding.consecutive(lengths)
    covered = [each for part in slices for each in range(part.start, part.stop)]
    assert covered == list(range(sum(lengths)))
    assert [part.stop - part.start for part in slices] == lengths
