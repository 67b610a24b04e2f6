"""Counts of the rows that are wanted of each chunk, beside NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from mpistrat.native import native_library

pytestmark = pytest.mark.skipif(native_library() is None, reason="needs the compiled module")


@given(npst.arrays("i8", st.integers(0, 30), elements=st.integers(0, 5)), st.integers(0, 2))
def test_counts_go_up_and_down(chunks, before):
    counts = np.full(6, before, np.int32)
    expected = np.bincount(chunks, minlength=6)
    distinct = list(dict.fromkeys(chunks.tolist()))
    assert native_library().count_rows(counts, chunks, 1) == ([] if before else distinct)
    np.testing.assert_array_equal(counts, expected + before)
    assert native_library().count_rows(counts, chunks, -1) == ([] if before else distinct)
    np.testing.assert_array_equal(counts, np.full(6, before))


@pytest.mark.parametrize(
    ("counts", "chunks", "error"),
    [
        (np.zeros(3, np.int32), np.array([3]), IndexError),
        (np.zeros(3, np.int32), np.array([-1]), IndexError),
        (np.zeros(3), np.array([0]), TypeError),
        (np.zeros(3, np.int32), np.array([0], np.int32), TypeError),
        (np.zeros(3, np.int32), [0], TypeError),
    ],
)
def test_what_is_no_count_is_refused(counts, chunks, error):
    with pytest.raises(error):
        native_library().count_rows(counts, chunks, 1)
    assert not counts.any()
