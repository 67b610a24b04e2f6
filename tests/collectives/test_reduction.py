import numpy as np
import pytest

import mpistrat as ms
from tests.devices import assert_array_equal
from tests.helpers import result_of


def all_reduce(strategy, value, op="sum"):
    return result_of(strategy, lambda: ms.get_replica_context().all_reduce(op, value))


@pytest.mark.fast
def test_equal_calls_share_one_reduction(strategy):
    reductions = strategy.extended._collectives.reductions
    for _ in range(3):
        all_reduce(strategy, [np.ones(3), np.ones(4)])
    assert len(reductions) == 1
    all_reduce(strategy, [np.ones(4), np.ones(3)])
    all_reduce(strategy, [np.ones(3), np.ones(4)], "mean")
    all_reduce(strategy, {"a": np.ones(3), "b": np.ones(4)})
    assert len(reductions) == 4


@pytest.mark.parametrize("op", ["sum", "max"])
@pytest.mark.parametrize("num_elements", [3, 3000, 30_000])
def test_results_are_not_memory_of_the_reduction(strategy, size, num_elements, op):
    held = []
    for number in range(3):
        arrays = [np.full(num_elements, float(number + k)) for k in range(2)]
        held.append(all_reduce(strategy, arrays, op))
    factor = size if op == "sum" else 1
    for number, results in enumerate(held):
        for k, result in enumerate(results):
            assert_array_equal(result, np.full(num_elements, (number + k) * factor))


def test_a_reduction_fits_plain_arrays_of_the_same_kinds_alone(strategy):
    with strategy.extended._collectives.call("all_reduce") as call:
        reduction = call.prepare(ms.ReduceOp.SUM, [np.ones((2, 3)), np.ones(4, np.int32)])
        if call.prepare(ms.ReduceOp.SUM, [np.ones(1)]).fits([np.ones(1)]):
            assert reduction.fits([np.zeros((2, 3)), np.zeros(4, np.int32)])
        for other in (
            [np.ones((2, 3))],
            [np.ones((3, 2)), np.ones(4, np.int32)],
            [np.ones((2, 3)), np.ones(4, np.int64)],
            [np.ones((3, 2)).T, np.ones(4, np.int32)],
            [np.ones((2, 3)), [1, 1, 1, 1]],
        ):
            assert not reduction.fits(other)
        call.agree()
