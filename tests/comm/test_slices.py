from hypothesis import given
from hypothesis import strategies as st

from mpistrat.comm.reducers import plan_blocks, slice_lengths


@given(st.integers(0, 10**8), st.sampled_from([1, 2, 4, 8, 16, 32]), st.integers(1, 2000))
def test_blocks_cover_the_buffer_once_and_are_bounded(num_elements, itemsize, size):
    blocks = plan_blocks(num_elements, itemsize, size)
    assert [block.start for block in blocks[1:]] == [block.stop for block in blocks[:-1]]
    if num_elements:
        assert (blocks[0].start, blocks[-1].stop) == (0, num_elements)
    assert all(block.stop > block.start for block in blocks)
    largest = max((block.stop - block.start for block in blocks), default=0)
    assert largest * itemsize <= max(4 * 2**20, size * 2**16)


@given(st.integers(0, 10**6), st.integers(1, 2000))
def test_slices_make_up_the_block_and_no_rank_has_more_than_the_first(num_elements, size):
    lengths = slice_lengths(num_elements, size)
    assert len(lengths) == size
    assert sum(lengths) == num_elements
    assert max(lengths) == lengths[0] == -(-num_elements // size)
    assert min(lengths) >= 0
