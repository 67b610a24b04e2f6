"""Metrics: accumulated by each replica alone, summed when the result is read."""

from typing import TYPE_CHECKING, NoReturn

from mpistrat.metrics.metric import Metric
from mpistrat.metrics.standard import Accuracy, Mean, MeanSquaredError, Sum, TopKAccuracy

__all__ = ["Accuracy", "Mean", "MeanSquaredError", "Metric", "Sum", "TopKAccuracy"]

if not TYPE_CHECKING:  # for type checkers, a name that is missing is an error

    def __getattr__(name: str) -> NoReturn:
        from mpistrat.migration import missing_name

        raise missing_name(__name__, name)
