"""Warnings for names that tf.distribute has deprecated."""

from __future__ import annotations

import warnings

__all__ = ["warn_deprecated"]


def warn_deprecated(name: str, remedy: str) -> None:
    """Warn the caller of the function that calls this that `name` is deprecated. Local."""
    warnings.warn(f"{name} is deprecated. {remedy}", DeprecationWarning, stacklevel=3)
