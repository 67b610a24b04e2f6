import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.checkpoint.marks import dump_json, load_json

keys = st.text(max_size=2) | st.sampled_from(["$float", "$dict"])
leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.floats()
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=2)
)


@given(values)
def test_a_value_comes_back_from_strict_json(value):
    text = dump_json(value)
    json.loads(text, parse_constant=pytest.fail)
    assert repr(load_json(text.encode())) == repr(value)  # NaN does not equal itself


def test_marks():
    assert json.loads(dump_json({"best": float("inf"), "rate": [float("nan")]})) == {
        "best": {"$float": "inf"},
        "rate": [{"$float": "nan"}],
    }
    assert json.loads(dump_json(np.float64("-inf"))) == {"$float": "-inf"}
    assert json.loads(dump_json({"$float": 1})) == {"$dict": {"$float": 1}}


@pytest.mark.parametrize(
    "text", [b"", b"{", b'{"$float": "big"}', b'{"$float": []}', b'{"$dict": 1}']
)
def test_what_is_no_value_is_refused(text):
    with pytest.raises((ValueError, TypeError)):
        load_json(text)
