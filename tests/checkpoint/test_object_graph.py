import collections
import dataclasses

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import Variable
from mpistrat.checkpoint.object_graph import check_can_hold_state, part_of_name, walk
from mpistrat.trackable import Trackable


class Layer:
    def __init__(self, model=None):
        self.kernel = Variable(np.zeros((2, 3), np.float32))
        self.activation = np.tanh
        self.units = 3
        self.model = model


class Model:
    def __init__(self):
        self.layers = [Layer(self), Layer(self)]
        self.names = {"first": "dense"}


class Position:
    def state_dict(self):
        return {"at": 3}

    def load_state_dict(self, state):
        pass


def test_paths_are_attributes_keys_and_numbers():
    tree = walk({"model": Model(), "extra": {"scale": Variable(1.0), 7: [Variable(2.0)]}})
    assert list(tree.variables) == [
        "model/layers/0/kernel",
        "model/layers/1/kernel",
        "extra/scale",
        "extra/7/0",
    ]
    assert not tree.stateful
    assert not tree.empty


def test_generators_and_objects_with_a_state_dict_are_stateful():
    tree = walk({"rng": np.random.default_rng(0), "deep": [Position()]})
    assert list(tree.stateful) == ["rng", "deep/0"]


def test_children_of_trackables_may_have_slashes_in_their_names():
    outer, inner = Trackable(), Trackable()
    outer._attach_child("momentum/dense/kernel", Variable(1.0))
    outer._attach_child("inner", inner)
    inner._attach_child("x", Variable(2.0))
    tree = walk({"optimizer": outer})
    assert list(tree.variables) == ["optimizer/momentum/dense/kernel", "optimizer/inner/x"]
    assert list(tree.trackables) == ["optimizer", "optimizer/inner"]


def slots(*pairs):
    optimizer = Trackable()
    for of, slot in pairs:
        optimizer._attach_child("momentum", slot, of=of)
    return optimizer


def test_dependent_children_have_the_path_of_what_they_belong_to():
    first, second, outside = (Variable(0.0, name="w/é") for _ in range(3))
    pairs = [(each, Variable(0.0)) for each in (second, first, outside)]
    optimizer = slots(*pairs)
    tree = walk({"optimizer": optimizer, "model": {"b": second, "a": [first]}})
    assert list(tree.variables) == [
        *("model/b", "model/a/0"),
        *("optimizer/momentum/model/b", "optimizer/momentum/model/a/0"),
        "optimizer/momentum/w%2Fé",
    ]
    for path, (_, slot) in zip(list(tree.variables)[2:], pairs, strict=True):
        assert tree.variables[path] is slot
    assert list(tree.outside) == ["optimizer/momentum/w%2Fé"]


def test_the_first_path_of_a_variable_names_its_dependents():
    variable = Variable(0.0)
    tree = walk({"optimizer": slots((variable, Variable(0.0))), "a": variable, "b": [variable]})
    assert list(tree.variables) == ["a", "b/0", "optimizer/momentum/a"]


def test_dependents_that_only_a_name_could_tell_apart_are_refused():
    pairs = [(Variable(0.0, name="w"), Variable(0.0)) for _ in range(2)]
    with pytest.raises(ValueError, match=r"called 'w' that are not in it.* its own name"):
        walk({"optimizer": slots(*pairs)})
    assert len(walk({"optimizer": slots(*pairs), "model": pairs[0][0]}).paths()) == 3


def test_known_variables_give_paths_to_dependents_that_come_later():
    variable = Variable(0.0)
    optimizer = slots((variable, Variable(0.0)))
    tree = walk({"optimizer": optimizer}, known={"model/w": variable})
    assert list(tree.variables) == ["optimizer/momentum/model/w"]


@pytest.mark.parametrize(
    ("name", "part"),
    [("a/b", "a%2Fb"), ("a%2Fb", "a%252Fb"), (".", "%2E"), ("", "%"), ("a\0b", "a%00b")],
)
def test_names_as_parts_of_paths(name, part):
    assert part_of_name(name) == part


def test_a_prefix_stands_before_every_path():
    assert walk({"b": Variable(0)}, prefix="a").paths() == ["a/b"]


def test_one_variable_may_have_two_paths():
    variable = Variable(0.0)
    assert walk({"a": variable, "b": [variable]}).paths() == ["a", "b/0"]


def test_plain_objects_without_state_are_noted():
    class Empty:
        pass

    assert walk({"model": Empty(), "list": []}).empty == ["model"]


@pytest.mark.parametrize(
    "value", [3, 2.5, "text", None, np.zeros(3), np.float32(1), max, Variable, np, len]
)
def test_what_holds_no_state_is_refused_with_its_path(value):
    with pytest.raises(TypeError, match=r"cannot save 'a/0', a .*ms\.Variable"):
        walk({"a": [value]})
    with pytest.raises(TypeError, match="cannot save 'a'"):
        check_can_hold_state("a", value)


@pytest.mark.parametrize(
    ("objects", "words"),
    [
        ({"a": {"1": Variable(0), 1: Variable(0)}}, "Two objects have the path 'a/1'"),
        ({"a": Variable(0), "a/b": Variable(0)}, "'a' and 'a/b' cannot both"),
        ({"a": Position(), "a/b/c": Variable(0)}, "'a' and 'a/b/c' cannot both"),
        ({"": Variable(0)}, "cannot be the path"),
        ({"a": {"": Variable(0)}}, "cannot be the path"),
        ({"a": {"./b": Variable(0)}}, "cannot be the path"),
        ({"a\0b": Variable(0)}, "cannot be the path"),
    ],
)
def test_paths_that_a_file_cannot_hold_are_refused(objects, words):
    with pytest.raises(ValueError, match=words):
        walk(objects)


def test_containers_that_hold_themselves_are_walked_once():
    loop = [Variable(0)]
    loop.append(loop)
    assert walk({"loop": loop}).paths() == ["loop/0"]


class Head:
    __slots__ = ("__bias", "unset", "weight")

    def __init__(self, value):
        self.weight = ms.Variable(value)
        self.__bias = ms.Variable(-value)

    def values(self):
        return [float(self.weight.numpy()), float(self.__bias.numpy())]


@dataclasses.dataclass(slots=True)
class Tail(Head):
    scale: ms.Variable


class Network:
    def __init__(self, value):
        self.head = Head(value)
        self.last = Tail(ms.Variable(value))
        self.last.weight = ms.Variable(2 * value)
        self.history = collections.deque([ms.Variable(value)], maxlen=3)

    def values(self):
        own = [self.last.scale, self.last.weight, *self.history]
        return [*self.head.values(), *(float(each.numpy()) for each in own)]


def test_variables_in_slots_and_deques_are_found(tmp_path):
    saved, model = Network(1.0), Network(5.0)
    path = ms.Checkpoint(model=saved).write(tmp_path / "run.h5")
    ms.Checkpoint(model=model).restore(path).assert_consumed()
    assert model.values() == saved.values() == [1.0, -1.0, 1.0, 2.0, 1.0]


def test_a_deque_can_be_an_object_of_a_checkpoint(tmp_path):
    queue = collections.deque([ms.Variable(1.0)])
    path = ms.Checkpoint(queue=queue).write(tmp_path / "run.h5")
    other = collections.deque([ms.Variable(2.0)])
    ms.Checkpoint(queue=other).restore(path).assert_consumed()
    assert float(other[0].numpy()) == 1.0
