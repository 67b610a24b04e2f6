"""Runs of pages: whatever ranks read, what they find joins to the digests of the whole."""

import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.checkpoint.digests import PAGE_BYTES, digest_of_array
from mpistrat.checkpoint.raw_io import Extent, digests_of_runs, join_runs, runs_of_ranks

SIZES = st.dictionaries(st.text("abc", max_size=3), st.integers(0, 9 * PAGE_BYTES), max_size=5)


@given(sizes=SIZES, num_ranks=st.integers(1, 7))
def test_each_page_is_read_once_and_all_ranks_read_as_many(sizes, num_ranks):
    runs = runs_of_ranks(sizes, num_ranks)
    pages = [(name, page) for rank in runs for name, *run in rank for page in range(*run)]
    expected = [
        (name, page)
        for name, size in sizes.items()
        for page in range(max(1, -(-size // PAGE_BYTES)))
    ]
    assert pages == expected  # in order, so that neighbours read neighbouring pages
    numbers = [sum(stop - start for _, start, stop in rank) for rank in runs]
    assert len(runs) == num_ranks
    assert max(numbers) - min(numbers) <= 1


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5])
def test_they_join_to_the_digests_of_whole_arrays(num_ranks):
    lengths = [0, 3, PAGE_BYTES // 4, PAGE_BYTES // 4 + 1, 20 * PAGE_BYTES // 4 - 5]
    arrays = {
        f"x{length}": np.random.default_rng(length).integers(0, 2**32, length, np.uint32)
        for length in lengths
    }
    handle = os.memfd_create("pages")
    try:
        extents, offset = {}, 7
        for name, array in arrays.items():
            os.pwrite(handle, array.tobytes(), offset)
            extents[name] = Extent(offset, array.nbytes, 4)
            offset += array.nbytes + 5
        sizes = {name: each.num_bytes for name, each in extents.items()}
        found = [
            digested
            for runs in runs_of_ranks(sizes, num_ranks)
            for digested in digests_of_runs(handle, extents, runs, num_threads=2)
        ]
    finally:
        os.close(handle)
    joined = join_runs(found)
    assert joined.keys() == arrays.keys()
    for name, array in arrays.items():
        assert (joined[name].digest, joined[name].pages) == digest_of_array(array)
        assert joined[name].num_items == array.size
        assert joined[name].parity == np.bitwise_xor.reduce(array, initial=0)
