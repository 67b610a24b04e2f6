"""Classification metrics: those of scikit-learn for all examples, however ranks share them."""

import numpy as np
import pytest
from sklearn import metrics as sk

import mpistrat as ms
from tests.devices import assert_allclose

CLASSES = 5


def part_of(rank):
    """Return labels, scores in [0, 1] and weights of one rank; rank 1 has no example."""
    rng = np.random.default_rng(rank)
    n = 0 if rank == 1 else 40 + rank
    scores = rng.integers(0, 100, (n, CLASSES)) / 100
    return rng.integers(0, CLASSES, n), scores, rng.random(n)


def joined(size):
    parts = [part_of(rank) for rank in range(size)]
    return [np.concatenate(each) for each in zip(*parts, strict=True)]


def updated(strategy, rank, make, prepare, weighted):
    """Return the result of a metric after two updates with what `prepare` makes of a part."""
    with strategy.scope():
        metric = make()
    labels, scores, weights = part_of(rank)

    def step(rows):
        truth, guess = prepare(labels[rows], scores[rows])
        metric.update_state(truth, guess, sample_weight=weights[rows] if weighted else None)

    strategy.run(step, args=(slice(0, 15),))
    strategy.run(step, args=(slice(15, None),))
    return metric.result()


def binary(labels, scores):
    return labels == 0, scores[:, 0]


def one_hot(labels, scores):
    return np.eye(CLASSES)[labels], scores


def classes(labels, scores):
    return labels, scores.argmax(axis=1)


BINARY = {
    "Precision": (
        lambda: ms.metrics.Precision(),
        lambda y, s, w: _cut(sk.precision_score, y, s, w),
    ),
    "Recall": (lambda: ms.metrics.Recall(), lambda y, s, w: _cut(sk.recall_score, y, s, w)),
    "F1": (lambda: ms.metrics.F1(), lambda y, s, w: _cut(sk.f1_score, y, s, w)),
    "AUC": (lambda: ms.metrics.AUC(), lambda y, s, w: sk.roc_auc_score(y, s, sample_weight=w)),
}


def _cut(score, labels, scores, weights):
    return score(labels, scores > 0.5, sample_weight=weights)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("name", BINARY)
def test_two_classes(strategy, rank, size, name, weighted):
    make, reference = BINARY[name]
    got = updated(strategy, rank, make, binary, weighted)
    labels, scores, weights = joined(size)
    expected = reference(*binary(labels, scores), weights if weighted else None)
    assert_allclose(got, expected, atol=1e-6)
    assert isinstance(got, np.float64)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("average", [None, "micro", "macro", "weighted"])
