"""How often predicted class labels are right."""

from __future__ import annotations

from typing import Any

from mpistrat.metrics.base import as_values, beside
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
        truth, guess = as_values("y_true", y_true), as_values("y_pred", y_pred)
        if tuple(truth.shape) != tuple(guess.shape):
            raise ValueError(
                f"Accuracy compares class labels: y_true has the shape {tuple(truth.shape)}, "
                f"y_pred {tuple(guess.shape)}. For scores of shape (n, classes) give "
                "y_pred.argmax(axis=1)."
            )
        self._take_in(truth == beside(guess, truth), sample_weight)
