"""Repeated reductions of one array by compiled code: arrays of all kinds, interruptions."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.collectives import repeated
from tests.helpers import result_of


def all_reduce(strategy, array, **arguments):
    return result_of(
        strategy, lambda: ms.get_replica_context().all_reduce("sum", array, **arguments)
    )


@pytest.mark.parametrize("length", [0, 1, 100, 10_000, 300_000])
@pytest.mark.parametrize("dtype", ["i1", "u8", "f2", "f4", "f8", "c16"])
def test_every_call_gives_the_sum(strategy, rank, size, length, dtype):
    array = np.full(length, rank + 1, dtype)
    expected = np.full(length, sum(range(1, size + 1)), dtype)
    for _ in range(3):
        found = all_reduce(strategy, array)
        assert found.dtype == expected.dtype
        np.testing.assert_array_equal(found, expected)
        np.testing.assert_array_equal(array, np.full(length, rank + 1, dtype))


@pytest.mark.parametrize("shape", [(), (2, 3), (1, 0, 4)])
def test_shapes_stay(strategy, size, shape):
    for _ in range(3):
        found = all_reduce(strategy, np.ones(shape))
        assert np.shape(found) == shape
        np.testing.assert_array_equal(found, np.full(shape, size))


def test_an_interruption_before_the_call_is_that_error_and_leaves_it_usable(
    strategy, size, monkeypatch
):
    array = np.ones(5)
    all_reduce(strategy, array)

    def interrupted(*_):
        raise KeyboardInterrupt("now")

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt, match="now"):
        patch.setattr(repeated._logger, "isEnabledFor", interrupted)
        all_reduce(strategy, array)
    np.testing.assert_array_equal(all_reduce(strategy, array), np.full(5, size))
