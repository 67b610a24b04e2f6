import numpy as np
import pytest

import mpistrat as ms
from tests.devices import assert_allclose, assert_array_equal


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
    assert_allclose(mean.result(), expected)
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
    assert_allclose(total.result(), expected * size, rtol=1e-15)
    assert_allclose(mean.result(), expected / 200, rtol=1e-15)


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


def part_of(rank):
    """Return an example set for each rank; those of rank 1 are none."""
    rng = np.random.default_rng(rank)
    n = 0 if rank == 1 else 3 + rank
    return rng.integers(0, 6, n), rng.standard_normal((n, 6)), rng.random(n)


def joined(size):
    parts = [part_of(rank) for rank in range(size)]
    return [np.concatenate(each) for each in zip(*parts, strict=True)]


@pytest.mark.parametrize("weighted", [False, True])
def test_mean_squared_error_has_a_weight_per_example(strategy, rank, size, weighted):
    with strategy.scope():
        metric = ms.metrics.MeanSquaredError()
    assert np.isnan(metric.result())
    _, scores, weights = part_of(rank)
    truth = np.ones_like(scores)
    strategy.run(
        lambda: metric.update_state(truth, scores, sample_weight=weights if weighted else None)
    )
    _, scores, weights = joined(size)
    each = ((scores - 1) ** 2).mean(axis=1)
    expected = np.average(each, weights=weights if weighted else None)
    assert_allclose(metric.result(), expected, rtol=1e-12)


def test_mean_squared_error_weighs_examples_not_columns():
    metric = ms.metrics.MeanSquaredError()
    # As many columns as examples, so that broadcasting could mistake one for the other.
    metric.update_state([[0, 0], [0, 0]], [[1, 3], [10, 10]], sample_weight=[1, 0])
    assert metric.result() == 5
    metric.reset_state()
    metric.update_state([[0, 0], [0, 0]], [[1, 3], [10, 10]], sample_weight=[[0, 1], [0, 0]])
    assert metric.result() == 9
    metric.reset_state()
    metric.update_state(np.zeros((2, 3, 4)), np.ones((2, 3, 4)), sample_weight=np.eye(2, 3))
    metric.update_state(2, 4, sample_weight=8)
    assert metric.result() == (2 * 4 + 8 * 4) / (2 * 4 + 8)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.float16, np.float32, np.int64, bool])
def test_mean_squared_error_is_exact_in_any_dtype(strategy, dtype):
    truth, guess = np.array([1, 0], dtype), np.array([0, 100], dtype)
    with strategy.scope():
        metric = ms.metrics.MeanSquaredError()
    strategy.run(lambda: metric.update_state(truth, guess))
    assert metric.result() == (1 + float(guess[1]) ** 2) / 2
    assert_array_equal(truth, np.array([1, 0], dtype))


def test_what_mean_squared_error_refuses(strategy):
    with strategy.scope():
        metric = ms.metrics.MeanSquaredError()
    column = np.ones((3, 1))
    for error, args in {
        ValueError: (np.ones(3), column),
        TypeError: (np.ones(3), np.ones(3) * 1j),
    }.items():
        with pytest.raises(error):
            strategy.run(metric.update_state, args=args)
    with pytest.raises(ValueError, match="sample_weight"):
        strategy.run(lambda: metric.update_state(column, column, sample_weight=np.ones(2)))
    with pytest.raises(ValueError, match="cross-replica"):
        metric.update_state([1.0], [2.0])
    assert np.isnan(metric.result())


@pytest.mark.parametrize("k", [1, 2, 6])
def test_top_k_agrees_with_torch(strategy, rank, size, k):
    torch = pytest.importorskip("torch")
    with strategy.scope():
        plain, weighted = ms.metrics.TopKAccuracy(k), ms.metrics.TopKAccuracy(k=k, name="weighted")
    labels, scores, weights = part_of(rank)

    def step():
        plain.update_state(labels, scores)
        weighted.update_state(labels, torch.from_numpy(scores), sample_weight=weights)

    strategy.run(step)
    labels, scores, weights = joined(size)
    chosen = torch.topk(torch.from_numpy(scores), k, dim=1).indices.numpy()
    hits = (chosen == labels[:, None]).any(axis=1)
    assert plain.result() == hits.mean()
    assert_allclose(weighted.result(), np.average(hits, weights=weights), rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.float16, np.float64])
