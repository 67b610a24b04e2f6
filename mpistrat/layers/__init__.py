"""Layers whose computation depends on the strategy, for programs with hand-written gradients."""

from mpistrat.layers.batch_norm import BatchNorm

__all__ = ["BatchNorm"]
