"""Confusion matrix metric, and the intersection over union computed from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from mpistrat import context
from mpistrat.arguments import as_bool, as_integer, span_outside
from mpistrat.arrays import Array, namespace_of
from mpistrat.metrics.metric import (
    Given,
    Metric,
    as_pair,
    as_values,
    beside_first_axes,
    class_numbers,
    weights_of,
)
from mpistrat.strategies import get_strategy

_Result = TypeVar("_Result")


class _PairCounts(Metric[_Result]):
    """Counts pairs of true and predicted class."""

    @context.made_in_scope
    def __init__(self, num_classes: int, name: str | None = None) -> None:
        kind = type(self).__name__
        with context.collectives_of(get_strategy()).call(kind, name) as call:
            self.num_classes = as_integer(f"{kind}: num_classes", num_classes, 1)
            call.agree(f"num_classes={num_classes}")
        super().__init__(name)
        self._make_sum("matrix", (num_classes, num_classes))

    def _count(
        self, truth: Array, guess: Array, sample_weight: Any, ignored: int | None = None
    ) -> None:
        kind, num_classes = type(self).__name__, self.num_classes
        weights = weights_of(truth, beside_first_axes(sample_weight, truth.ndim))
        if ignored is not None:
            kept = truth != ignored
            truth, guess, weights = truth[kept], guess[kept], weights[kept]
        pair = []
        for what, given in ("y_true", truth), ("y_pred", guess):
            labels = class_numbers(kind, what, given).ravel().astype(np.int64)
            span = span_outside(labels, num_classes)
            if span is not None:
                raise ValueError(
                    f"{kind}: {what} has classes from {span[0]} to {span[1]}, but there are only "
                    f"0 to {num_classes - 1}."
                )
            pair.append(labels)
        xp = namespace_of(pair[0])
        numbers = pair[0] * num_classes + pair[1]
        counts = xp.bincount(numbers, weights.ravel(), minlength=num_classes**2)
        self._add(counts.reshape(num_classes, num_classes))


class ConfusionMatrix(_PairCounts[np.ndarray]):
    """Confusion matrix: how often each class was predicted for each true class.

    The result is a float64 array of shape ``(num_classes, num_classes)``. Its element (i, j) is the
    (weighted) number of examples of class i that were predicted as class j.

    Parameters
    ----------
    num_classes : int
        Number of classes, at least 1; equal on all ranks.
    name : str, optional
        Name of the metric. Default: the class name in lower case.

    Raises
    ------
    TypeError, ValueError
        If `num_classes` is not an integer of at least 1.
    CollectiveMismatchError
        If the ranks disagree on `num_classes`.

    Examples
    --------
    >>> metric = ms.metrics.ConfusionMatrix(2)
    >>> metric.update_state([0, 1, 1], [0, 1, 0])
    >>> metric.result()
    array([[1., 0.],
           [1., 1.]])
    """

    def update_state(
        self, y_true: Given, y_pred: Given, sample_weight: npt.ArrayLike | None = None
    ) -> None:
        """Count pairs of classes. Local.

        Parameters
        ----------
        y_true, y_pred : array, tensor or sequence
            Class numbers of an integer dtype, both of shape ``(n, ...)``, where n may be 0.
        sample_weight : array, tensor, sequence or number, optional
            Weights whose axes are the *first* axes of `y_true`, as in `MeanSquaredError`. Default:
            1.

        Raises
        ------
        ValueError
            If the shapes do not match, a number is not a class, or in cross-replica context.
        TypeError
            If the classes are not integers.
        """
        kind = type(self).__name__
        remedy = "For scores of shape (n, classes) pass y_pred.argmax(axis=1)."
        self._count(*as_pair(kind, y_true, y_pred, remedy), sample_weight)

    def _compute(self, sums: Mapping[str, Any]) -> np.ndarray:
        matrix: np.ndarray = sums["matrix"]
        return matrix


class MeanIoU(_PairCounts[np.float64]):
    """Mean intersection over union: ``TP / (TP + FP + FN)``, averaged over the classes.

    Classes that are neither a label nor predicted are not counted; NaN without any.

    Parameters
    ----------
    num_classes : int
        Number of classes, at least 1; equal on all ranks.
    name : str, optional
        Name of the metric. Default: the class name in lower case.
    ignore_class : int, optional
        Label of elements that are not counted. It need not be a class.
    sparse_y_true, sparse_y_pred : bool
        Whether `y_true` or `y_pred` contains class numbers. Otherwise it contains one number per
        class, such as one-hot labels or scores, and the class with the highest number counts.
    axis : int
        Axis of the classes if `y_true` or `y_pred` is not sparse.

    Raises
    ------
    TypeError, ValueError
        If a parameter has the wrong type or value.
    CollectiveMismatchError
        If the ranks disagree on a parameter.

    Examples
    --------
    >>> metric = ms.metrics.MeanIoU(2)
    >>> metric.update_state([0, 1, 1], [0, 1, 0])
    >>> metric.result()
    np.float64(0.5)
    """

    @context.made_in_scope
    def __init__(
        self,
        num_classes: int,
        name: str | None = None,
        ignore_class: int | None = None,
        sparse_y_true: bool = True,
        sparse_y_pred: bool = True,
        axis: int = -1,
    ) -> None:
        with context.collectives_of(get_strategy()).call("MeanIoU", name) as call:
            self.ignore_class = (
                None if ignore_class is None else as_integer("MeanIoU: ignore_class", ignore_class)
            )
            self.sparse_y_true = as_bool("MeanIoU: sparse_y_true", sparse_y_true)
            self.sparse_y_pred = as_bool("MeanIoU: sparse_y_pred", sparse_y_pred)
            self.axis = as_integer("MeanIoU: axis", axis)
            call.agree(f"{ignore_class}, {sparse_y_true}, {sparse_y_pred}, axis={axis}")
        super().__init__(num_classes, name)

    def update_state(
        self, y_true: Given, y_pred: Given, sample_weight: npt.ArrayLike | None = None
    ) -> None:
        """Count pairs of classes. Local.

        Parameters
        ----------
        y_true, y_pred : array, tensor or sequence
            Class numbers of an integer dtype, both of shape ``(n, ...)``, where n may be 0. If not
            sparse, numbers with one more axis.
        sample_weight : array, tensor, sequence or number, optional
            Weights whose axes are the *first* axes of the class numbers, as in
            `MeanSquaredError`. Default: 1.

        Raises
        ------
        ValueError
            If the shapes do not match, a number is not a class, or in cross-replica context.
        TypeError
            If the classes are not integers.
        """
        truth, guess = as_values("y_true", y_true), as_values("y_pred", y_pred)
        if not self.sparse_y_true:
            truth = truth.argmax(axis=self.axis)
        if not self.sparse_y_pred:
            guess = guess.argmax(axis=self.axis)
        remedy = "For scores create it with sparse_y_pred=False."
        self._count(*as_pair("MeanIoU", truth, guess, remedy), sample_weight, self.ignore_class)

    def _compute(self, sums: Mapping[str, Any]) -> Any:
        matrix: np.ndarray = sums["matrix"]
        both = np.diagonal(matrix)
        either = matrix.sum(axis=0) + matrix.sum(axis=1) - both
        occurs = either > 0
        if not occurs.any():
            return np.float64(np.nan)
        return np.float64(np.mean(both[occurs] / either[occurs]))
