"""Fair timing on a noisy machine: candidates take turns, and medians are compared."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

from mpistrat.collectives import Collectives

__all__ = ["median_times_s"]

_TARGET_S = 0.01
"""About how long one sample takes; calls shorter than that are repeated within it."""


def median_times_s(
    candidates: Mapping[str, Callable[[], object]], collectives: Collectives, num_samples: int
) -> dict[str, float]:
    """Return the median time of one call of each candidate, in seconds. **Collective**.

    A sample is the time of the slowest rank. The candidates take turns, so that a busy spell of
    the machine meets them alike.

    Parameters
    ----------
    candidates : mapping of str to callable
        Each is called by all ranks together.
    collectives : Collectives
    num_samples : int
    """
    repeats = {}
    for name, call in candidates.items():
        call()
        once_s = max(collectives.gather_json(_time(call, 3)))
        repeats[name] = max(1, round(_TARGET_S / max(once_s, 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for _ in range(num_samples):
        for name, call in candidates.items():
            collectives.gather_json(None)
            samples[name].append(max(collectives.gather_json(_time(call, repeats[name]))))
    return {name: statistics.median(times) for name, times in samples.items()}


def _time(call: Callable[[], object], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats
