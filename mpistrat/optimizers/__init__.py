"""Optimizers: they reduce gradients over replicas and update variables."""

from typing import TYPE_CHECKING, NoReturn

from mpistrat.optimizers import schedules
from mpistrat.optimizers.accumulation import GradientAccumulator
from mpistrat.optimizers.adam import Adam
from mpistrat.optimizers.adam import Adam as AdamW
from mpistrat.optimizers.loss_scale import LossScale
from mpistrat.optimizers.moving_average import ExponentialMovingAverage
from mpistrat.optimizers.optimizer import Optimizer
from mpistrat.optimizers.sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "AdamW",
    "ExponentialMovingAverage",
    "GradientAccumulator",
    "LossScale",
    "Optimizer",
    "schedules",
]

if not TYPE_CHECKING:  # so that type checkers still report missing names as errors

    def __getattr__(name: str) -> NoReturn:
        from mpistrat.system.migration import missing_name

        raise missing_name(__name__, name)
