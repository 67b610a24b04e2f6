import enum
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat.checkpoint.marks import dump_json, load_json, marked
from mpistrat.checkpoint.state_json import join_state, split_state
from tests.collectives.test_dlpack import Exported, WithArray
from tests.devices import array_equal, assert_array_equal

keys = st.text(alphabet="abc", min_size=1, max_size=2) | st.sampled_from(["a/b", "b/c/a"])
arrays = st.integers(0, 3).map(lambda n: np.arange(n, dtype=np.float32))
leaves = st.none() | st.booleans() | st.integers() | st.text(max_size=3) | arrays
states = st.dictionaries(
    keys,
    st.recursive(
        leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3)
    ),
    max_size=4,
)


def same(a, b):
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and array_equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, list):
        return isinstance(b, list) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b


@given(states)
def test_a_state_comes_back_as_it_was(state):
    try:
        rest, found = split_state(state, "object")
    except ValueError:  # two entries with one path, such as "a/b" and "b" below "a"
        return
    assert same(state, join_state(json.loads(json.dumps(rest)), found))


def test_arrays_leave_the_json():
    state = {"epoch": 3, "mean": np.float32([1, 2]), "deep": {"count": np.int64(4), "name": "x"}}
    rest, found = split_state(state, "object")
    assert marked(rest) == {"epoch": 3, "deep": {"count": {"$scalar": "int64"}, "name": "x"}}
    assert {path: array.dtype.name for path, array in found.items()} == {
        "mean": "float32",
        "deep/count": "int64",
    }


def test_a_null_keeps_the_place_of_an_array_in_a_list():
    rest, found = split_state({"pair": [np.zeros(2), "x"]}, "object")
    assert rest == {"pair": [None, "x"]}
    assert list(found) == ["pair/0"]


@pytest.mark.parametrize(
    ("state", "error", "words"),
    [
        ([1], TypeError, "must return a dict, not list"),
        ({"a": {b"1": 2}}, TypeError, "key b'1' at 'a', a bytes"),
        ({"a": {np.int64(1): 2}}, TypeError, "at 'a', a int64"),
        ({"a": {"b": object()}}, TypeError, "holds a object at 'a/b'.*Convert it"),
        ({"a": {1, 2}}, TypeError, "holds a set at 'a'"),
        ({"a": np.array(["text"])}, TypeError, "dtype <U4 at 'a'"),
        ({"a/b": np.zeros(1), "a": {"b": np.zeros(1)}}, ValueError, "two arrays"),
        ({"a/b": np.zeros(1), "a": {"b": None}}, ValueError, "two entries"),
        ({"": np.zeros(1)}, ValueError, "cannot be the path"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_its_path(state, error, words):
    with pytest.raises(error, match=words.replace("(", r"\(")):
        split_state(state, "object")


def test_an_array_without_a_place_is_refused():
    with pytest.raises(ValueError, match="is both an array and a JSON value"):
        join_state({"a": 1}, {"a": np.zeros(1)})
    with pytest.raises(ValueError, match="is no dict"):
        join_state({"a": 1}, {"a/b": np.zeros(1)})


class Key(str, enum.Enum):
    TEXT = "text"


@pytest.mark.parametrize("state", [{"": {"x": np.ones(2)}}, {"": [np.ones(2)], "x": None}])
def test_arrays_below_an_empty_key_come_back_in_their_place(state):
    rest, found = split_state(state, "object")
    assert same(state, join_state(json.loads(json.dumps(rest)), found))


def test_a_key_that_is_an_enum_counts_by_its_text():
    rest, found = split_state({"a": {Key.TEXT: np.ones(2)}}, "object")
    assert list(found) == ["a/text"]
    joined = join_state(load_json(dump_json(rest).encode()), found)
    assert same(joined, {"a": {"text": np.ones(2)}})
    assert type(next(iter(joined["a"]))) is Key


def test_a_masked_array_is_refused_because_its_mask_would_be_lost():
    state = {"rows": np.ma.masked_array([1.0, 2.0], [False, True])}
    with pytest.raises(TypeError, match="masked array at 'rows'"):
        split_state(state, "object")


@pytest.mark.parametrize("kind", [Exported, WithArray])
def test_arrays_of_other_libraries_are_stored_as_numpys(kind):
    state = {"leaves": [kind(np.arange(3.0)), 1]}
    json_part, arrays = split_state(state, "tree")
    assert_array_equal(arrays["leaves/0"], np.arange(3.0))
    restored = join_state(json_part, arrays)["leaves"]
    assert restored[0].tolist() == [0, 1, 2]
    assert restored[1] == 1
