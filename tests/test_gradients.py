"""Pullbacks against finite differences of the sum of all replicas' losses."""

import warnings

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import context, user_warnings

STEP = 1e-6


def values_of(size, op):
    """One (2, 3) array per replica, with ties for MIN and MAX apart and zeros for PROD."""
    values = np.random.default_rng(5).normal(size=(size, 2, 3))
    if op == "prod":
        values[0, 0, 0] = 0
        values[:2, 1, 1] = 0
    return values


def weights_of(size, shape):
    return np.random.default_rng(6).normal(size=(size, *shape))


def numerical_gradient(loss, values, rank):
    gradient = np.zeros_like(values[rank])
    for index in np.ndindex(gradient.shape):
        losses = []
        for sign in (1, -1):
            moved = values.copy()
            moved[(rank, *index)] += sign * STEP
            losses.append(loss(moved))
        gradient[index] = (losses[0] - losses[1]) / (2 * STEP)
    return gradient


@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
def test_all_reduce(strategy, rank, size, op):
    fold = {"sum": np.sum, "mean": np.mean, "min": np.min, "max": np.max, "prod": np.prod}[op]
    values, weights = values_of(size, op), weights_of(size, (2, 3))
    expected = numerical_gradient(lambda v: (weights * fold(v, axis=0)).sum(), values, rank)

    def fn():
        nest = {"a": values[rank]}
        result = ms.get_replica_context().all_reduce(op, nest)
        return ms.gradients.all_reduce_pullback(op, nest, result, {"a": weights[rank]})["a"]

    np.testing.assert_allclose(strategy.run(fn).values[0], expected, atol=1e-8)


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_all_gather(strategy, rank, size, axis):
    def part(r):
        return np.moveaxis(np.ones((r + 1, 2)) * r, 0, axis)

    joined = np.concatenate([part(r) for r in range(size)], axis)
    weights = weights_of(size, joined.shape)
    starts = np.cumsum([0, *(r + 1 for r in range(size))])
    index = [slice(None)] * 2
    index[axis] = slice(starts[rank], starts[rank + 1])

    def fn():
        return ms.gradients.all_gather_pullback(part(rank), axis, weights[rank])

    np.testing.assert_allclose(strategy.run(fn).values[0], weights.sum(0)[tuple(index)])


def test_ties_share(strategy, rank, size):
    def fn():
        value = np.array([1.0, float(rank)])
        replica = ms.get_replica_context()
        result = replica.all_reduce("max", value)
        return ms.gradients.all_reduce_pullback("max", value, result, np.ones(2))

    gradient = strategy.run(fn).values[0]
    assert gradient.tolist() == [1.0, size if rank == size - 1 else 0.0]


def test_default_context_and_bad_arguments(strategy, size):
    assert ms.gradients.all_reduce_pullback("mean", 2.0, 2.0, 3.0) == 3.0
    with strategy.scope(), pytest.raises(ms.errors.ContextError, match=r"strategy\.run"):
        ms.gradients.all_reduce_pullback("sum", 1.0, 1.0, 1.0)
    with pytest.raises(ValueError, match="one structure"):
        strategy.run(lambda: ms.gradients.all_reduce_pullback("sum", [1.0], 1.0, 1.0))
    assert strategy.reduce("sum", 1) == size


def test_outside_of_run_beside_open_replicas_it_warns(strategy, size, monkeypatch):
    monkeypatch.setattr(user_warnings, "_given", set())
    with warnings.catch_warnings(record=True) as given:
        warnings.simplefilter("always")
        ms.gradients.all_reduce_pullback("mean", 2.0, 2.0, 3.0)
        ms.gradients.all_gather_pullback(np.ones(1), 0, np.ones(1))
    # Objects that are collected now may warn too. Alone, earlier tests may have left strategies.
    texts = [str(each.message) for each in given if each.category is ms.errors.ScopeWarning]
    assert strategy.reduce("sum", 1) == size
    assert len(texts) == 2 * bool(context.open_strategies())
    assert len(texts) == 2 or size == 1
    assert all("strategy.run" in text for text in texts)


@pytest.mark.parametrize(
    ("common", "guilty"),
    [
        (lambda g: g("min", 1.0, 1.0, 1.0), lambda g: g("max", 1.0, 1.0, 1.0)),
        (lambda g: g("sum", {"a": 1.0}, {"a": 1.0}, {"a": 1.0}), lambda g: g("sum", 1.0, 1.0, 1.0)),
    ],
    ids=["op", "structure"],
)
def test_replicas_that_differ_are_noticed(strategy, others, common, guilty):
    with pytest.raises(ms.errors.CollectiveMismatchError, match="all_reduce_pullback"):
        strategy.run(lambda: (common if others else guilty)(ms.gradients.all_reduce_pullback))


def test_shapes_and_axes_are_checked(strategy, size):
    reduce_back, gather_back = ms.gradients.all_reduce_pullback, ms.gradients.all_gather_pullback
    for call, error in (
        (lambda: reduce_back("sum", np.ones(2), np.ones(2), np.ones(5)), ValueError),
        (lambda: reduce_back("max", np.ones(2), np.ones(2), np.ones((5, 2))), ValueError),
        (lambda: gather_back(np.ones(2), 0, np.ones(2 * size + 1)), ValueError),
        (lambda: gather_back(np.ones(2), 1, np.ones(2 * size)), ValueError),
        (lambda: gather_back(np.ones(2), None, np.ones(2 * size)), TypeError),
    ):
        with pytest.raises(error, match="pullback"):
            strategy.run(call)
    assert strategy.reduce("sum", 1) == size
