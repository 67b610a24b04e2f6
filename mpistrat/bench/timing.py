"""Fair timing on a noisy machine: candidates take turns, and medians are compared."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from mpistrat.collectives import Collectives

__all__ = ["Timings", "take_turns"]

_TARGET_S = 0.02
"""About how long one sample takes; calls shorter than that are repeated within it, as a program
does, so that caches are warm for most of them."""


class Timings:
    """Times of one call of each candidate, in rounds in which each had its turn.

    Ratios and differences are taken within each round, so that a spell in which the whole
    machine is slow falls out of them; then the median is taken over rounds.

    Parameters
    ----------
    samples : mapping of str to sequence of float
        Seconds of each candidate, one number for each round.
    """

    def __init__(self, samples: Mapping[str, Sequence[float]]) -> None:
        self._samples = samples

    def median_s(self, name: str) -> float:
        """Return the median time of the candidate `name`. Local."""
        return statistics.median(self._samples[name])

    def medians(self) -> dict[str, float]:
        """Return the medians as entries of a row: ``<name>_s``. Local."""
        return {f"{name}_s": self.median_s(name) for name in self._samples}

    def median_ratio(self, above: str, *below: str) -> float:
        """Return the median of `above` divided by the sum of `below`. Local."""
        below_s = map(sum, zip(*(self._samples[each] for each in below), strict=True))
        rounds = zip(self._samples[above], below_s, strict=True)
        return statistics.median(first / second for first, second in rounds)

    def median_difference_s(self, first: str, second: str) -> float:
        """Return the median of `first` minus `second`. Local."""
        rounds = zip(self._samples[first], self._samples[second], strict=True)
        return statistics.median(a - b for a, b in rounds)


def take_turns(
    candidates: Mapping[str, Callable[[], object]], collectives: Collectives, num_samples: int
) -> Timings:
    """Time one call of each candidate in each round, after a warm-up. **Collective**.

    A sample is the time of the slowest rank, so all ranks get equal numbers. Each round has an
    order of its own, because a candidate finds the caches as the one before has left them.

    Parameters
    ----------
    candidates : mapping of str to callable
        Each is called by all ranks together.
    collectives : Collectives
    num_samples : int
        The number of rounds.
    """
    repeats = {}
    for name, call in candidates.items():
        call()
        once_s = max(collectives.gather_json(_time(call, 3)))
        repeats[name] = max(1, round(_TARGET_S / max(once_s, 1e-9)))
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    names = list(candidates)
    order = random.Random(0)  # equal on all ranks
    for _ in range(num_samples):
        order.shuffle(names)
        for name in names:
            collectives.gather_json(None)
            seconds = _time(candidates[name], repeats[name])
            samples[name].append(max(collectives.gather_json(seconds)))
    return Timings(samples)


def _time(call: Callable[[], object], repeats: int) -> float:
    began = time.perf_counter()
    for _ in range(repeats):
        call()
    return (time.perf_counter() - began) / repeats
