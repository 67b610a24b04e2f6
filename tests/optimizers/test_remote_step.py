"""Steps on remote variables equal those of one replica, wherever the parts lie."""

import warnings

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.errors import CollectiveMismatchError
from tests.devices import assert_allclose

OPTIMIZERS = {
    "sgd": lambda: ms.optimizers.SGD(0.1),
    "momentum": lambda: ms.optimizers.SGD(0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda: ms.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "adam": lambda: ms.optimizers.Adam(0.1, global_clipnorm=0.5),
    "scheduled": lambda: ms.optimizers.Adam(lambda step: 0.1 / (step + 1)),
}


def make(optimizer):
    table = ms.Variable(np.arange(14.0).reshape(7, 2), name="table")
    bias = ms.Variable(np.float32(1.5), name="bias")
    return table, bias, OPTIMIZERS[optimizer]()


def step(number, table, bias, optimizer):
    rows = ms.IndexedSlices(np.full((3, 2), number + 1.0), [6, 0, 6])
    gradient = np.full((7, 2), 0.5) if number % 2 else rows
    optimizer.apply_gradients([(gradient, table), (np.float32(number), bias)])


def step_on_rows(table, optimizer):
    rows = table.lookup([4, 1])
    gradient = ms.IndexedSlices(np.ones_like(rows), [4, 1], table.shape)
    optimizer.apply_gradients([(gradient, table)])


def late_rate(optimizer, table, rate):
    optimizer.learning_rate = rate
    optimizer.apply_gradients([(np.ones((7, 2)), table)])


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_equal_those_of_one_replica(name, parts, size):
    partitioner = ms.partitioners.FixedShardsPartitioner(parts)
    strategy = ms.ParameterServerStrategy(max(0, size - 2), partitioner)
    with strategy.scope():
        table, bias, optimizer = make(name)
    if strategy.rank:
        strategy.serve()
        return
    with ms.OneDeviceStrategy().scope():
        expected = make(name)
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    for number in range(5):
        coordinator.schedule(step, (number, table, bias, optimizer)).fetch()
        step(number, *expected)
    assert_allclose(table.numpy(), expected[0].numpy(), rtol=1e-12)
    assert_allclose(bias.numpy(), expected[1].numpy(), rtol=1e-6)
    assert optimizer.iterations.numpy() == 5
    for slot in expected[2]._rule.kernel.slots:
        theirs = expected[2].slot(expected[0], slot).numpy()
        assert_allclose(optimizer.slot(table, slot).numpy(), theirs, rtol=1e-12)
    assert repr(optimizer).startswith(f"<{type(optimizer).__name__}")
    strategy.close()


@pytest.mark.parametrize("parts", [1, 3])
def test_rows_of_a_lookup_alone_change(parts, size):
    partitioner = ms.partitioners.FixedShardsPartitioner(parts)
    strategy = ms.ParameterServerStrategy(max(0, size - 2), partitioner)
    with strategy.scope():
        table, _, optimizer = make("adam")
    if strategy.rank:
        strategy.serve()
        return
    before = table.numpy()
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    coordinator.schedule(step_on_rows, (table, optimizer)).fetch()
    for changed in (table.numpy() != before, optimizer.slot(table, "first_moment").numpy() != 0):
        assert np.flatnonzero(changed.all(1)).tolist() == [1, 4]
        assert np.flatnonzero(changed.any(1)).tolist() == [1, 4]
    slot = optimizer.slot(table, "first_moment")
    assert slot._devices == table._devices
    assert len(slot._devices) == parts
    strategy.close()


def test_rates_of_the_rank_that_takes_the_step(size):
    strategy = ms.ParameterServerStrategy(max(0, size - 2))
    with strategy.scope():
        table, _, optimizer = make("sgd")
    if strategy.rank:
        strategy.serve()
        return
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    before = table.numpy()
    coordinator.schedule(late_rate, (optimizer, table, 2.0)).fetch()
    assert_allclose(table.numpy(), before - 2.0)
    strategy.close()


def test_bad_gradients(size):
    strategy = ms.ParameterServerStrategy(max(0, size - 2))
    plain = ms.Variable(np.zeros(2), name="plain")
    with strategy.scope():
        table, bias, optimizer = make("sgd")
        for wrong in ({"sharded_slots": True, "momentum": 0.5}, {"loss_scale": _loss_scale()}):
            with pytest.raises(NotImplementedError, match="ParameterServerStrategy"):
                ms.optimizers.SGD(0.1, **wrong)
    if strategy.rank:
        strategy.serve()
        return
    before = table.numpy()
    with pytest.raises(ValueError, match="shape"):
        optimizer.apply_gradients([(np.ones(3), table)])
    with pytest.raises(ValueError, match="no \\(gradient"):
        optimizer.apply_gradients([])
    with pytest.raises(ValueError, match="every gradient is None"):
        optimizer.apply_gradients([(None, table)])
    with pytest.raises(IndexError):
        optimizer.apply_gradients([(ms.IndexedSlices(np.ones((1, 2)), [7]), table)])
    with pytest.raises(ValueError, match="belong to this rank only"):
        optimizer.apply_gradients([(np.ones(2), plain), (np.ones((7, 2)), table)])
    with pytest.warns(UserWarning, match="No gradient for the variables"):
        optimizer.apply_gradients([(None, bias), (np.zeros((7, 2)), table)])
    assert (table.numpy() == before).all()
    strategy.close()


def follow(average, table, decay):
    average.assign_sub((1 - decay) * (average.value() - table.value()), read_value=False)


def accumulate(table, optimizer):
    gradient = sum(np.full((7, 2), number) for number in range(4))
    optimizer.apply_gradients([(gradient, table)])


def test_averages_and_sums_by_hand(size):
    strategy = ms.ParameterServerStrategy(max(0, size - 2))
    with strategy.scope():
        table, _, optimizer = make("sgd")
        average = ms.Variable(np.arange(14.0).reshape(7, 2), name="average", trainable=False)
        with pytest.raises(NotImplementedError, match="average.assign_sub"):
            ms.optimizers.ExponentialMovingAverage(0.75).apply([table])
        with pytest.raises(NotImplementedError, match="Add up the gradients of its batches"):
            ms.optimizers.GradientAccumulator([table])
    with pytest.raises(NotImplementedError, match="Add up the gradients of its batches"):
        ms.optimizers.GradientAccumulator([table])
    if strategy.rank:
        strategy.serve()
        return
    coordinator = ms.coordinator.ClusterCoordinator(strategy)
    coordinator.schedule(accumulate, (table, optimizer)).fetch()
    assert_allclose(table.numpy(), np.arange(14.0).reshape(7, 2) - 0.6)
    coordinator.schedule(follow, (average, table, 0.75)).fetch()
    assert_allclose(average.numpy(), np.arange(14.0).reshape(7, 2) - 0.15)
    strategy.close()


def test_optimizers_in_another_order(rank, size):
    if size == 1:
        pytest.skip("one rank agrees with itself")
    comm = MPI.COMM_WORLD.Dup()
    strategy = ms.ParameterServerStrategy(comm=comm)
    with strategy.scope(), pytest.raises(CollectiveMismatchError, match="Adam"):
        (ms.optimizers.Adam if rank else ms.optimizers.SGD)(0.1)


def _loss_scale():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ms.optimizers.LossScale(2.0)
