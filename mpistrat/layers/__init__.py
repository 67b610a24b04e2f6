"""Layers whose computation depends on the strategy, for gradients written by hand."""

from mpistrat.layers.batch_norm import BatchNorm

__all__ = ["BatchNorm"]