def test_classes_that_tie_with_the_true_one_do_not_push_it_out(dtype):
    scores = np.array([[3, 1, 1, 0]], dtype)
    hits = {}
    for k in (1, 2, 3, 4):
        metric = ms.metrics.TopKAccuracy(k)
        for label in range(4):
            metric.reset_state()
            metric.update_state([label], scores)
            hits[k, label] = metric.result()
    num_higher = [0, 1, 1, 3]
    assert hits == {(k, label): float(num_higher[label] < k) for k, label in hits}


@pytest.mark.parametrize(
    ("scores", "hit"),
    [
        ([np.nan, 1, 0], 0),
        ([np.nan] * 3, 0),
        ([1, np.nan, 0], 1),
        ([1, np.nan, np.nan], 0),
        ([1, np.inf, -np.inf], 1),
        ([-np.inf, 0, np.nan], 0),
        ([np.inf, np.inf, np.inf], 1),
    ],
)
def test_a_nan_scores_higher_than_numbers_and_is_never_right(scores, hit):
    metric = ms.metrics.TopKAccuracy(k=2)
    metric.update_state([0], np.array([scores], np.float32))
    assert metric.result() == hit


def test_what_top_k_refuses(strategy):
    with strategy.scope():
        metric = ms.metrics.TopKAccuracy(k=3)
        for k, error in {0: ValueError, -1: ValueError, 1.5: TypeError, True: TypeError}.items():
            with pytest.raises(error, match="k must be"):
                ms.metrics.TopKAccuracy(k)
    scores = np.ones((2, 4))
    for labels, given, error, words in [
        ([0, 4], scores, ValueError, "classes 0 to 3"),
        ([-1, 0], scores, ValueError, "from -1 to 0"),
        ([0], scores, ValueError, "shape"),
        (np.eye(2, 4, dtype=int), scores, ValueError, "argmax"),
        ([0, 1], scores[:, :2], ValueError, "k=3"),
        ([0.0, 1.0], scores, TypeError, "integer"),
        ([0, 1], scores * 1j, TypeError, "real"),
    ]:
        with pytest.raises(error, match=words):
            strategy.run(lambda y=labels, s=given: metric.update_state(y, s))
    with pytest.raises(ValueError, match="sample_weight"):
        strategy.run(lambda: metric.update_state([0, 1], scores, sample_weight=np.ones((2, 1))))
    assert np.isnan(metric.result())


def test_ranks_that_disagree_on_k(strategy, rank, others):
    with strategy.scope(), pytest.raises(ms.errors.CollectiveMismatchError, match="k="):
        ms.metrics.TopKAccuracy(k=2 if others else 3)


@pytest.mark.fast
def test_a_result_is_one_message_whatever_the_number_of_sums(strategy, counts):
    with strategy.scope():
        metrics = [ms.metrics.Sum(), ms.metrics.Mean(), ms.metrics.TopKAccuracy(1)]
    for metric in metrics:
        counts.clear()
        metric.result()
        assert counts == {"all_reduce": 1}
    counts.clear()
    strategy.run(metrics[1].result)
    assert counts == {"all_reduce": 1}


def test_a_result_in_the_context_of_another_strategy(strategy):
    with strategy.scope():
        metric = ms.metrics.Mean(name="loss")
    other = ms.OneDeviceStrategy()
    with other.scope(), pytest.raises(ms.errors.ContextError, match="loss"):
        metric.result()
    assert np.isnan(metric.result())


def test_ranks_that_ask_different_metrics(strategy, others):
    with strategy.scope():
        mean, other = ms.metrics.Mean(name="loss"), ms.metrics.Mean(name="test_loss")
    with pytest.raises(ms.errors.CollectiveMismatchError, match=r"Mean\.result of 'loss'"):
        (mean if others else other).result()
