import numpy as np
import pytest

import mpistrat as ms
from tests.devices import assert_array_equal
from tests.helpers import triangle


@pytest.fixture
def variable(strategy):
    with strategy.scope():
        return ms.Variable(np.zeros(2))


def test_destinations(strategy, variable, rank, size):
    value = ms.PerReplica(np.full(2, float(rank)))
    for destination in (variable, value, np.zeros(1)):
        result = strategy.extended.reduce_to("sum", value, destination)
        assert isinstance(result, ms.Mirrored)
        assert result.values[0].tolist() == [triangle(size)] * 2
    for device in (
        "cpu:0",
        "CPU:0",
        "/cpu:0",
        "/device:CPU:0",
        "/job:worker/replica:0/device:cpu:0",
    ):
        assert strategy.extended.reduce_to("sum", value, device).tolist() == [triangle(size)] * 2


def test_mirrored_values(strategy, variable):
    mirrored = ms.Mirrored(np.ones(2))
    assert strategy.extended.reduce_to("mean", mirrored, variable).values[0].tolist() == [1, 1]
    with pytest.raises(ValueError, match="mirrored"):
        strategy.extended.reduce_to("sum", mirrored, variable)
    with pytest.raises(TypeError):
        strategy.extended.reduce_to(ms.VariableAggregation.SUM, 1, variable)


@pytest.mark.host_memory
def test_a_refused_device_names_those_there_are_once(strategy):
    with pytest.raises(ValueError, match=r'are on cpu:0\. Use "cpu:0"\.$'):
        strategy.extended.reduce_to("sum", 1, "gpu:0")


def test_batches(strategy, variable, rank, size):
    pairs = [(rank, variable), (np.ones(3), "cpu:0"), (ms.Mirrored(2.0), variable)]
    first, second = strategy.extended.batch_reduce_to("sum", pairs[:2])
    assert first.values == (triangle(size),)
    assert second.tolist() == [size] * 3
    assert strategy.extended.batch_reduce_to("mean", pairs)[2].values == (2.0,)
    assert strategy.extended.batch_reduce_to("sum", []) == []


def test_broadcast_to(strategy, rank):
    result = strategy.extended.broadcast_to(np.full(2, rank), "cpu:0")
    assert isinstance(result, ms.Mirrored)
    assert result.values[0].tolist() == [0, 0]
    with strategy.scope():
        on_read = ms.VariableSynchronization.ON_READ
        total = ms.Variable(1.0, synchronization=on_read, aggregation=ms.VariableAggregation.SUM)
        assert strategy.extended.broadcast_to(total, "cpu:0") == strategy.size
    with pytest.raises(ValueError):
        strategy.extended.broadcast_to(1.0, None)


def test_update(strategy, variable):
    def add(v, delta, *, factor):
        v.assign_add(delta * factor)
        return {"new": v.value().copy()}

    arguments = ((ms.Mirrored(np.ones(2)),), {"factor": 3})
    merged = strategy.extended.update(variable, add, *arguments)
    assert merged["new"].values[0].tolist() == [3, 3]
    (local,) = strategy.extended.update(variable, add, *arguments, group=False)
    assert local["new"].tolist() == [6, 6]
    with pytest.raises(ValueError, match="PerReplica"):
        strategy.extended.update(variable, add, [[ms.PerReplica(1)]], {"factor": 1})


@pytest.mark.parametrize("position", ["args", "kwargs"])
def test_plain_values_of_an_update_are_compared(strategy, variable, rank, size, position):
    def update(value):
        given = {"args": ([value],)} if position == "args" else {"kwargs": {"x": [value]}}
        strategy.extended.update(variable, lambda v, x: v.assign(x[0] + v.numpy() * 0), **given)

    update(np.arange(2.0))
    update(3)
    if size > 1:
        with pytest.raises(ms.errors.CollectiveMismatchError, match=r"update of(?s:.)*broadcast"):
            update(np.full(2, rank))
    assert_array_equal(variable.values[0], [3, 3])


def test_an_update_of_what_differs_by_nature_takes_any_values(strategy, rank):
    with strategy.scope():
        own = ms.Variable(0.0, synchronization=ms.VariableSynchronization.ON_READ)
    strategy.extended.update(own, lambda v, x: v.assign(x), args=(float(rank),))
    assert own.values[0] == rank


def test_variables_of_another_strategy_are_refused(strategy, variable, size):
    other = ms.MPIStrategy()
    with pytest.raises(ms.errors.ContextError, match="mixed"):
        other.extended.update(variable, lambda v: v)
    with pytest.raises(ValueError, match="mixed"):
        other.extended.reduce_to("sum", 1.0, variable)
    assert strategy.reduce("sum", 1) == other.reduce("sum", 1) == size


def test_an_update_that_fails_on_one_rank_alone_is_noticed(strategy, variable, others):
    def fn(v):
        if not others:
            raise ZeroDivisionError

    if others:
        strategy.extended.update(variable, fn)
    else:
        with pytest.raises(ZeroDivisionError):
            strategy.extended.update(variable, fn)
    with pytest.raises(ms.errors.CollectiveMismatchError, match="ZeroDivisionError"):
        strategy.reduce("sum", 1)


def test_one_device_takes_every_spelling():
    for device in ("cpu", "/cpu:0", "/device:CPU:0", "/job:worker/replica:0/task:0/device:CPU:0"):
        strategy = ms.OneDeviceStrategy(device)
        resolver = strategy.cluster_resolver
        assert (resolver.task_id, resolver.num_workers, len(resolver.hosts)) == (0, 1, 1)
    with pytest.raises(ValueError, match="device"):
        ms.OneDeviceStrategy("tpu")
