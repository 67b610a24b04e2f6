"""Arrays split along one axis, against NumPy's cuts."""

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.variables.axis_split import AxisSplit


@st.composite
def splits(draw):
    """A shape, an axis of it and a number of parts."""
    shape = tuple(draw(st.lists(st.integers(0, 5), min_size=1, max_size=4)))
    return shape, draw(st.integers(0, len(shape) - 1)), draw(st.integers(1, 4))


def whole_of(shape):
    return np.arange(np.prod(shape), dtype=float).reshape(shape)


def parts_of(shape, axis, num_parts):
    return [AxisSplit(shape, axis, num_parts, index) for index in range(num_parts)]


@given(splits())
def test_the_parts_are_those_of_array_split(given_split):
    shape, axis, num_parts = given_split
    whole = whole_of(shape)
    expected = np.array_split(whole, num_parts, axis)
    for each, part in zip(parts_of(*given_split), expected, strict=True):
        assert each.own_shape == part.shape
        assert np.array_equal(each.cut_own(whole), part)
        if part.size:
            assert whole[each.own_offset] == part.flat[0]


@given(splits(), st.integers(1, 200))
def test_pieces_of_the_flat_whole_fill_each_part(given_split, length):
    whole = whole_of(given_split[0])
    for each in parts_of(*given_split):
        own = np.full(each.own_shape, -1.0)
        for start in range(0, whole.size, length):
            each.fill(own, start, whole.reshape(-1)[start : start + length])
        assert np.array_equal(own, each.cut_own(whole))


@given(splits(), st.integers(1, 200))
def test_slabs_join_to_the_flat_whole(given_split, length):
    whole = whole_of(given_split[0])
    parts = parts_of(*given_split)
    pieces = []
    for slab in parts[0].slabs(length):
        own = [each.own_of(slab, np.ascontiguousarray(each.cut_own(whole))) for each in parts]
        assert [each.size for each in own] == parts[0].counts(slab)
        pieces.append(parts[0].join(slab, own))
    joined = np.array([*itertools.chain.from_iterable(pieces)])
    assert np.array_equal(joined, whole.reshape(-1))
    row = int(np.prod(given_split[0][given_split[1] + 1 :]))
    assert all(piece.size <= max(length, row) for piece in pieces)
