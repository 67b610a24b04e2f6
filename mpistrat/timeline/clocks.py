"""Clocks of several nodes laid upon each other, by the collectives that they have in common.

No rank knows of the agreement on a collective before every rank has come to it. So each
collective bounds the offset between the clocks of two ranks from both sides, as the messages of
NTP do, and no message is needed for it.
"""

from __future__ import annotations

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["ClockFit", "Meeting", "fit_clock"]

Meeting = tuple[int, int]
"""When a rank came to a collective, and when it knew that all agreed; nanoseconds."""

_MIN_WINDOW_NS = 5 * 10**9
_MAX_WINDOWS = 64


@dataclass(frozen=True)
class ClockFit:
    """How far the clock of a rank is ahead of the reference."""

    times_ns: Sequence[float]
    """On the rank's clock, where the offset is known."""
    offsets_ns: Sequence[float]
    """The offset there; linear between, constant before and after."""
    error_ns: float
    """How wrong the best of the offsets can be at most; infinite where nothing is known."""

    def offset_at(self, time_ns: float) -> float:
        """Return what to subtract from `time_ns` of this rank. Local."""
        if not self.times_ns:
            return 0.0
        after = bisect.bisect_left(self.times_ns, time_ns)
        if after == 0:
            return self.offsets_ns[0]
        if after == len(self.times_ns):
            return self.offsets_ns[-1]
        t0, t1 = self.times_ns[after - 1], self.times_ns[after]
        a, b = self.offsets_ns[after - 1], self.offsets_ns[after]
        return a + (b - a) * (time_ns - t0) / (t1 - t0)


def fit_clock(
    reference: Mapping[Any, Meeting], own: Mapping[Any, Meeting], is_same: bool
) -> ClockFit:
    """Return the offset of a rank's clock from that of the reference rank. Local.

    Parameters
    ----------
    reference, own : mapping
        The collectives that each of the two has agreed on.
    is_same : bool
        Whether both ranks read one clock, because they run on one node. The offset is then 0,
        unless the collectives prove otherwise.
    """
    common = sorted((own[key], reference[key]) for key in own.keys() & reference.keys())
    windows = [_fit_window(window) for window in _windows(common)]
    if is_same and all(low <= 0 <= high for _, _, low, high in windows):
        return ClockFit((), (), 0.0)
    if not windows:
        return ClockFit((), (), float("inf"))
    error_ns = min(max(high - offset, offset - low) for _, offset, low, high in windows)
    return ClockFit(
        [time for time, _, _, _ in windows], [offset for _, offset, _, _ in windows], error_ns
    )


def _windows(
    common: Sequence[tuple[Meeting, Meeting]],
) -> list[list[tuple[Meeting, Meeting]]]:
    """Return the meetings in spans of time so short that the clocks hardly drift."""
    if not common:
        return []
    began_ns, ended_ns = common[0][0][0], common[-1][0][0]
    width_ns = max(_MIN_WINDOW_NS, (ended_ns - began_ns) // _MAX_WINDOWS + 1)
    windows: dict[int, list[tuple[Meeting, Meeting]]] = {}
    for pair in common:
        windows.setdefault((pair[0][0] - began_ns) // width_ns, []).append(pair)
    return list(windows.values())


def _fit_window(
    window: Sequence[tuple[Meeting, Meeting]],
) -> tuple[float, float, float, float]:
    """Return time, offset, and the bounds between which the offset must lie."""
    low = max(own_began - agreed for (own_began, _), (_, agreed) in window)
    high = min(own_agreed - began for (_, own_agreed), (began, _) in window)
    # All learn of the agreement at about the same time: the bounds alone would be lopsided
    # where one rank is always late.
    likely = statistics.median(own_agreed - agreed for (_, own_agreed), (_, agreed) in window)
    offset = min(max(likely, low), high) if low <= high else (low + high) / 2
    time_ns = statistics.fmean(own_agreed for (_, own_agreed), _ in window)
    return time_ns, offset, low, high
