"""Standard metrics: sum, mean, accuracy, squared error, top-k."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from mpistrat import context
from mpistrat.arguments import as_integer, span_outside
from mpistrat.arrays import Array, namespace_of
from mpistrat.metrics.metric import (
    Given,
    Metric,
    as_pair,
    as_values,
    beside,
    beside_first_axes,
    check_real,
    class_numbers,
    weighted,
)
from mpistrat.strategies import get_strategy


class Sum(Metric[np.float64]):
    """The (weighted) sum of all values given to all replicas.

    Parameters
    ----------
    name : str, optional

    Examples
    --------
    >>> metric = ms.metrics.Sum()
    >>> metric.update_state([1.0, 2.0])
    >>> metric.result()
    np.float64(3.0)
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._make_sum("total")

    def update_state(self, values: Given, sample_weight: npt.ArrayLike | None = None) -> None:
        """Take `values`, an array (also an empty one) or a number, in. Local.

        Raises
        ------
        ValueError
            If `sample_weight` cannot be broadcast to `values`, or in cross-replica context.
        """
        total, _ = weighted(values, sample_weight)
        self._add(total)

    def _compute(self, sums: Mapping[str, np.float64]) -> np.float64:
        return sums["total"]


class RunningMean(Metric[np.float64]):
    """A total and a count, and their quotient: what metrics that are means share."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._make_sum("total")
        self._make_sum("count")

    def _take_in(self, values: Given, sample_weight: npt.ArrayLike | None) -> None:
        self._add(*weighted(values, sample_weight))

    def _compute(self, sums: Mapping[str, np.float64]) -> np.float64:
        with np.errstate(invalid="ignore", divide="ignore"):
            return sums["total"] / sums["count"]


class Mean(RunningMean):
    """The (weighted) mean of all values given to all replicas; NaN before the first one.

    Parameters
    ----------
    name : str, optional

    Examples
    --------
    >>> metric = ms.metrics.Mean()
    >>> metric.update_state([1.0, 3.0], sample_weight=[3.0, 1.0])
    >>> metric.result()
    np.float64(1.5)
    """

    def update_state(self, values: Given, sample_weight: npt.ArrayLike | None = None) -> None:
        """Take `values`, an array (also an empty one) or a number, in. Local.

        Raises
        ------
        ValueError
            If `sample_weight` cannot be broadcast to `values`, or in cross-replica context.
        """
        self._take_in(values, sample_weight)


class Accuracy(RunningMean):
    """The share of examples whose predicted class label equals the true one.

    Parameters
    ----------
    name : str, optional

    Examples
    --------
    >>> metric = ms.metrics.Accuracy()
    >>> metric.update_state([1, 2, 3, 4], [1, 2, 3, 0])
    >>> metric.result()
    np.float64(0.75)
    """

    def update_state(
        self, y_true: Given, y_pred: Given, sample_weight: npt.ArrayLike | None = None
    ) -> None:
        """Compare labels, arrays of one shape (also empty ones). Local.

        Raises
        ------
        ValueError
            If the shapes differ, or in cross-replica context.
        """
        remedy = "For scores of shape (n, classes) give y_pred.argmax(axis=1)."
        truth, guess = as_pair("Accuracy", y_true, y_pred, remedy)
        self._take_in(truth == guess, sample_weight)


class MeanSquaredError(RunningMean):
    """The (weighted) mean of ``(y_true - y_pred) ** 2``; NaN before the first example.

    Parameters
    ----------
    name : str, optional

    Examples
    --------
    >>> metric = ms.metrics.MeanSquaredError()
    >>> metric.update_state([1.0, 2.0], [1.0, 4.0])
    >>> metric.result()
    np.float64(2.0)
    """

    def update_state(
        self, y_true: Given, y_pred: Given, sample_weight: npt.ArrayLike | None = None
    ) -> None:
        """Take the errors of some examples in; computed in float64. Local.

        Parameters
        ----------
        y_true, y_pred : array, tensor, sequence or number
            Of one shape ``(n, ...)``, where n may be 0.
        sample_weight : array, tensor, sequence or number, optional
            Its axes are the *first* of `y_true`, so that ``(n,)`` has a weight for each example,
            which counts for all its elements. By default 1.

        Raises
        ------
        ValueError
            If the shapes do not fit, or in cross-replica context.
        TypeError
            If an argument holds no real numbers.
        """
        remedy = "Reshape one of them: they are not broadcast."
        truth, guess = as_pair("MeanSquaredError", y_true, y_pred, remedy)
        check_real("y_true", truth)
        check_real("y_pred", guess)
        # In float64 before the difference, which small and unsigned integers cannot hold.
        errors = truth.astype(np.float64)
        errors -= guess
        errors *= errors
        self._take_in(errors, beside_first_axes(sample_weight, errors.ndim))


class TopKAccuracy(RunningMean):
    """The share of examples whose true class has one of the `k` highest scores.

    That is so where fewer than `k` classes score *higher* than the true one: classes that tie
    with it do not push it out. A NaN counts as higher than every number, and a true class whose
    own score is NaN is never right. Infinities are numbers like any other.

    Parameters
    ----------
    k : int
        Equal on all ranks.
    name : str, optional

    Raises
    ------
    TypeError
        If `k` is no integer.
    ValueError
        If `k` is below 1.
    CollectiveMismatchError
        If the ranks disagree on `k`.

    Examples
    --------
    >>> metric = ms.metrics.TopKAccuracy(k=2)
    >>> metric.update_state([0, 2], [[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    >>> metric.result()
    np.float64(0.5)
    """

    @context.made_in_scope
    def __init__(self, k: int = 5, name: str | None = None) -> None:
        with context.collectives_of(get_strategy()).call("TopKAccuracy", name) as call:
            self.k = as_integer("TopKAccuracy: k", k, 1)
            call.agree(f"k={self.k}")
        super().__init__(name)

    def update_state(
        self, y_true: Given, y_pred: Given, sample_weight: npt.ArrayLike | None = None
    ) -> None:
        """Compare labels with scores. Local.

        Parameters
        ----------
        y_true : array, tensor or sequence
            Class numbers of an integer dtype, shape ``(n,)``, where n may be 0.
        y_pred : array, tensor or sequence
            Real scores (logits or probabilities), shape ``(n, classes)``.
        sample_weight : array, tensor, sequence or number, optional
            A weight for each example, shape ``(n,)``. By default 1.

        Raises
        ------
        ValueError
            If the shapes do not fit, a label is no class, there are fewer than `k` classes, or in
            cross-replica context.
        TypeError
            If the labels are no integers, or the scores no real numbers.
        """
        scores = as_values("y_pred", y_pred)
        labels = as_values("y_true", y_true)
        labels = beside(class_numbers("TopKAccuracy", "y_true", labels), scores)
        check_real("y_pred", scores)
        self._check_shapes(labels, scores)
        _check_range(labels, scores.shape[1])
        xp = namespace_of(scores)
        own = xp.take_along_axis(scores, labels[:, None].astype(np.int64), axis=1)
        # "Not at most" and "higher" differ for NaN alone.
        num_higher = xp.sum(~(scores <= own), axis=1)
        self._take_in(num_higher < self.k, sample_weight)

    def _check_shapes(self, labels: Array, scores: Array) -> None:
        if labels.ndim != 1 or scores.ndim != 2 or labels.shape[0] != scores.shape[0]:
            raise ValueError(
                "TopKAccuracy takes labels of shape (n,) and scores of shape (n, classes): y_true "
                f"has the shape {tuple(labels.shape)}, y_pred {tuple(scores.shape)}. For one-hot "
                "labels give y_true.argmax(axis=1)."
            )
        if scores.shape[1] < self.k:
            raise ValueError(
                f"TopKAccuracy with k={self.k} needs scores of at least {self.k} classes, but "
                f"y_pred has the shape {tuple(scores.shape)}. Make it with a smaller k."
            )


def _check_range(labels: Array, num_classes: int) -> None:
    span = span_outside(labels, num_classes)
    if span is not None:
        raise ValueError(
            f"TopKAccuracy: y_true has labels from {span[0]} to {span[1]}, but y_pred has scores "
            f"for the classes 0 to {num_classes - 1}."
        )
