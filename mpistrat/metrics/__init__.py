"""Metrics. Each replica accumulates its own sums; reading the result adds them up."""

from typing import TYPE_CHECKING, NoReturn

from mpistrat.metrics.auc import AUC
from mpistrat.metrics.classification import F1, Precision, Recall
from mpistrat.metrics.confusion_matrix import ConfusionMatrix, MeanIoU
from mpistrat.metrics.metric import Metric, from_sums
from mpistrat.metrics.standard import Accuracy, Mean, MeanSquaredError, Sum, TopKAccuracy

__all__ = [
    "AUC",
    "F1",
    "Accuracy",
    "ConfusionMatrix",
    "Mean",
    "MeanIoU",
    "MeanSquaredError",
    "Metric",
    "Precision",
    "Recall",
    "Sum",
    "TopKAccuracy",
    "from_sums",
]

if not TYPE_CHECKING:  # so that type checkers still report missing names as errors

    def __getattr__(name: str) -> NoReturn:
        from mpistrat.system.migration import missing_name

        raise missing_name(__name__, name)