def test_f1_of_several_classes(strategy, rank, size, average, weighted):
    got = updated(strategy, rank, lambda: ms.metrics.F1(average=average), one_hot, weighted)
    labels, scores, weights = joined(size)
    expected = sk.f1_score(
        *classes(labels, scores), average=average, sample_weight=weights if weighted else None
    )
    assert_allclose(got, expected, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
def test_confusion_matrix_and_intersection_over_union(strategy, rank, size, weighted):
    matrix = updated(strategy, rank, lambda: ms.metrics.ConfusionMatrix(CLASSES), classes, weighted)
    mean = updated(strategy, rank, lambda: ms.metrics.MeanIoU(CLASSES + 1), classes, weighted)
    labels, scores, weights = joined(size)
    truth, guess = classes(labels, scores)
    weights = weights if weighted else None
    expected = sk.confusion_matrix(truth, guess, sample_weight=weights)
    assert_allclose(matrix, expected, atol=1e-6)
    expected = sk.jaccard_score(truth, guess, average="macro", sample_weight=weights)
    assert_allclose(mean, expected, atol=1e-6)


def test_several_thresholds_top_k_and_one_class(strategy, rank, size):
    labels, scores, _ = joined(size)
    for kind, score in ("Precision", sk.precision_score), ("Recall", sk.recall_score):
        make = getattr(ms.metrics, kind)
        got = updated(strategy, rank, lambda m=make: m(thresholds=[0.2, 0.9]), binary, False)
        truth, guess = binary(labels, scores)
        assert_allclose(got, [score(truth, guess > t) for t in (0.2, 0.9)], atol=1e-6)
        got = updated(strategy, rank, lambda m=make: m(top_k=2, class_id=3), one_hot, False)
        highest = np.argsort(-scores, axis=1, kind="stable")[:, :2]
        assert_allclose(got, score(labels == 3, (highest == 3).any(axis=1)), atol=1e-6)


@pytest.mark.parametrize("curve", ["ROC", "PR"])
def test_the_area_lies_between_lower_and_higher_sums(strategy, rank, size, curve):
    low, middle, high = (
        updated(strategy, rank, lambda m=m: ms.metrics.AUC(10, curve, m), binary, False)
        for m in ("minoring", "interpolation", "majoring")
    )
    assert low < middle < high
    if curve == "PR":  # whose sum takes the precision at one end of each interval
        labels, scores, _ = joined(size)
        fine = updated(strategy, rank, lambda: ms.metrics.AUC(curve="PR"), binary, False)
        average = sk.average_precision_score(*binary(labels, scores))
        assert_allclose(fine, average, atol=0.05)


def test_interpolated_precision_of_a_curve_known_in_closed_form():
    # One interval from (TP, FP) = (0, 0) to (1, 0), one to (2, 2): precision falls along it.
    metric = ms.metrics.AUC(curve="PR", thresholds=[0.5])
    metric.update_state([1, 1, 0, 0], [0.9, 0.4, 0.3, 0.2])
    right = np.linspace(1, 2, 100_001)
    precision = right / (right + 2 * (right - 1))
    expected = (1 + np.trapezoid(precision, right)) / 2
    assert_allclose(metric.result(), expected, atol=1e-6)


def test_logits_and_thresholds_of_auc(strategy, rank, size):
    def logits(labels, scores):
        truth, scores = binary(labels, scores)
        with np.errstate(divide="ignore"):
            return truth, np.log(scores) - np.log1p(-scores)

    got = updated(strategy, rank, lambda: ms.metrics.AUC(from_logits=True), logits, False)
    labels, scores, _ = joined(size)
    truth, guess = binary(labels, scores)
    assert_allclose(got, sk.roc_auc_score(truth, guess), atol=1e-6)
    got = updated(strategy, rank, lambda: ms.metrics.AUC(thresholds=[0.7, 0.3]), binary, False)
    binned = (guess > 0.3).astype(int) + (guess > 0.7)
    assert_allclose(got, sk.roc_auc_score(truth, binned), atol=1e-6)


def test_ignored_and_dense_classes(strategy, rank, size):
    def scored(labels, scores):
        return np.where(labels == 0, 255, labels), scores

    got = updated(
        strategy,
        rank,
        lambda: ms.metrics.MeanIoU(CLASSES, ignore_class=255, sparse_y_pred=False),
        scored,
        True,
    )
    labels, scores, weights = joined(size)
    kept = labels != 0
    truth, guess = classes(labels[kept], scores[kept])
    expected = sk.jaccard_score(truth, guess, average="macro", sample_weight=weights[kept])
    assert_allclose(got, expected, atol=1e-6)


def test_before_the_first_example(strategy):
    with strategy.scope():
        assert ms.metrics.Precision().result() == ms.metrics.Recall().result() == 0
        assert np.isnan(ms.metrics.AUC().result())
        assert np.isnan(ms.metrics.MeanIoU(3).result())
        assert not ms.metrics.ConfusionMatrix(3).result().any()
        with pytest.raises(ValueError, match="'f1' has no result before its first update"):
            ms.metrics.F1().result()


def test_what_classification_metrics_refuse(strategy):
    with strategy.scope():
        made = {
            "Precision": ms.metrics.Precision(top_k=2),
            "F1": ms.metrics.F1(),
            "AUC": ms.metrics.AUC(),
            "ConfusionMatrix": ms.metrics.ConfusionMatrix(3),
        }
        for make, words in [
            (lambda: ms.metrics.Precision(thresholds=[]), "thresholds"),
            (lambda: ms.metrics.Recall(top_k=0), "top_k"),
            (lambda: ms.metrics.F1(average="mean"), "average"),
            (lambda: ms.metrics.AUC(curve="roc"), "curve"),
            (lambda: ms.metrics.AUC(thresholds=[2.0]), "within"),
            (lambda: ms.metrics.AUC(1), "num_thresholds"),
            (lambda: ms.metrics.ConfusionMatrix(0), "num_classes"),
        ]:
            with pytest.raises(ValueError, match=words):
                make()
    for name, args, error, words in [
        ("Precision", ([0, 1], [0.5, 0.5, 0.5]), ValueError, "one shape"),
        ("Precision", ([[1]], [[0.5]]), ValueError, "top_k=2"),
        ("F1", ([0, 2], [0.5, 0.5]), ValueError, "0 or 1"),
        ("F1", ([0, 1], [0.5, 1j]), TypeError, "real"),
        ("AUC", ([0, 1], [0.5, 1.5]), ValueError, "from_logits"),
        ("AUC", ([0, 1], [0.5, np.nan]), ValueError, "from_logits"),
        ("ConfusionMatrix", ([0, 3], [0, 1]), ValueError, "y_true .* 0 to 3.* 0 to 2"),
        ("ConfusionMatrix", ([0, 1], [0.0, 1.0]), TypeError, "integer"),
        ("ConfusionMatrix", ([0, 1], np.ones((2, 3))), ValueError, "argmax"),
    ]:
        with pytest.raises(error, match=words):
            strategy.run(made[name].update_state, args=args)
    with pytest.raises(ValueError, match="cross-replica"):
        made["AUC"].update_state([0, 1], [0.5, 0.5])


def test_ranks_that_disagree_on_a_parameter(strategy, others):
    with strategy.scope(), pytest.raises(ms.errors.CollectiveMismatchError, match="thresholds="):
        ms.metrics.Recall(thresholds=0.5 if others else 0.6)


def correlation(sums):
    """Return Pearson's coefficient from sums of products."""
    n, (x, y), products = sums["n"], sums["first"], sums["second"]
    covariance = products / n - np.outer([x, y], [x, y]) / n**2
    return covariance[0, 1] / np.sqrt(covariance[0, 0] * covariance[1, 1])


def moments(x, y):
    pair = np.stack([x, y])
    return {"n": x.size, "first": tuple(pair.sum(axis=1)), "second": pair @ pair.T}


def test_a_metric_from_sums(strategy, rank, size, counts):
    with strategy.scope():
        metric = ms.metrics.from_sums(moments, correlation, name="r")
    with pytest.raises(ValueError, match="'r' has no result"):
        metric.result()
    _, scores, weights = part_of(rank)
    strategy.run(lambda: metric.update_state(scores[:15, 0], y=weights[:15]))
    counts.clear()
    strategy.run(lambda: metric.update_state(scores[15:, 0], weights[15:]))
    assert not counts
    _, scores, weights = joined(size)
    expected = np.corrcoef(scores[:, 0], weights)[0, 1]
    assert_allclose(metric.result(), expected, atol=1e-12)
    metric.reset_state()
    strategy.run(lambda: metric.update_state(np.arange(3.0), -np.arange(3.0)))
    assert_allclose(metric.result(), -1)


def test_a_metric_from_one_number_is_saved_and_restored(strategy, size, shared_tmp_path):
    def make():
        return ms.metrics.from_sums(np.sum, lambda total: float(total) ** 2)

    with strategy.scope():
        metric, restored = make(), make()
        strategy.run(lambda: metric.update_state([1, 2]))
        path = ms.Checkpoint(metric=metric).write(shared_tmp_path / "metric.h5")
        ms.Checkpoint(metric=restored).restore(path)
    strategy.run(lambda: restored.update_state([3]))
    assert metric.result() == (3 * size) ** 2
    assert restored.result() == (6 * size) ** 2


def test_sums_that_change_or_are_none(strategy):
    with strategy.scope():
        metric = ms.metrics.from_sums(lambda x: x, np.sum)
        for args in ((3, np.sum), (np.sum, None)):
            with pytest.raises(TypeError, match="must be a function"):
                ms.metrics.from_sums(*args)
    with pytest.raises(TypeError, match="real"):
        strategy.run(lambda: metric.update_state(1j))
    strategy.run(lambda: metric.update_state(np.ones(2)))
    with pytest.raises(ValueError, match=r"\(2,\).*\(3,\)"):
        strategy.run(lambda: metric.update_state(np.ones(3)))


def test_ranks_whose_sums_differ(strategy, others):
    with strategy.scope():
        metric = ms.metrics.from_sums(lambda x: x, np.sum)
    with pytest.raises(ms.errors.CollectiveMismatchError, match="from_sums"):
        strategy.run(lambda: metric.update_state(np.ones(2 if others else 3)))
