"""Casts give what NumPy's give, to the bit, but silently."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from ml_dtypes import bfloat16

from mpistrat.comm.wire import cast, cast_into

EVERY_HALF = np.arange(2**16, dtype=np.uint16).view(np.float16)


def numpy_cast(array, dtype):
    with np.errstate(all="ignore"):
        return array.astype(dtype)


@pytest.mark.parametrize("dtype", ["f4", "f8", "g"])
def test_every_float16_there_and_back(dtype):
    wide = cast(EVERY_HALF, np.dtype(dtype))
    np.testing.assert_array_equal(wide, numpy_cast(EVERY_HALF, dtype), strict=True)
    np.testing.assert_array_equal(np.signbit(wide), np.signbit(EVERY_HALF))
    back = cast(wide, np.dtype("f2"))
    is_number = ~np.isnan(EVERY_HALF)
    assert back[is_number].tobytes() == EVERY_HALF[is_number].tobytes()
    assert np.isnan(back[~is_number]).all()


@pytest.mark.parametrize("dtype", ["f4", "f8", ">f4"])
def test_between_two_float16_and_beside_the_middle(dtype):
    finite = np.sort(EVERY_HALF[np.isfinite(EVERY_HALF)].astype(np.float64))
    middle = (finite[:-1] + finite[1:]) / 2
    given = np.concatenate([np.nextafter(middle, -np.inf), middle, np.nextafter(middle, np.inf)])
    given = given.astype(dtype)
    assert cast(given, np.dtype("f2")).tobytes() == numpy_cast(given, "f2").tobytes()


@given(st.lists(st.floats(width=32)), st.sampled_from(["f2", bfloat16, "f4", "f8"]))
def test_any_float32(numbers, dtype):
    array = np.array(numbers, np.float32)
    assert cast(array, np.dtype(dtype)).tobytes() == numpy_cast(array, dtype).tobytes()


@given(st.lists(st.floats()))
def test_any_float64(numbers):
    array = np.array(numbers, np.float64)
    assert cast(array, np.dtype("f2")).tobytes() == numpy_cast(array, "f2").tobytes()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (5,), (300, 401)])
@pytest.mark.parametrize("target", ["f2", bfloat16, "f8", "i4"])
@pytest.mark.parametrize("source", ["f2", "f4", ">f8", "i2"])
def test_shapes_and_strides(shape, source, target):
    array = np.random.default_rng(0).integers(-50, 50, shape).astype(source)
    for each in (array, array.T.copy().T, array[..., ::-1] if shape else array):
        result = cast(each, np.dtype(target))
        assert result.flags.c_contiguous
        assert result.tolist() == each.astype(target).tolist()
        inside = np.zeros((*shape, 2), target)[..., 0]
        cast_into(inside, each)
        assert inside.tolist() == result.tolist()


def test_copies_where_asked_or_needed():
    array = np.ones(3, np.float32)
    assert cast(array, np.dtype("f4")) is array
    assert not np.shares_memory(cast(array, np.dtype("f4"), copy=True), array)
    assert cast(np.ones((2, 3), np.float32).T, np.dtype("f4")).flags.c_contiguous


@pytest.mark.parametrize("dtype", ["e", bfloat16, "f"])
def test_overflow_is_silent(dtype):
    result = cast(np.array([1e300, -1e300, 1, np.nan]), np.dtype(dtype))
    np.testing.assert_array_equal(result.astype(float), [np.inf, -np.inf, 1, np.nan])
