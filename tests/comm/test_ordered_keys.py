import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mpistrat.comm.wire import as_floats, as_ordered_integers
from mpistrat.options import ReduceOp


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX])
@settings(max_examples=30)
@given(values=st.lists(st.floats(width=32), min_size=1, max_size=20))
def test_integers_have_the_order_of_numpy(op, dtype, values):
    floats = np.array(values, dtype)
    buffer = floats.copy()
    keys = as_ordered_integers(op, buffer)
    assert keys.dtype.kind == "i"
    fold = np.min if op is ReduceOp.MIN else np.max
    best = np.array([fold(keys)])
    as_floats(op, best, floats.dtype)
    assert best.view(dtype)[0] == fold(floats) or (
        np.isnan(best.view(dtype)[0]) and np.isnan(floats).any()
    )
    as_floats(op, keys, floats.dtype)
    np.testing.assert_array_equal(buffer, floats)


def test_other_reductions_and_dtypes_stay():
    for op, dtype in ((ReduceOp.SUM, "f4"), (ReduceOp.MAX, "i4"), (ReduceOp.MAX, "g")):
        buffer = np.ones(2, dtype)
        assert as_ordered_integers(op, buffer) is buffer
        as_floats(op, buffer, buffer.dtype)
        assert buffer.tolist() == [1, 1]
