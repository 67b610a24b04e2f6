import numpy as np
import pytest
from ml_dtypes import bfloat16

from mpistrat.comm.wire import accumulator_dtype, is_narrow, result_dtype, wire_dtype
from mpistrat.options import ReduceOp

SUM, MEAN, MIN, MAX, PROD = ReduceOp


@pytest.mark.parametrize("char", "bhilqBHILQfdg")
@pytest.mark.parametrize("op", [SUM, MIN, MAX, PROD])
def test_c_numbers_travel_as_themselves(op, char):
    dtype = np.dtype(char)
    assert wire_dtype(op, dtype) == result_dtype(op, dtype) == dtype
    assert wire_dtype(op, dtype.newbyteorder(">")).isnative


@pytest.mark.parametrize("char", "FDG")
def test_complex(char):
    dtype = np.dtype(char)
    for op in (SUM, MEAN, PROD):
        assert wire_dtype(op, dtype) == dtype
    for op in (MIN, MAX):
        with pytest.raises(TypeError, match="complex"):
            wire_dtype(op, dtype)


@pytest.mark.parametrize("dtype", ["e", bfloat16])
def test_half_precision_accumulates_in_float32(dtype):
    dtype = np.dtype(dtype)
    assert is_narrow(dtype)
    assert accumulator_dtype(dtype) == np.float32
    for op in ReduceOp:
        assert wire_dtype(op, dtype) == np.float32
        assert result_dtype(op, dtype) == dtype


@pytest.mark.parametrize(("asked", "narrowed"), [("float16", "e"), ("bfloat16", bfloat16)])
def test_floats_travel_as_what_is_asked_for(asked, narrowed):
    for op in (SUM, MEAN):
        for char in ("f", "d", "g", ">f8"):
            assert wire_dtype(op, np.dtype(char), asked) == narrowed
        for own in ("e", bfloat16):
            assert wire_dtype(op, np.dtype(own), asked) == own
        assert wire_dtype(op, np.dtype(">f2"), asked).isnative
    for op in (MIN, MAX, PROD):
        for dtype in ("e", bfloat16, "f", "d", "q"):
            assert wire_dtype(op, np.dtype(dtype), asked) == wire_dtype(op, np.dtype(dtype))


@pytest.mark.parametrize("char", "bhilqBHILQFDG")
def test_integers_and_complex_numbers_travel_the_same_way_whatever_is_asked_for(char):
    for op in (SUM, MEAN):
        wire = wire_dtype(op, np.dtype(char), "float16")
        assert wire == wire_dtype(op, np.dtype(char))
        assert accumulator_dtype(wire) == wire


@pytest.mark.parametrize("char", "bhilqBHILQ")
def test_means_of_integers_are_float64(char):
    assert wire_dtype(MEAN, np.dtype(char)) == result_dtype(MEAN, np.dtype(char)) == np.float64


def test_bool():
    for op in (MIN, MAX):
        assert wire_dtype(op, np.dtype(bool)) == np.uint8
        assert result_dtype(op, np.dtype(bool)).kind == "b"
    for op in (SUM, MEAN, PROD):
        with pytest.raises(TypeError, match="cast first"):
            wire_dtype(op, np.dtype(bool))


@pytest.mark.parametrize("dtype", ["U3", "S3", "M8[s]", "m8[s]", object, [("a", "f4")]])
@pytest.mark.parametrize("op", list(ReduceOp))
def test_everything_else_is_refused(op, dtype):
    with pytest.raises(TypeError, match="cannot reduce"):
        wire_dtype(op, np.dtype(dtype))
