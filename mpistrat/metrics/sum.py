"""The sum of values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mpistrat.metrics.base import Metric, weighted

__all__ = ["Sum"]


class Sum(Metric):
    """The (weighted) sum of all values given to all replicas.

    Parameters
    ----------
    name : str, optional
    """

    def __init__(self, name: str | None = None) -> None:
        super().__init__(name)
        self._make_sum("total")

    def update_state(self, values: Any, sample_weight: Any = None) -> None:
        """Take `values`, an array (also an empty one) or a number, in. Local.

        Raises
        ------
        ValueError
            If `sample_weight` cannot be broadcast to `values`, or in cross-replica context.
        """
        total, _ = weighted(values, sample_weight)
        self._add(total)

    def _compute(self, sums: Mapping[str, Any]) -> Any:
        return sums["total"]
