import numpy as np
import pytest

from mpistrat.comm.dtypes import result_dtype, wire_dtype
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


def test_half_precision_accumulates_in_float32():
    for op in ReduceOp:
        assert wire_dtype(op, np.dtype("e")) == np.float32
        assert result_dtype(op, np.dtype("e")) == np.float16


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
