"""Optimizers: they reduce gradients over replicas and update variables."""

from mpistrat.optimizers import schedules
from mpistrat.optimizers.accumulation import GradientAccumulator
from mpistrat.optimizers.adam import Adam
from mpistrat.optimizers.loss_scale import LossScale
from mpistrat.optimizers.moving_average import ExponentialMovingAverage
from mpistrat.optimizers.optimizer import Optimizer
from mpistrat.optimizers.sgd import SGD

__all__ = [
    "SGD",
    "Adam",
    "ExponentialMovingAverage",
    "GradientAccumulator",
    "LossScale",
    "Optimizer",
    "schedules",
]
