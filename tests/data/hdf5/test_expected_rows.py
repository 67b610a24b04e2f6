"""Queue of the rows that were announced."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.data.hdf5.row_reader import _ExpectedRows


@given(
    st.lists(st.integers(0, 5), max_size=6), st.integers(0, 8), st.integers(0, 8), st.integers(1, 8)
)
def test_rows_are_found_behind_others(lengths, dropped, skip, count):
    rows = np.arange(sum(lengths))
    expected = _ExpectedRows()
    for block in np.split(rows, np.cumsum(lengths)[:-1]) if lengths else ():
        expected.add(block)
    expected.drop(dropped)
    found = expected.first(count, skip)
    left = rows[dropped:][skip : skip + count]
    if len(left) < count:
        assert found is None
    else:
        np.testing.assert_array_equal(found, left)
