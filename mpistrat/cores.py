"""The cores of this machine."""

from __future__ import annotations

import os

__all__ = ["num_cores"]


def num_cores() -> int:
    """Return how many cores this process may use. Local."""
    if hasattr(os, "sched_getaffinity"):
        return max(len(os.sched_getaffinity(0)), 1)
    return os.cpu_count() or 1
