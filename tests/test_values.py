"""Distributed values as arrays: operators of `Mirrored`, conversions of both."""

import copy
import operator

import numpy as np
import pytest

import mpistrat as ms

ARRAY = np.array([1.0, -2.0, 3.0])
BINARY = [
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.floordiv),
    *(operator.mod, operator.pow, operator.eq, operator.ne, operator.lt, operator.ge),
]


@pytest.mark.parametrize("apply", BINARY, ids=lambda each: each.__name__)
@pytest.mark.parametrize("component", [2.0, ARRAY], ids=["number", "array"])
def test_mirrored_has_the_operators_of_arrays(apply, component):
    mirrored = ms.Mirrored(component)
    for other in (3.0, np.abs(ARRAY), ms.Variable(2.0)):
        plain = other.value() if isinstance(other, ms.Variable) else other
        result = apply(mirrored, other)
        assert not isinstance(result, ms.DistributedValues)
        np.testing.assert_array_equal(result, apply(np.asarray(component), plain))
        np.testing.assert_array_equal(apply(other, mirrored), apply(plain, np.asarray(component)))
    np.testing.assert_array_equal(apply(mirrored, mirrored), apply(component, component))


def test_mirrored_converts_as_its_component_does():
    number, array = ms.Mirrored(np.float32(2.5)), ms.Mirrored(ARRAY)
    assert (float(number), int(number), complex(number), bool(number)) == (2.5, 2, 2.5, True)
    assert [10, 20, 30][ms.Mirrored(np.int64(1))] == 20
    assert (-array).tolist() == [-1, 2, -3]
    assert abs(array).tolist() == [1, 2, 3]
    assert (array @ ARRAY, len(array), array[1], list(array)) == (14, 3, -2, [1, -2, 3])
    assert np.asarray(array) is ARRAY
    assert np.asarray(array, np.float32).dtype == np.float32
    assert np.array(array) is not ARRAY
    assert np.maximum(array, 0).tolist() == [1, 0, 3]
    assert np.concatenate([array, array]).shape == (6,)
    with pytest.raises(TypeError, match="unhashable"):
        hash(array)


def test_mirrored_is_never_written_to():
    mirrored = number = ms.Mirrored(2.0)
    number += 1
    assert (number, mirrored.values) == (3.0, (2.0,))
    with pytest.raises(TypeError, match="output"):
        np.add(1, 2, out=mirrored)


def test_results_of_a_strategy_are_mirrored_values_with_operators(strategy, rank, size):
    total = strategy.extended.reduce_to("sum", np.full(2, float(rank)), ms.PerReplica(0))
    assert isinstance(total, ms.Mirrored)
    assert (total / size == (size - 1) / 2).all()


def test_asarray_of_per_replica_is_this_rank_s_component(strategy, rank):
    value = strategy.run(lambda: np.full(2, rank))
    assert np.asarray(value) is value.values[0]
    assert np.asarray(strategy.run(lambda: rank)).tolist() == rank
    assert np.asarray(value, np.float32).dtype == np.float32


def test_per_replica_takes_no_part_in_arithmetic(strategy, size):
    value = strategy.run(lambda: np.ones(2))
    for compute in (lambda: np.ones(2) + value, lambda: np.add(value, 1)):
        with pytest.raises(TypeError, match=r"forgot strategy\.run\?"):
            compute()
    for refused, error in (
        (lambda: strategy.extended.broadcast_to(value, "cpu:0"), ValueError),
        (lambda: ms.Variable(value), ValueError),
        (lambda: ms.IndexedSlices(value, [0, 1]), TypeError),
        (lambda: ms.layers.BatchNorm(2).forward(value), TypeError),
    ):
        with pytest.raises(error, match="PerReplica"):
            refused()
    assert strategy.reduce("sum", 1) == size


OUTSIDE_RUN = {
    "all_reduce": lambda value: ms.get_replica_context().all_reduce("sum", value),
    "all_reduce of a nest": lambda value: ms.get_replica_context().all_reduce("sum", [1, value]),
    "start_all_reduce": lambda value: ms.get_replica_context().start_all_reduce("sum", value),
    "all_gather": lambda value: ms.get_replica_context().all_gather(value, 0),
    "BatchNorm": lambda value: ms.layers.BatchNorm(2).forward(value),
    "pullback": lambda value: ms.gradients.all_reduce_pullback("sum", value, value, value),
}


