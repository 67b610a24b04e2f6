"""Metrics: accumulated by each replica alone, summed when the result is read."""

from mpistrat.metrics.accuracy import Accuracy
from mpistrat.metrics.base import Metric
from mpistrat.metrics.mean import Mean
from mpistrat.metrics.sum import Sum

__all__ = ["Accuracy", "Mean", "Metric", "Sum"]
