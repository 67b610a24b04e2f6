"""Statistics and differences of values that come in pieces."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpistrat.cli.statistics import summarize, tell_apart

ARRAYS = hnp.arrays(st.sampled_from(["f2", "f4", "f8", "i1", "u8", "i8", "?"]), st.integers(1, 40))
NUMBERS = st.lists(st.integers(1, 7), min_size=1)


def split(array, lengths):
    """Cut a flat array into pieces of these lengths, again and again."""
    pieces, begin = [], 0
    while begin < array.size:
        for length in lengths:
            pieces.append(array[begin : begin + length])
            begin += length
    return [piece for piece in pieces if piece.size]


@given(ARRAYS, NUMBERS)
def test_pieces_have_the_statistics_of_the_whole(array, lengths):
    found = summarize(split(array, lengths))
    whole = array[~np.isnan(array)] if array.dtype.kind == "f" else array
    assert found.nan_count == array.size - whole.size
    if whole.size == 0:
        assert (found.min, found.max, found.mean) == (None, None, None)
        return
    assert (found.min, found.max) == (whole.min(), whole.max())
    exact = [float(each) for each in whole]
    if all(map(math.isfinite, exact)):
        mean = math.fsum(each / whole.size for each in exact)
        scale = max(abs(each) for each in exact)
        assert found.mean == pytest.approx(mean, rel=1e-9, abs=1e-9 * scale)


@given(ARRAYS, NUMBERS, NUMBERS, st.data())
def test_differences_do_not_depend_on_the_pieces(a, lengths_a, lengths_b, data):
    b = a.copy()
    changed = data.draw(st.lists(st.integers(0, a.size - 1), unique=True))
    for index in changed:
        b[index] = not a[index] if a.dtype.kind == "b" else a[index] // 2 if a[index] > 4 else 7
    found = tell_apart(split(a, lengths_a), split(b, lengths_b))
    differs = [
        (x, y) for x, y in zip(a.tolist(), b.tolist(), strict=True) if x != y and (x == x or y == y)
    ]
    assert found.count == len(differs)
    gaps = [abs(x - y) for x, y in differs]
    if any(map(math.isnan, gaps)):
        assert math.isnan(found.largest)
    else:
        assert found.largest == pytest.approx(max(gaps, default=0))


def test_the_mean_of_the_largest_floats_is_no_infinity():
    largest = np.finfo(np.float64).max
    assert summarize([np.full(3, largest)]).mean == pytest.approx(largest)
