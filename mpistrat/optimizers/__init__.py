"""Optimizers: they reduce gradients over replicas and update variables."""

from mpistrat.optimizers.adam import Adam
from mpistrat.optimizers.base import Optimizer
from mpistrat.optimizers.sgd import SGD

__all__ = ["SGD", "Adam", "Optimizer"]
