import numpy as np
import pytest

import mpistrat as ms
from mpistrat.optimizers import SGD, ExponentialMovingAverage
from tests.devices import assert_allclose, assert_array_equal


def train(strategy, average, weight, optimizer, num_steps):
    """Take steps that set `weight` to 1, 2, 3, ... times minus the number of replicas."""

    def step():
        optimizer.apply_gradients([(np.ones(3), weight)])
        average.apply([weight])

    for _ in range(num_steps):
        strategy.run(step)


def expected_after(values, decay):
    average = values[0]
    for number, value in enumerate(values[1:], 1):
        at = decay(number) if callable(decay) else decay
        average = at * average + (1 - at) * value
    return average


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_averages_follow_the_variables(strategy, size, dtype):
    with strategy.scope():
        weight = ms.Variable(np.zeros(3, dtype), name="weight")
        average, optimizer = ExponentialMovingAverage(0.5), SGD(1.0)
    with pytest.raises(KeyError, match="'weight'"):
        average.average(weight)
    average.apply([weight])
    assert not average.average(weight).numpy().any()
    train(strategy, average, weight, optimizer, 4)
    expected = expected_after([-size * step for step in range(5)], 0.5)
    held = average.average(weight)
    assert_allclose(held.numpy(), np.full(3, expected), rtol=1e-6)
    assert held.dtype == max(np.dtype(dtype), np.dtype(np.float32))
    assert not held.trainable
    strategy.extended.assert_replicas_agree(average)


def test_a_number_of_updates_lowers_the_decay_at_first():
    value = ms.Variable(1.0)
    average = ExponentialMovingAverage(decay=0.9, num_updates=0)
    average.apply([value])
    values = [1.0, 5.0, 2.0, 7.0]
    for number, each in enumerate(values[1:], 1):
        value.assign(each)
        average.num_updates = number
        average.apply([value])
    expected = expected_after(values, lambda n: min(0.9, (1 + n) / (10 + n)))
    assert_allclose(average.average(value).numpy(), expected)


def test_averages_are_saved_and_restored(strategy, size, shared_tmp_path):
    def make():
        with strategy.scope():
            weight = ms.Variable(np.zeros(3), name="weight")
            return weight, ExponentialMovingAverage(0.5), SGD(1.0)

    weight, average, optimizer = make()
    train(strategy, average, weight, optimizer, 3)
    with strategy.scope():
        saved = {"weight": weight, "ema": average, "optimizer": optimizer}
        path = ms.Checkpoint(**saved).write(shared_tmp_path / "average.h5")
        resumed = make()
        status = ms.Checkpoint(**dict(zip(saved, resumed, strict=True))).restore(path)
    expected = expected_after([-size * step for step in range(1, 5)], 0.5)
    for variable, averages, stepper in (weight, average, optimizer), resumed:
        train(strategy, averages, variable, stepper, 1)
        assert_array_equal(averages.average(variable).numpy(), np.full(3, expected))
    status.assert_consumed()


def test_what_averages_refuse(strategy):
    for decay, num_updates, error in [
        (1.5, None, ValueError),
        ("0.9", None, TypeError),
        (0.9, -1, ValueError),
        (0.9, 1.5, TypeError),
    ]:
        with pytest.raises(error):
            ExponentialMovingAverage(decay, num_updates)
    average = ExponentialMovingAverage(0.9)
    with strategy.scope():
        on_read = ms.VariableSynchronization.ON_READ
        differs = ms.Variable(
            np.zeros(3), synchronization=on_read, aggregation=ms.VariableAggregation.SUM
        )
        counter, weight = ms.Variable(0), ms.Variable(np.zeros(3))
    for variables, error, words in [
        ([], ValueError, "no variable"),
        ([np.zeros(3)], TypeError, "takes variables"),
        (None, TypeError, "iterable"),
        ([counter], TypeError, "floating"),
        ([differs], ValueError, "SyncOnRead"),
        ([weight, weight], ValueError, "one variable twice"),
    ]:
        with pytest.raises(error, match=words):
            average.apply(variables)


def test_ranks_that_disagree_on_the_decay(strategy, others):
    with strategy.scope():
        weight = ms.Variable(np.zeros(3))
    average = ExponentialMovingAverage(0.9 if others else 0.8)
    with pytest.raises(ms.errors.CollectiveMismatchError, match="decay="):
        strategy.run(lambda: average.apply([weight]))
