"""Metrics: accumulated by each replica alone, summed when the result is read."""

from mpistrat.metrics.accuracy import Accuracy
from mpistrat.metrics.base import Metric
from mpistrat.metrics.mean import Mean
from mpistrat.metrics.mean_squared_error import MeanSquaredError
from mpistrat.metrics.sum import Sum
from mpistrat.metrics.top_k_accuracy import TopKAccuracy

__all__ = ["Accuracy", "Mean", "MeanSquaredError", "Metric", "Sum", "TopKAccuracy"]
