"""The mean of values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mpistrat.metrics.base import Metric, weighted

__all__ = ["Mean", "RunningMean"]


class RunningMean(Metric):
    """A total and a count, and their quotient: what metrics that are means share."""

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._make_sum("total")
        self._make_sum("count")

    def _take_in(self, values: Any, sample_weight: Any) -> None:
        self._add(*weighted(values, sample_weight))

    def _compute(self, sums: Mapping[str, Any]) -> Any:
        with np.errstate(invalid="ignore", divide="ignore"):
            return sums["total"] / sums["count"]


class Mean(RunningMean):
    """The (weighted) mean of all values given to all replicas; NaN before the first one.

    Parameters
    ----------
    name : str, optional
    """

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Take `values`, an array (also an empty one) or a number, in. Local.

        Raises
        ------
        ValueError
            If `sample_weight` cannot be broadcast to `values`, or in cross-replica context.
        """
        self._take_in(values, sample_weight)
