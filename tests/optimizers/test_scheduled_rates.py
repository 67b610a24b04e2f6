"""Learning-rate schedules in optimizers: which rate rules at which step."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.optimizers import schedules
from tests.devices import assert_allclose


def job(strategy, schedule):
    with strategy.scope():
        weight = ms.Variable(0.0, name="weight")
        optimizer = ms.optimizers.SGD(schedule)
    return weight, optimizer


def steps(strategy, weight, optimizer, number):
    """Take steps whose gradient is 1 over all replicas; return how far each one went."""
    gradient = 1 / strategy.num_replicas_in_sync
    positions = [0.0]
    for _ in range(number):
        strategy.run(lambda: optimizer.apply_gradients([(gradient, weight)]))
        positions.append(float(weight.numpy()))
    return -np.diff(positions)


@pytest.mark.parametrize(
    "schedule",
    [
        schedules.Constant(0.5),
        schedules.PiecewiseConstantDecay([1, 3], [1, 0.5, 0.25]),
        schedules.ExponentialDecay(1.0, 2, 0.5, staircase=True),
        schedules.CosineDecay(0.0, 4, warmup_target=1.0, warmup_steps=2),
    ],
    ids=repr,
)
def test_the_rate_is_that_of_the_step(strategy, schedule):
    weight, optimizer = job(strategy, schedule)
    went = steps(strategy, weight, optimizer, 6)
    assert_allclose(went, [schedule(step) for step in range(6)], atol=1e-12)


def test_a_resumed_job_goes_on_at_its_rate(strategy, mpi_tmp_path):
    schedule = schedules.CosineDecay(0.1, 8, alpha=0.1, warmup_target=1.0, warmup_steps=3)
    weight, optimizer = job(strategy, schedule)
    steps(strategy, weight, optimizer, 5)
    path = ms.Checkpoint(optimizer=optimizer).write(mpi_tmp_path / "run.h5")
    weight, optimizer = job(strategy, schedule)
    ms.Checkpoint(optimizer=optimizer).restore(path).assert_consumed()
    went = steps(strategy, weight, optimizer, 3)
    assert_allclose(went, [schedule(step) for step in (5, 6, 7)], rtol=1e-12)


def test_a_schedule_is_no_state(strategy, tmp_path):
    with pytest.raises(TypeError, match="cannot save 'schedule', a Constant"):
        ms.Checkpoint(schedule=schedules.Constant(0.1)).write(tmp_path / "run.h5")


@pytest.mark.parametrize(
    "other", [schedules.ExponentialDecay(0.1, 10, 0.51), schedules.Constant(0.1)], ids=repr
)
def test_ranks_with_other_schedules_are_reported(strategy, others, other):
    schedule = schedules.ExponentialDecay(0.1, 10, 0.5) if others else other
    with (
        strategy.scope(),
        pytest.raises(ms.errors.CollectiveMismatchError, match="decay_rate=0.5,"),
    ):
        ms.optimizers.SGD(schedule)
