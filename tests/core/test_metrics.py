import numpy as np
import pytest

import mpistrat as ms


def test_mean_over_replicas_with_uneven_and_empty_parts(strategy, rank, size):
    with strategy.scope():
        mean, total = ms.metrics.Mean(name="loss"), ms.metrics.Sum()
    assert np.isnan(mean.result())

    def step(values):
        mean.update_state(values)
        total.update_state(values)

    strategy.run(step, args=(np.arange(rank, dtype=np.float32),))
    joined = np.concatenate([np.arange(r) for r in range(size)])
    expected = joined.mean() if joined.size else np.nan
    np.testing.assert_allclose(mean.result(), expected)
    assert total.result() == joined.sum()
    assert strategy.run(lambda: total.result()).values[0] == joined.sum()
    mean.reset_state()
    assert np.isnan(mean.result())
    strategy.run(total.reset_state)
    assert total.result() == 0


def test_weights(strategy, rank, size):
    with strategy.scope():
        mean = ms.metrics.Mean()
    strategy.run(lambda: mean.update_state([1.0, 3.0], sample_weight=[3.0, 1.0]))
    assert mean.result() == 1.5
    with pytest.raises(ValueError, match="sample_weight"):
        strategy.run(lambda: mean.update_state([1.0, 3.0], sample_weight=[1.0, 1.0, 1.0]))


def test_accuracy_compares_labels(strategy, rank, size):
    with strategy.scope():
        accuracy = ms.metrics.Accuracy()
    truth, guess = np.array([0, 1, 2, 3]), np.array([0, 1, 2, rank])
    strategy.run(lambda: accuracy.update_state(truth, guess))
    assert accuracy.result() == (3 * size + (size > 3)) / (4 * size)
    with pytest.raises(ValueError, match="argmax"):
        strategy.run(lambda: accuracy.update_state(truth, np.ones((4, 10))))


def test_default_context():
    mean = ms.metrics.Mean()
    mean.update_state(3)
    mean.update_state(np.array([]))
    assert mean.result() == 3


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16, np.float32])
def test_products_with_weights_are_taken_in_float64(strategy, size, dtype):
    largest = {np.uint8: 200, np.int8: 100, np.float16: 60000, np.float32: 3e38}[dtype]
    values, weights = np.array([largest, 3], dtype), np.array([100, 100], dtype)
    with strategy.scope():
        total, mean = ms.metrics.Sum(), ms.metrics.Mean()

    def step():
        total.update_state(values, sample_weight=weights)
        mean.update_state(values, sample_weight=weights)

    strategy.run(step)
    expected = float(dtype(largest)) * 100 + 300
    np.testing.assert_allclose(total.result(), expected * size, rtol=1e-15)
    np.testing.assert_allclose(mean.result(), expected / 200, rtol=1e-15)


def test_what_metrics_take(strategy, rank, size):
    with strategy.scope():
        total = ms.metrics.Sum()
    strategy.run(lambda: total.update_state([1, 2]))
    strategy.run(lambda: total.update_state((3.0,), sample_weight=2))
    strategy.run(lambda: total.update_state(ms.PerReplica(np.float32(rank))))
    assert total.result() == 9 * size + size * (size - 1) / 2
    for values, weight in ((1j, None), ("ab", None), (1.0, 1j), (np.array(["a"]), None)):
        with pytest.raises(TypeError):
            strategy.run(lambda v=values, w=weight: total.update_state(v, w))


def test_tensors_that_are_part_of_a_graph(strategy, size):
    torch = pytest.importorskip("torch")
    with strategy.scope():
        mean, accuracy = ms.metrics.Mean(), ms.metrics.Accuracy()
    loss = torch.tensor([1.0, 3.0], requires_grad=True)
    strategy.run(lambda: mean.update_state(loss, sample_weight=torch.tensor([3.0, 1.0])))
    assert mean.result() == 1.5
    strategy.run(lambda: accuracy.update_state([0, 1], torch.tensor([0, 2])))
    assert accuracy.result() == 0.5
