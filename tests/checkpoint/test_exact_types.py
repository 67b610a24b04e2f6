"""Types of a state without tensors: they come back as they were, or the save is refused."""

import collections
import enum
import math
import sys

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.checkpoint import marks
from tests.devices import array_equal
from tests.helpers import Holder


class Color(enum.IntEnum):
    RED = 1


class Text(str, enum.Enum):
    A = "a"


class Number(int):
    pass


class Quantity(np.ndarray):
    pass


class Names(list):
    pass


Point = collections.namedtuple("Point", "x y")


KEPT = {
    "tuples": {"t": (1, (2, [3]), ()), "l": [(), ((),)]},
    "named tuples": {"p": Point(1, Point((2,), [np.float32(3)])), "l": [Point(0, None)]},
    "arrays in tuples": {"t": (np.arange(3), None, Point(np.ones(2), np.zeros(0)))},
    "integer keys": {"layers": {0: "a", 10: np.ones(2), -1: {2: (3,)}}, 7: 8},
    "keys of all kinds": {1: "x", "1": "y", None: 2, False: 3, 0.5: 4, (1, "a"): 5, Text.A: 6},
    "keys of named tuples": {Point(1, 2): 3, np.float64(0.25): 4, np.str_("b"): 5},
    "scalars": {
        "a": np.float32(1.5),
        "b": [np.int64(3), np.bool_(True), np.complex64(1 + 2j)],
        "c": (np.float16(0.1), np.longdouble(0.1), np.uint8(255)),
    },
    "scalars that are floats": {"f": np.float64(0.1), "n": [np.float64(np.nan), math.inf, -0.0]},
    "texts": {"s": np.str_("x"), "plain": "x"},
    "enums": {"c": Color.RED, "t": (Text.A,), "l": [Color.RED, 1]},
    "ordered": {
        "o": collections.OrderedDict(b=1, a=np.ones(2)),
        "deep": {1: collections.OrderedDict()},
    },
    "counter": {"c": collections.Counter("aab"), "of numbers": collections.Counter([1, 1])},
    "marks": {"$scalar": "int64", "$class": {"class": "a:b", "items": []}, "$numpy": ["str", "a"]},
    "one mark": {"a": {"$scalar": "int64"}, "b": {"$class": {"class": "a", "items": 1}}},
}

REFUSED = {
    "defaultdict": (collections.defaultdict(list, a=[1]), "a defaultdict at 'v'.*with dict()"),
    "int": (Number(3), "a Number at 'v'.*with int()"),
    "list": (Names([1]), "a Names at 'v'.*with list()"),
    "array": (np.ones(2).view(Quantity), "a Quantity at 'v'.*numpy.asarray"),
    "local class": (collections.namedtuple("Local", "x")(1), "no class is found as"),
    "key": ({np.int64(1): 2}, "at 'v', a int64"),
    "bytes": ([b"x"], "a bytes at 'v/0'"),
}


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and array_equal(a, b)
    if isinstance(a, dict):
        pairs = zip(a.items(), b.items(), strict=True)
        return len(a) == len(b) and all(same(k, m) and same(v, w) for (k, v), (m, w) in pairs)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, float | np.floating):
        return (a != a and b != b) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    return a == b


@pytest.mark.parametrize("name", KEPT)
def test_they_come_back(strategy, mpi_tmp_path, name):
    state = KEPT[name]
    with strategy.scope():
        path = ms.Checkpoint(box=Holder(state)).write(mpi_tmp_path / "state.h5")
        found = Holder(state)
        ms.Checkpoint(box=found).restore(path).assert_consumed()
        assert found.state is not state
        assert same(found.state, state), found.state
        again = Holder(found.state)
        ms.Checkpoint(box=again).write(path)
        ms.Checkpoint(box=again).restore(path)
        assert same(again.state, state), again.state


@pytest.mark.parametrize("name", REFUSED)
def test_they_are_refused(strategy, mpi_tmp_path, name):
    value, words = REFUSED[name]
    with strategy.scope(), pytest.raises(TypeError, match=words.replace("()", r"\(\)")):
        ms.Checkpoint(box=Holder({"v": value})).write(mpi_tmp_path / "state.h5")


def test_state_of_each_replica(strategy, rank, mpi_tmp_path):
    state = {"p": Point(rank, np.float64(rank)), "of": {rank: (np.int32(rank),)}}
    with strategy.scope():
        own = ms.PerReplicaState(Holder(state))
        path = ms.Checkpoint(own=own).write(mpi_tmp_path / "state.h5")
        found = Holder(state)
        ms.Checkpoint(own=ms.PerReplicaState(found)).restore(path)
    assert found.state is not state
    assert same(found.state, state), found.state


def test_a_class_that_is_not_there(strategy, mpi_tmp_path, monkeypatch):
    state = {"p": Point(1, 2), "c": Color.RED}
    with strategy.scope():
        path = ms.Checkpoint(box=Holder(state)).write(mpi_tmp_path / "state.h5")
        for name in ("Point", "Color"):
            monkeypatch.delattr(sys.modules[__name__], name)
        found = Holder(None)
        with pytest.warns(UserWarning, match="not imported") as caught:
            ms.Checkpoint(box=found).restore(path)
    # A strategy that another test has left may be collected here, with a warning of its own.
    texts = sorted(str(each.message) for each in caught if each.category is UserWarning)
    assert "Color" in texts[0]
    assert "Point" in texts[1]
    assert (found.state["p"].x, found.state["p"].y, found.state["c"]) == (1, 2, 1)


def test_a_file_names_no_other_classes():
    """Only what is a named tuple or an enum is called."""
    for name in ("os:system", "builtins:print", "subprocess:Popen", "builtins:tuple", "no:where"):
        with pytest.warns(UserWarning, match="has not imported|different fields"):
            assert marks.instance_of_mark({"class": name}, 3) == 3
        with pytest.warns(UserWarning, match="has not imported|different fields"):
            made = marks.instance_of_mark({"class": name, "fields": ["x"]}, (3,))
        assert made.x == 3
    with pytest.raises(ValueError, match="no class"):
        marks.instance_of_mark({"class": "os:system"}, [1])
