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
    """The (weighted) sum of all values on all replicas.

    Parameters
    ----------
    name : str, optional
        Name of the metric. Default: the class name in lower case.

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
        """Add `values` to the sums of this replica. Local.

        Parameters
        ----------
        values : array, tensor, sequence or number
            Values of any shape; may be empty.
        sample_weight : array, tensor, sequence or number, optional
            Weights that can be broadcast to `values`. Default: 1.

        Raises
        ------
        TypeError, ValueError
            If `sample_weight` is not real or cannot be broadcast to `values`, if these are not
            real, or in cross-replica context.
        """
        total, _ = weighted(values, sample_weight)
        self._add(total)

    def _compute(self, sums: Mapping[str, np.float64]) -> np.float64:
        return sums["total"]


class RunningMean(Metric[np.float64]):
    """A total, a count and their quotient: the common part of metrics that are means."""

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
    """The (weighted) mean of all values on all replicas; NaN before the first one.

    Parameters
    ----------
    name : str, optional
        Name of the metric. Default: the class name in lower case.

    Examples
    --------
    >>> metric = ms.metrics.Mean()
    >>> metric.update_state([1.0, 3.0], sample_weight=[3.0, 1.0])
    >>> metric.result()
    np.float64(1.5)
    """

    def update_state(self, values: Given, sample_weight: npt.ArrayLike | None = None) -> None:
        """Add `values` to the sums of this replica. Local.

        Parameters
        ----------
        values : array, tensor, sequence or number
            Values of any shape; may be empty.
        sample_weight : array, tensor, sequence or number, optional
            Weights that can be broadcast to `values`. Default: 1.

        Raises
        ------
        TypeError, ValueError
            If `sample_weight` is not real or cannot be broadcast to `values`, if these are not
            real, or in cross-replica context.
        """
        self._take_in(values, sample_weight)


class Accuracy(RunningMean):
    """Fraction of examples whose predicted class label equals the true one.

    Parameters
    ----------
    name : str, optional
        Name of the metric. Default: the class name in lower case.

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
        """Compare true and predicted labels. Local.

        Parameters
        ----------
        y_true, y_pred : array, tensor or sequence
            True and predicted class labels, of the same shape; may be empty.
        sample_weight : array, tensor, sequence or number, optional
            Weights that can be broadcast to the labels. Default: 1.

        Raises
        ------
        ValueError
            If the shapes differ, or in cross-replica context.
        """
        remedy = "For scores of shape (n, classes) pass y_pred.argmax(axis=1)."
        truth, guess = as_pair("Accuracy", y_true, y_pred, remedy)
        self._take_in(truth == guess, sample_weight)


class MeanSquaredError(RunningMean):
    """The (weighted) mean of ``(y_true - y_pred) ** 2``; NaN before the first example.

    Parameters
    ----------
    name : str, optional
        Name of the metric. Default: the class name in lower case.

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
        """Add the squared errors of some examples, computed in float64. Local.

        Parameters
        ----------
        y_true, y_pred : array, tensor, sequence or number
            True and predicted values, of the same shape ``(n, ...)``, where n may be 0.
        sample_weight : array, tensor, sequence or number, optional
            Weights whose axes are the *first* axes of `y_true`. So the shape ``(n,)`` has one
            weight per example, which applies to all its elements. Default: 1.

        Raises
        ------
        ValueError
            If the shapes do not match, or in cross-replica context.
        TypeError
            If an argument does not contain real numbers.
        """
        remedy = "Reshape one of them: they are not broadcast."
        truth, guess = as_pair("MeanSquaredError", y_true, y_pred, remedy)
        check_real("y_true", truth)
        check_real("y_pred", guess)
        # Converted before the subtraction: small and unsigned integers cannot hold the difference.
        errors = truth.astype(np.float64)
        errors -= guess
        errors *= errors
        self._take_in(errors, beside_first_axes(sample_weight, errors.ndim))


class TopKAccuracy(RunningMean):
    """Fraction of examples whose true class has one of the `k` highest scores.

    An example counts as right if fewer than `k` classes score *higher* than the true one, so
    ties with the true class do not matter. A NaN counts as higher than every number, and a true
    class whose own score is NaN is never right. Infinities are treated as ordinary numbers.

    Parameters
    ----------
    k : int
        Number of highest scores, at least 1; equal on all ranks.
    name : str, optional
        Name of the metric. Default: the class name in lower case.

    Raises
    ------
    TypeError
        If `k` is not an integer.
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
            A weight for each example, shape ``(n,)``. Default: 1.

        Raises
        ------
        ValueError
            If the shapes do not match, a label is not a class, there are fewer than `k` classes, or
            in cross-replica context.
        TypeError
            If the labels are not integers, or the scores are not real numbers.
        """
        scores = as_values("y_pred", y_pred)
        labels = as_values("y_true", y_true)
        labels = beside(class_numbers("TopKAccuracy", "y_true", labels), scores)
        check_real("y_pred", scores)
        self._check_shapes(labels, scores)
        _check_range(labels, scores.shape[1])
        xp = namespace_of(scores)
        own = xp.take_along_axis(scores, labels[:, None].astype(np.int64), axis=1)
        # "Not at most" and "higher" differ only for NaN.
        num_higher = xp.sum(~(scores <= own), axis=1)
        self._take_in(num_higher < self.k, sample_weight)

    def _check_shapes(self, labels: Array, scores: Array) -> None:
        if labels.ndim != 1 or scores.ndim != 2 or labels.shape[0] != scores.shape[0]:
            raise ValueError(
                "TopKAccuracy takes labels of shape (n,) and scores of shape (n, classes): y_true "
                f"has the shape {tuple(labels.shape)}, y_pred {tuple(scores.shape)}. For one-hot "
                "labels pass y_true.argmax(axis=1)."
            )
        if scores.shape[1] < self.k:
            raise ValueError(
                f"TopKAccuracy with k={self.k} needs scores of at least {self.k} classes, but "
                f"y_pred has the shape {tuple(scores.shape)}. Create it with a smaller k."
            )


def _check_range(labels: Array, num_classes: int) -> None:
    span = span_outside(labels, num_classes)
    if span is not None:
        raise ValueError(
            f"TopKAccuracy: y_true has labels from {span[0]} to {span[1]}, but y_pred has scores "
            f"for the classes 0 to {num_classes - 1}."
        )
