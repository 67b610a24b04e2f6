"""Classification metrics for labels 0 and 1: precision, recall and F1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpistrat import context
from mpistrat.arguments import as_finite, as_integer
from mpistrat.arrays import Array, namespace_of
from mpistrat.metrics.metric import (
    Given,
    Metric,
    SumsByUpdate,
    as_pair,
    beside,
    beside_first_axes,
    check_real,
    weights_of,
)
from mpistrat.strategies import get_strategy

SAME_SHAPE = "Labels are 0 or 1, with one score each: for classes pass one-hot labels."


class _BinaryCounts(Metric[Any]):
    """Counts right and wrong predictions at thresholds: the common part of precision and recall."""

    @context.made_in_scope
    def __init__(
        self,
        thresholds: float | Sequence[float] | None = None,
        top_k: int | None = None,
        class_id: int | None = None,
        name: str | None = None,
    ) -> None:
        kind = type(self).__name__
        with context.collectives_of(get_strategy()).call(kind, name) as call:
            self.thresholds = _thresholds(kind, thresholds)
            self.top_k = None if top_k is None else as_integer(f"{kind}: top_k", top_k, 1)
            self.class_id = None if class_id is None else as_integer(f"{kind}: class_id", class_id)
            call.agree(f"thresholds={self.thresholds}, top_k={top_k}, class_id={class_id}")
        super().__init__(name)
        shape = np.shape(self.thresholds if self.thresholds is not None else 0)
        for what in ("true_positives", "false_positives", "false_negatives"):
            self._make_sum(what, shape)

    def update_state(
        self, y_true: Given, y_pred: Given, sample_weight: npt.ArrayLike | None = None
    ) -> None:
        """Compare labels with scores. Local.

        Parameters
        ----------
        y_true : array, tensor or sequence
            Labels, each 0 or 1, of shape ``(n, ...)``, where n may be 0.
        y_pred : array, tensor or sequence
            A score for each label. Scores above the threshold are positive predictions.
        sample_weight : array, tensor, sequence or number, optional
            Weights whose axes are the *first* axes of `y_true`, as in `MeanSquaredError`. Default:
            1.

        Raises
        ------
        ValueError
            If the shapes do not match, a label is neither 0 nor 1, or in cross-replica context.
        TypeError
            If an argument does not contain real numbers.
        """
        kind = type(self).__name__
        truth, scores = as_pair(kind, y_true, y_pred, SAME_SHAPE)
        truth = as_labels(kind, truth)
        check_real("y_pred", scores)
        if self.top_k is not None:
            scores = _only_highest(kind, scores, self.top_k)
        if self.class_id is not None:
            _check_class(kind, self.class_id, scores)
            truth, scores = truth[..., self.class_id], scores[..., self.class_id]
        weights = weights_of(truth, beside_first_axes(sample_weight, truth.ndim))
        lowest = 0.5 if self.top_k is None else -np.inf
        at = lowest if self.thresholds is None else self.thresholds
        if not isinstance(at, tuple):
            self._add(*_counts(truth, scores > at, weights))
            return
        counts = [_counts(truth, scores > each, weights) for each in at]
        stack = namespace_of(truth).stack
        self._add(*(stack(each) for each in zip(*counts, strict=True)))


class Precision(_BinaryCounts):
    """Fraction of positive predictions that are right: ``TP / (TP + FP)``; 0 without any.

    Parameters
    ----------
    thresholds : float or sequence of float, optional
        Scores above it are positive predictions. For several thresholds `result` is an array.
        Default: 0.5; with `top_k`, no threshold.
    top_k : int, optional
        Only the `top_k` highest scores of each example, along the last axis, are positive.
    class_id : int, optional
        Count only this class, given by its index on the last axis.
    name : str, optional
        Name of the metric. Default: the class name in lower case.

    Raises
    ------
    TypeError, ValueError
        If a parameter has the wrong type or value.
    CollectiveMismatchError
        If the ranks disagree on a parameter.

    Examples
    --------
    >>> metric = ms.metrics.Precision()
    >>> metric.update_state([1, 0, 1, 1], [0.9, 0.8, 0.7, 0.1])
    >>> metric.result()
    np.float64(0.6666666666666666)
    """

    def _compute(self, sums: Mapping[str, Any]) -> Any:
        right = sums["true_positives"]
        return ratio(right, right + sums["false_positives"])


class Recall(_BinaryCounts):
    """Fraction of positive labels that are predicted: ``TP / (TP + FN)``; 0 without any.

    Parameters
    ----------
    thresholds, top_k, class_id, name
        As in `Precision`.

    Raises
    ------
    TypeError, ValueError
        If a parameter has the wrong type or value.
    CollectiveMismatchError
        If the ranks disagree on a parameter.

    Examples
    --------
    >>> metric = ms.metrics.Recall()
    >>> metric.update_state([1, 0, 1, 1], [0.9, 0.8, 0.7, 0.1])
    >>> metric.result()
    np.float64(0.6666666666666666)
    """

    def _compute(self, sums: Mapping[str, Any]) -> Any:
        right = sums["true_positives"]
        return ratio(right, right + sums["false_negatives"])


_AVERAGES = (None, "micro", "macro", "weighted")


class F1(SumsByUpdate):
    """Harmonic mean of precision and recall: ``2 TP / (2 TP + FP + FN)``; 0 without any.

    Labels of shape ``(n,)`` distinguish two classes, and the result is one number. For labels of
    shape ``(n, classes)`` it is a value for each class, or their average.

    Parameters
    ----------
    average : str, optional
        ``None`` for the value of each class, ``"micro"`` for the value of all labels together,
        ``"macro"`` for the mean over the classes, or ``"weighted"`` for the mean weighted by the
        number of labels. A class without labels and predictions counts as 0.
    threshold : float, optional
        Scores above it are positive predictions. Default: 0.5 for labels of shape ``(n,)``;
        otherwise the highest score of each example, the first among equals, is the prediction.
    name : str, optional
        Name of the metric. Default: the class name in lower case.

    Raises
    ------
    TypeError, ValueError
        If a parameter has the wrong type or value.
    CollectiveMismatchError
        If the ranks disagree on a parameter.

    Examples
    --------
    >>> metric = ms.metrics.F1()
    >>> metric.update_state([[1, 0], [0, 1]], [[0.9, 0.2], [0.1, 0.8]])
    >>> metric.result()
    array([1., 1.])
    """

    @context.made_in_scope
    def __init__(
        self, average: str | None = None, threshold: float | None = None, name: str | None = None
    ) -> None:
        with context.collectives_of(get_strategy()).call("F1", name) as call:
            if average not in _AVERAGES:
                raise ValueError(f"F1: average must be one of {_AVERAGES}, not {average!r}.")
            self.average = average
            self.threshold = None if threshold is None else as_finite("F1: threshold", threshold)
            call.agree(f"average={average}, threshold={self.threshold}")
        super().__init__(name)

    def update_state(
        self, y_true: Given, y_pred: Given, sample_weight: npt.ArrayLike | None = None
    ) -> None:
        """Compare labels with scores. Local, except for the first call, which is **Collective**.

        Parameters
        ----------
        y_true : array, tensor or sequence
            Labels, each 0 or 1, of shape ``(n,)`` or ``(n, classes)``, where n may be 0.
        y_pred : array, tensor or sequence
            A score for each label.
        sample_weight : array, tensor, sequence or number, optional
            A weight for each example, shape ``(n,)``. Default: 1.

        Raises
        ------
        ValueError
            If the shapes do not match, a label is neither 0 nor 1, or in cross-replica context.
        TypeError
            If an argument does not contain real numbers.
        """

        def compute() -> dict[str, Array]:
            truth, scores = as_pair("F1", y_true, y_pred, SAME_SHAPE)
            truth = as_labels("F1", truth)
            check_real("y_pred", scores)
            if truth.ndim not in (1, 2):
                raise ValueError(
                    "F1 takes labels of shape (n,) or (n, classes), not "
                    f"{tuple(truth.shape)}. Reshape them."
                )
            weights = weights_of(truth, beside_first_axes(sample_weight, truth.ndim))
            counts = _counts(truth, self._predictions(scores), weights, axis=0)
            return dict(
                zip(("true_positives", "false_positives", "false_negatives"), counts, strict=True)
            )

        self._add_computed(compute)

    def _predictions(self, scores: Array) -> Array:
        if self.threshold is not None or scores.ndim == 1:
            above: Array = scores > (0.5 if self.threshold is None else self.threshold)
            return above
        xp = namespace_of(scores)
        highest = scores.argmax(axis=1) if scores.size else xp.zeros(len(scores), dtype=np.int64)
        chosen: Array = highest[:, None] == xp.arange(scores.shape[1])
        return chosen

    def _compute(self, sums: Mapping[str, Any]) -> Any:
        right, wrong = sums["true_positives"], sums["false_positives"] + sums["false_negatives"]
        if self.average == "micro":
            right, wrong = np.sum(right), np.sum(wrong)
        each = ratio(2 * right, 2 * right + wrong)
        if self.average == "macro":
            return np.float64(np.mean(each))
        if self.average == "weighted":
            num_labels = sums["true_positives"] + sums["false_negatives"]
            return ratio(np.sum(each * num_labels), np.sum(num_labels))
        return each


def _thresholds(kind: str, given: Any) -> float | tuple[float, ...] | None:
    if given is None:
        return None
    if np.ndim(given) == 0:
        return as_finite(f"{kind}: thresholds", given)
    numbers = tuple(as_finite(f"{kind}: thresholds", each) for each in given)
    if not numbers:
        raise ValueError(f"{kind}: thresholds has no number. Leave it out for 0.5.")
    return numbers


def as_labels(kind: str, truth: Array) -> Array:
    """Return labels, which must be 0 or 1, as bools."""
    check_real("y_true", truth)
    if truth.dtype != np.bool_ and not bool(((truth == 0) | (truth == 1)).all()):
        raise ValueError(
            f"{kind} takes labels that are 0 or 1, but y_true has others. For several classes pass "
            "one-hot labels: np.eye(num_classes)[y_true]."
        )
    return truth.astype(np.bool_)


def _only_highest(kind: str, scores: Array, k: int) -> Array:
    """Return `scores` with all but the `k` highest along the last axis replaced by -inf."""
    if not scores.ndim or scores.shape[-1] < k:
        raise ValueError(
            f"{kind} with top_k={k} needs at least {k} scores along the last axis, but y_pred has "
            f"the shape {tuple(scores.shape)}."
        )
    xp = namespace_of(scores)
    scores = scores.astype(np.float64)
    highest = xp.argsort(-scores, axis=-1, stable=True)[..., :k]
    result: Array = xp.full(scores.shape, -np.inf)
    xp.put_along_axis(result, highest, xp.take_along_axis(scores, highest, axis=-1), axis=-1)
    return result


def _check_class(kind: str, class_id: int, scores: Array) -> None:
    num_classes = scores.shape[-1] if scores.ndim else 0
    if not 0 <= class_id < num_classes:
        raise ValueError(
            f"{kind} with class_id={class_id} needs that class along the last axis, but y_pred has "
            f"the shape {tuple(scores.shape)}."
        )


def _counts(
    truth: Array, positive: Array, weights: Array, axis: int | None = None
) -> tuple[Any, Any, Any]:
    """Return the weights of true positives, false positives and false negatives."""
    positive = beside(positive, truth)
    xp = namespace_of(truth)
    return (
        xp.sum(weights * (truth & positive), axis=axis),
        xp.sum(weights * (~truth & positive), axis=axis),
        xp.sum(weights * (truth & ~positive), axis=axis),
    )


def ratio(part: Any, whole: Any) -> Any:
    """Return `part` / `whole`, 0 where `whole` is 0."""
    whole = np.asarray(whole)
    return np.divide(part, whole, out=np.zeros(whole.shape), where=whole != 0)[()]
