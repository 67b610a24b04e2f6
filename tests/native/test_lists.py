"""Compiled functions for lists of arrays agree with NumPy."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from mpistrat.native import native_library

library = native_library()
pytestmark = pytest.mark.skipif(library is None, reason="nothing is compiled for this machine")

DTYPES = [np.dtype(char) for char in "?bBhHiIlLqQefdgFDG"]
SHAPES = hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5)


@st.composite
def lists(draw):
    shapes = draw(st.lists(SHAPES, max_size=8))
    dtype = draw(st.sampled_from(DTYPES))
    return [np.arange(np.prod(shape)).astype(dtype).reshape(shape) for shape in shapes]


@given(st.lists(st.tuples(st.sampled_from(DTYPES), SHAPES), max_size=6), st.data())
def test_descriptions_are_equal_where_dtypes_and_shapes_are(kinds, data):
    one = [np.zeros(shape, dtype) for dtype, shape in kinds]
    others = data.draw(st.permutations(kinds))
    other = [np.ones(shape, dtype) for dtype, shape in others]
    # By number, because C has two names for one integer.
    known = [[(dtype.num, shape) for dtype, shape in each] for each in (kinds, others)]
    assert (library.describe(one) == library.describe(other)) == (known[0] == known[1])


@pytest.mark.parametrize(
    "leaf",
    [
        *(1, 1.5, None, "text", [1], np.float32(1)),
        *(np.zeros((4, 4))[:, ::2], np.zeros((4, 4)).T, np.zeros(3, ">f4"), np.zeros(3, object)),
        *(np.zeros(3, "U2"), np.zeros(3, "M8[s]"), np.zeros(3, [("a", "f4")])),
        np.frombuffer(bytearray(17), np.uint8)[1:].view(np.float64),
        np.ma.masked_array(np.zeros(3)),
        np.zeros((2, 2)).view(np.matrix),
    ],
    ids=str,
)
def test_what_is_not_plain_is_not_described(leaf):
    plain = np.zeros(3)
    if isinstance(leaf, np.ndarray) and type(leaf) is np.ndarray and leaf.flags.aligned:
        assert not (leaf.flags.c_contiguous and leaf.dtype.isnative and leaf.dtype.kind in "biufc")
    assert library.describe([plain, leaf, plain]) is None
    assert library.describe((plain,)) is None


@given(lists())
def test_join_and_split_are_inverse(arrays):
    flat = np.concatenate([np.zeros(0), *[array.reshape(-1) for array in arrays]])
    dtype = arrays[0].dtype if arrays else np.dtype(float)
    joined = np.zeros(flat.size, dtype)
    library.join(arrays, joined)
    np.testing.assert_array_equal(joined, flat.astype(dtype))
    parts = library.split(joined, arrays)
    assert [(part.shape, part.dtype) for part in parts] == [(a.shape, dtype) for a in arrays]
    for part, array in zip(parts, arrays, strict=True):
        np.testing.assert_array_equal(part, array)
        assert part.flags.owndata
        assert part.flags.writeable


def test_lengths_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="array 1"):
        library.join([np.zeros(3), np.zeros(3)], np.zeros(5))
    with pytest.raises(ValueError, match="array 1"):
        library.split(np.zeros(5), [np.zeros(3), np.zeros(3)])
    with pytest.raises(TypeError):
        library.split(np.zeros(5), [np.zeros(3), 4])
    with pytest.raises(TypeError):
        library.join((np.zeros(3),), np.zeros(3))


@given(st.sampled_from(DTYPES), SHAPES)
def test_an_array_at_an_address_keeps_its_owner(dtype, shape):
    class Owner:
        pass

    memory = np.arange(200_000, dtype=np.uint8)
    owner = Owner()
    references = sys.getrefcount(owner)
    array = library.array_at(library.address(memory), shape, dtype, owner)
    assert array.shape == shape
    assert array.dtype == dtype
    assert sys.getrefcount(owner) == references + 1
    view = array.reshape(-1).view(np.uint8)
    assert view.tobytes() == memory[: array.nbytes].tobytes()
    del array
    assert sys.getrefcount(owner) == references + 1
    del view
    assert sys.getrefcount(owner) == references
