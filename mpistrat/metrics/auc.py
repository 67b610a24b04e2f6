"""AUC metric: the area under a curve over thresholds, computed from binned scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from mpistrat import context
from mpistrat.arguments import as_bool, as_finite, as_integer
from mpistrat.arrays import namespace_of
from mpistrat.metrics.classification import SAME_SHAPE, as_labels, ratio
from mpistrat.metrics.metric import (
    Given,
    Metric,
    as_pair,
    beside_first_axes,
    check_real,
    weights_of,
)
from mpistrat.strategies import get_strategy


class AUC(Metric[np.float64]):
    """Area under the ROC or the precision-recall curve, computed from binned scores.

    Scores between the same two thresholds count as equal. So the value is exact if different scores
    are in different bins. It is NaN if all labels are equal (for ``"PR"``, if no label is 1).

    Parameters
    ----------
    num_thresholds : int
        Number of thresholds, at least 2, evenly spaced over [0, 1].
    curve : str
        ``"ROC"``: recall over the false positive rate. ``"PR"``: precision over recall.
    summation_method : str
        ``"interpolation"`` (for ``"PR"`` by Davis and Goadrich, 2006), ``"minoring"`` or
        ``"majoring"``, which use the lower or the higher value of each interval.
    name : str, optional
        Name of the metric. Default: the class name in lower case.
    thresholds : sequence of float, optional
        Thresholds within [0, 1], instead of `num_thresholds`.
    from_logits : bool
        Whether scores are logits and not probabilities. A sigmoid is then applied to them.

    Raises
    ------
    TypeError, ValueError
        If a parameter has the wrong type or value.
    CollectiveMismatchError
        If the ranks disagree on a parameter.

    Examples
    --------
    >>> metric = ms.metrics.AUC()
    >>> metric.update_state([0, 0, 1, 1], [0.1, 0.4, 0.35, 0.8])
    >>> metric.result()
    np.float64(0.75)
    """

    @context.made_in_scope
    def __init__(
        self,
        num_thresholds: int = 200,
        curve: str = "ROC",
        summation_method: str = "interpolation",
        name: str | None = None,
        thresholds: Sequence[float] | None = None,
        from_logits: bool = False,
    ) -> None:
        with context.collectives_of(get_strategy()).call("AUC", name) as call:
            self.curve = _one_of("AUC: curve", curve, ("ROC", "PR"))
            methods = ("interpolation", "minoring", "majoring")
            self.summation_method = _one_of("AUC: summation_method", summation_method, methods)
            self.from_logits = as_bool("AUC: from_logits", from_logits)
            self.thresholds = _bin_edges(num_thresholds, thresholds)
            self.num_thresholds = len(self.thresholds)
            call.agree(f"{curve}, {summation_method}, {from_logits}, {self.thresholds}")
        super().__init__(name)
        self._edges = np.array(self.thresholds)
        for what in ("positives", "negatives"):
            self._make_sum(what, (self.num_thresholds + 1,))

    def update_state(
        self, y_true: Given, y_pred: Given, sample_weight: npt.ArrayLike | None = None
    ) -> None:
        """Count labels by the bin of their score. Local.

        Parameters
        ----------
        y_true : array, tensor or sequence
            Labels, each 0 or 1, of shape ``(n, ...)``, where n may be 0.
        y_pred : array, tensor or sequence
            A score in [0, 1], or a logit, for each label.
        sample_weight : array, tensor, sequence or number, optional
            Weights whose axes are the *first* axes of `y_true`, as in `MeanSquaredError`. Default:
            1.

        Raises
        ------
        ValueError
            If the shapes do not match, a label is neither 0 nor 1, a score is outside [0, 1], or
            in cross-replica context.
        TypeError
            If an argument does not contain real numbers.
        """
        truth, scores = as_pair("AUC", y_true, y_pred, SAME_SHAPE)
        truth = as_labels("AUC", truth)
        check_real("y_pred", scores)
        xp = namespace_of(scores)
        scores = scores.astype(np.float64)
        if self.from_logits:
            scores = 0.5 * (1 + xp.tanh(0.5 * scores))  # the sigmoid, without overflow
        if not xp.all((scores >= 0) & (scores <= 1)):
            raise ValueError(
                "AUC takes scores in [0, 1], but y_pred has other values. Create it with "
                "from_logits=True for logits, or pass the softmax's probabilities."
            )
        weights = weights_of(truth, beside_first_axes(sample_weight, truth.ndim)).ravel()
        # The bin of a score is the number of thresholds below it.
        bins = xp.searchsorted(xp.asarray(self._edges), scores.ravel(), side="left")
        truth, length = truth.ravel(), self.num_thresholds + 1
        self._add(
            xp.bincount(bins, weights * truth, minlength=length),
            xp.bincount(bins, weights * ~truth, minlength=length),
        )

    def _compute(self, sums: Mapping[str, Any]) -> Any:
        # Sums over the scores above each threshold, beginning with the lowest.
        right, wrong = (_from_last(sums[what])[1:] for what in ("positives", "negatives"))
        if not right[0] or (self.curve == "ROC" and not wrong[0]):
            return np.float64(np.nan)
        recall = right / right[0]
        if self.curve == "ROC":
            return self._area(wrong / wrong[0], recall)
        if self.summation_method != "interpolation":
            return self._area(recall, ratio(right, right + wrong))
        return _interpolated_precision(right, right + wrong)

    def _area(self, x: np.ndarray, y: np.ndarray) -> Any:
        """Return the area under points with decreasing `x`."""
        height = {
            "interpolation": (y[:-1] + y[1:]) / 2,
            "minoring": np.minimum(y[:-1], y[1:]),
            "majoring": np.maximum(y[:-1], y[1:]),
        }[self.summation_method]
        return np.float64(np.sum((x[:-1] - x[1:]) * height))


_EPSILON = 1e-7


def _bin_edges(num_thresholds: Any, thresholds: Any) -> tuple[float, ...]:
    """Return thresholds, the first of which is below all scores and the last above."""
    if thresholds is None:
        number = as_integer("AUC: num_thresholds", num_thresholds, 2)
        inner = [step / (number - 1) for step in range(1, number - 1)]
    else:
        inner = sorted(as_finite("AUC: thresholds", each) for each in thresholds)
        if inner and not 0 <= inner[0] <= inner[-1] <= 1:
            raise ValueError(f"AUC: thresholds must be within [0, 1], not {inner}.")
    return (-_EPSILON, *inner, 1 + _EPSILON)


def _one_of(what: str, given: Any, known: tuple[str, ...]) -> str:
    if given not in known:
        raise ValueError(f"{what} must be one of {known}, not {given!r}.")
    return str(given)


def _from_last(counts: np.ndarray) -> np.ndarray:
    """Return for each position the sum of `counts` from there to the end."""
    return np.asarray(np.cumsum(counts[::-1])[::-1])


def _interpolated_precision(right: np.ndarray, positive: np.ndarray) -> Any:
    """Return the area under precision over recall, between points as counts of `right` grow."""
    # Between two thresholds right is a linear function of positive, slope * positive + offset, so
    # the integral of precision, right / positive, over right has a logarithm (Davis and Goadrich).
    more_right, more_positive = right[:-1] - right[1:], positive[:-1] - positive[1:]
    slope = ratio(more_right, more_positive)
    offset = right[1:] - slope * positive[1:]
    are_positive = (positive[:-1] > 0) & (positive[1:] > 0)
    growth = np.divide(positive[:-1], positive[1:], out=np.ones(len(slope)), where=are_positive)
    area: np.float64 = np.sum(slope * (more_right + offset * np.log(growth))) / right[0]
    return area
