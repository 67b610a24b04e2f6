"""Transpose of bytes, compared with NumPy and with HDF5's shuffle filter."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.native import native_library

pytestmark = pytest.mark.skipif(native_library() is None, reason="needs the compiled module")


@given(
    st.one_of(st.integers(0, 40), st.integers(2000, 5000)),
    st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 17, 24, 100]),
)
def test_items_are_divided_and_joined(rows, columns):
    items = np.random.default_rng(rows).integers(256, size=(rows, columns), dtype=np.uint8)
    planes, back = np.empty(items.size, np.uint8), np.empty(items.size, np.uint8)
    native_library().transpose_bytes(items, planes)
    np.testing.assert_array_equal(planes.reshape(columns, rows), items.T)
    native_library().transpose_bytes(planes.reshape(columns, rows), back)
    np.testing.assert_array_equal(back.reshape(rows, columns), items)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (np.zeros(4, np.uint8), np.zeros(4, np.uint8)),
        (np.zeros((2, 2), np.int8), np.zeros(4, np.uint8)),
        (np.zeros((2, 2), np.uint8), np.zeros(5, np.uint8)),
        (np.zeros((2, 4), np.uint8)[:, ::2], np.zeros(4, np.uint8)),
    ],
)
def test_other_arrays_are_refused(source, target):
    with pytest.raises(TypeError):
        native_library().transpose_bytes(source, target)
