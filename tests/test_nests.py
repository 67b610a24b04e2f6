import collections
import dataclasses
import enum
import operator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mpistrat import nests

Point = collections.namedtuple("Point", "x y")


@dataclasses.dataclass(frozen=True)
class Pair:
    first: object
    second: object


def containers(children):
    return (
        st.lists(children, max_size=3)
        | st.lists(children, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=2), children, max_size=3)
        | st.builds(Point, children, children)
        | st.builds(Pair, children, children)
    )


NESTS = st.recursive(st.none() | st.integers() | st.text(max_size=2), containers, max_leaves=8)


@given(NESTS)
def test_round_trip(nest):
    leaves, structure = nests.flatten(nest)
    assert nests.unflatten(structure, leaves) == nest
    paths, same_leaves, same_structure = nests.flatten_with_paths(nest)
    assert same_leaves == leaves
    assert same_structure == structure
    assert len(set(paths)) == len(paths) == len(leaves)


def test_dicts_match_by_key():
    first, second = {"a": 1, "b": 2}, {"b": 4, "a": 3}
    assert nests.flatten(first)[1] == nests.flatten(second)[1]
    assert nests.flatten(second)[0] == [3, 4]
    assert list(nests.map_nest(str, second)) == ["b", "a"]


@pytest.mark.parametrize("kind", [list, tuple])
def test_flat_nests_have_the_structures_that_optree_finds(kind):
    arrays = kind([np.ones(2), np.zeros(3), None, 4])
    leaves, structure = nests.flatten(arrays)
    assert all(map(operator.is_, leaves, arrays))
    # Within a dict optree takes the list apart.
    assert nests.flatten({"a": arrays})[1].child(0) == structure
    assert nests.signature(structure) == nests.signature_of_flat(kind is list, 4)
    assert type(nests.unflatten(structure, leaves)) is kind
    (leaf,), _ = nests.flatten(arrays, atoms=(kind,))
    assert leaf is arrays
    assert nests.flatten(kind())[0] == []


def test_structures_of_long_lists_are_not_kept():
    kept = nests._flat_structure.cache_info().currsize
    for length in range(10_000, 10_100):
        leaves, structure = nests.flatten([0.5] * length)
        assert len(leaves) == structure.num_leaves == length
    assert nests._flat_structure.cache_info().currsize == kept


def test_structures_of_one_dataclass_are_equal_and_keep_no_values():
    one, other = nests.flatten(Pair([1], 2))[1], nests.flatten(Pair([3], 4))[1]
    assert one == other
    assert hash(one) == hash(other)
    assert repr(one) == repr(other)
    assert nests.flatten(Pair(1, 2))[1] != nests.flatten(Pair((1,), 2))[1]


def test_a_leaf_type_is_no_container():
    @nests.leaf_type
    @dataclasses.dataclass
    class Leaf:
        inside: list

    leaf = Leaf([1])
    assert nests.flatten([leaf])[0] == [leaf]


class Colour(enum.Enum):
    RED = 1
    BLUE = 2


class Config(dict):
    pass


def signature(nest):
    return nests.signature(nests.flatten(nest)[1])


def test_signatures_depend_on_keys_alone():
    assert signature({"b": 1, "a": [2, None]}) == signature({"a": [3, 4], "b": 5})
    first = collections.defaultdict(lambda: 0, a=1)
    second = collections.defaultdict(lambda: 1, a=2)
    assert signature(first) == signature(second)
    assert signature({frozenset("abc"): 1}) == signature({frozenset("cba"): 1})
    assert "0x" not in signature({object(): 1, Colour.RED: 2})
    assert signature([1]) != signature((1,)) != signature({"a": 1}) != signature({"b": 1})
    for same in [(1, True, 1.0, np.int64(1)), ("a", np.str_("a")), ((1, "a"), (True, "a"))]:
        assert len({signature({key: 0}) for key in same}) == 1, "whichever comes first"
    assert signature({1: 0}) != signature({1.5: 0}) != signature({"1": 0})
    assert signature(Pair(1, 2)) == signature(Pair(3, 4)) != signature(Pair(1, [2]))
    assert signature(3) == "*"


def test_dict_subclasses_are_containers_and_match_by_key():
    first, second = Config(a=1, b=[2]), Config(b=[4], a=3)
    assert nests.flatten(first)[1] == nests.flatten(second)[1]
    back = nests.map_nest(lambda x: x * 10, second)
    assert isinstance(back, Config)
    assert back == {"a": 30, "b": [40]}
    assert second == {"a": 3, "b": [4]}
    counter = collections.Counter("aab")
    assert nests.map_nest(str, counter) == {"a": "2", "b": "1"}
    colours = Config({Colour.RED: 1, Colour.BLUE: 2})
    assert nests.flatten(colours)[0] == nests.flatten(Config(reversed(colours.items())))[0]


class Slots:
    __slots__ = ("shown",)


@dataclasses.dataclass
class Slotted(Slots):
    value: object


@dataclasses.dataclass
class Counted:
    value: object

    def __copy__(self):
        twin = Counted(self.value)
        twin.copies = getattr(self, "copies", 0) + 1
        return twin


def test_copies_of_dataclasses_keep_what_is_no_field():
    pair, slotted, counted = Pair(1, 2), Slotted(1), Counted(1)
    object.__setattr__(pair, "more", "kept")
    slotted.shown = "kept"
    for _ in range(2):  # the class is known from the second time on
        assert nests.map_nest(str, pair) == Pair("1", "2")
        assert nests.map_nest(str, pair).more == "kept"
        assert not hasattr(nests.map_nest(str, Pair(1, 2)), "more")
        assert nests.map_nest(str, slotted).shown == "kept"
        assert nests.map_nest(str, slotted).value == "1"
        assert nests.map_nest(str, counted).copies >= 1
