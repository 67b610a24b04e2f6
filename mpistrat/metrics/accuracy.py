"""How often predicted class labels are right."""

from __future__ import annotations

from typing import Any

from mpistrat.metrics.base import as_pair
from mpistrat.metrics.mean import RunningMean

__all__ = ["Accuracy"]


class Accuracy(RunningMean):
    """The share of examples whose predicted class label equals the true one.

    Parameters
    ----------
    name : str, optional
    """

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Compare labels, arrays of one shape (also empty ones). Local.

        Raises
        ------
        ValueError
            If the shapes differ, or in cross-replica context.
        """
        remedy = "For scores of shape (n, classes) give y_pred.argmax(axis=1)."
        truth, guess = as_pair("Accuracy", y_true, y_pred, remedy)
        self._take_in(truth == guess, sample_weight)