@pytest.mark.parametrize("call", OUTSIDE_RUN.values(), ids=OUTSIDE_RUN)
def test_per_replica_outside_of_run_asks_for_strategy_run(strategy, size, call):
    value = strategy.run(lambda: np.ones((1, 2)))
    with pytest.raises(TypeError, match=r"PerReplica: forgot strategy\.run\?"):
        call(value)
    assert ms.get_replica_context().all_reduce("sum", [1, np.ones(2)])[0] == 1
    assert strategy.reduce("sum", 1) == size


def test_collectives_of_a_scope_ask_for_strategy_run(strategy, size):
    value = strategy.run(lambda: np.ones(2))
    with strategy.scope():
        variable = ms.Variable(np.ones(2))
        on_read = ms.Variable(np.ones(2), synchronization=ms.VariableSynchronization.ON_READ)
    calls = (
        lambda: variable.assign(value),
        lambda: on_read.assign_add(value),
        lambda: strategy.extended.broadcast_to(value, "cpu:0"),
        lambda: ms.optimizers.SGD(0.1).apply_gradients([(value, variable)]),
        lambda: ms.Variable(value),
    )
    for call in calls:
        with pytest.raises(ValueError, match=r"forgot strategy\.run\?"), strategy.scope():
            call()
    assert strategy.reduce("sum", 1) == size


USES = {
    "add": lambda v: v + 1,
    "radd": lambda v: 1 + v,
    "array add": lambda v: np.ones(3) + v,
    "scalar add": lambda v: np.float64(1) + v,
    "in place": lambda v: v.__iadd__(1),
    "neg": lambda v: -v,
    "matmul": lambda v: v @ v,
    "divmod": lambda v: divmod(v, 2),
    "less": lambda v: v < 2,
    "equal": lambda v: v == 2,
    "not equal": lambda v: v != np.ones(3),
    "equal to another": lambda v: v == ms.PerReplica(1),
    "getitem": lambda v: v[0],
    "len": len,
    "iter": list,
    "in": lambda v: 2 in v,
    "bool": bool,
    "float": float,
    "int": int,
    "index": lambda v: range(v),
    "round": round,
    "sum": lambda v: sum([v, v]),
    "format": lambda v: f"{v:.3f}",
    "percent": lambda v: "%.3f" % v,  # noqa: UP031
    "mean": np.mean,
    "stack": lambda v: np.stack([v, v]),
    "allclose": lambda v: np.allclose(v, 1),
    "exp": np.exp,
    "shape": np.shape,
}


@pytest.mark.parametrize("component", [np.arange(3.0), 2.0, np.float32(2)], ids=str)
@pytest.mark.parametrize("use", USES)
def test_a_per_replica_refuses_to_be_an_array_with_one_text(strategy, component, use):
    for value in (ms.PerReplica(component), strategy.run(lambda: component)):
        with pytest.raises(TypeError) as info:
            USES[use](value)
        for remedy in ("strategy.reduce", "strategy.run", "numpy.asarray(value)"):
            assert remedy in str(info.value)


@pytest.mark.parametrize("name", ["shape", "dtype", "mean", "sum", "T", "ndim", "item", "tolist"])
def test_a_per_replica_has_no_attributes_of_arrays(name):
    value = ms.PerReplica(np.arange(3.0))
    with pytest.raises(AttributeError, match=r"strategy\.reduce.*numpy\.asarray\(value\)"):
        getattr(value, name)
    assert not hasattr(value, name)


def test_a_per_replica_can_be_kept_shown_and_converted():
    value = ms.PerReplica(np.arange(3.0))
    assert np.asarray(value).tolist() == [0, 1, 2]
    assert str(value) == repr(value) == f"{value}" == "PerReplica(array([0., 1., 2.]))"
    assert {value: 1}[value] == 1
    assert value is not None
    assert value != "text"
    assert copy.deepcopy(value).values[0].tolist() == [0, 1, 2]
