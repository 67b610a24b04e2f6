"""Metrics: accumulated by each replica alone, summed when the result is read."""

from mpistrat.metrics.metric import Metric
from mpistrat.metrics.standard import Accuracy, Mean, MeanSquaredError, Sum, TopKAccuracy

__all__ = ["Accuracy", "Mean", "MeanSquaredError", "Metric", "Sum", "TopKAccuracy"]
