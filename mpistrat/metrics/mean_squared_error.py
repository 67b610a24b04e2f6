"""The mean of squared errors."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.metrics.base import as_pair, as_values, check_real
from mpistrat.metrics.mean import RunningMean

__all__ = ["MeanSquaredError"]


class MeanSquaredError(RunningMean):
    """The (weighted) mean of ``(y_true - y_pred) ** 2``; NaN before the first example.

    Parameters
    ----------
    name : str, optional
    """

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
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
        self._take_in(errors, _beside_first_axes(sample_weight, errors.ndim))


def _beside_first_axes(sample_weight: Any, ndim: int) -> Any:
    """Return the weights with axes of length 1 behind their own, up to `ndim` axes."""
    if sample_weight is None:
        return None
    weights = as_values("sample_weight", sample_weight)
    return weights.reshape(weights.shape + (1,) * (ndim - weights.ndim))
