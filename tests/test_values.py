"""Distributed values as arrays: operators of `Mirrored`, conversions of both."""

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
