"""How many messages a call costs, counted at the transport."""

import numpy as np
import pytest

import mpistrat as ms


def all_reduce(strategy, value, **options):
    options = ms.CommunicationOptions(**options)
    strategy.run(lambda: ms.get_replica_context().all_reduce("sum", value, options))


@pytest.mark.fast
def test_a_thousand_small_arrays_are_one_message(strategy, counts):
    all_reduce(strategy, [np.ones(100, np.float32) for _ in range(1000)])
    assert counts == {"all_reduce": 1}


@pytest.mark.fast
def test_one_message_for_each_dtype_and_pack(strategy, counts):
    arrays = [np.ones(100, dtype) for dtype in ("f4", "f8", "i4") for _ in range(10)]
    all_reduce(strategy, arrays)
    assert counts == {"all_reduce": 3}
    counts.clear()
    all_reduce(strategy, [np.ones(100, np.float32)] * 10, bytes_per_pack=1000)
    assert counts == {"all_reduce": 5}


@pytest.mark.fast
def test_zero_bytes_per_pack_is_automatic(strategy, counts):
    all_reduce(strategy, [np.ones(100, np.float32)] * 10, bytes_per_pack=0)
    assert counts == {"all_reduce": 1}
    assert ms.CommunicationOptions().bytes_per_pack == 0


@pytest.mark.fast
def test_a_mean_over_an_axis_is_one_message(strategy, counts):
    strategy.reduce("mean", {"a": np.ones((3, 2), np.float32), "b": np.ones(3, np.float32)}, axis=0)
    assert counts == {"all_reduce": 1}


@pytest.mark.fast
def test_a_training_step_is_one_message_and_local_calls_are_none(strategy, counts):
    with strategy.scope():
        variables = [ms.Variable(np.zeros(50, np.float32)) for _ in range(160)]
        optimizer = ms.optimizers.SGD(0.1, momentum=0.9)
        metric = ms.metrics.Mean()
    gradients = [np.ones(50, np.float32)] * 160

    def step():
        optimizer.apply_gradients(zip(gradients, variables, strict=True))
        metric.update_state(1.0)

    strategy.run(step)  # the first step makes the slots
    counts.clear()
    strategy.run(step)
    assert counts == {"all_reduce": 1}
    counts.clear()
    repr(variables[0])
    repr(metric)
    strategy.experimental_local_results(strategy.run(lambda: 1))
    assert not counts
