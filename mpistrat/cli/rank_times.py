"""Times of ranks: seconds per rank and category, and the rank for which the others wait."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

CATEGORIES = {
    "checkpoint": "checkpoints",
    "data": "waiting for data",
    "wait": "waiting for ranks",
    "move": "moving data",
}
"""Names of the categories. Time in several counts for the first one; the rest is computing."""

COMPUTING = "computing"

_US_PER_S = 1e6


@dataclass
class RankTimes:
    """Times of one rank in seconds."""

    rank: int
    total_s: float = 0.0
    """Time from its first span to the end of its last one."""
    seconds: dict[str, float] = field(default_factory=dict)
    """Time per name in `CATEGORIES`, and for computing."""
    others_waited_s: float = 0.0
    """Time for which the other ranks waited because this rank was last, summed over them."""
    times_last: int = 0
    """Number of collectives that it reached last."""


@dataclass(frozen=True)
class Straggler:
    """The rank for which the others waited most."""

    rank: int
    others_waited_s: float
    cause: str
    """Category in which it exceeds the others most."""
    longer_s: float
    """Time in that category beyond the median of the others."""


def spans_by_rank(events: Iterable[Mapping[str, Any]]) -> dict[int, list[Mapping[str, Any]]]:
    """Return the spans of each rank in the events of a trace, in rank order."""
    of_ranks: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            of_ranks.setdefault(event["pid"], []).append(event)
    return dict(sorted(of_ranks.items()))


def summarize(events: Iterable[Mapping[str, Any]]) -> list[RankTimes]:
    """Return the times of each rank in the events of a trace, in rank order."""
    of_ranks = spans_by_rank(events)
    times = {rank: _times(rank, spans) for rank, spans in of_ranks.items()}
    for waits in _waits(of_ranks).values():
        if len(waits) > 1:
            # The rank that arrives last waits least.
            last = min(waits, key=waits.__getitem__)
            times[last].times_last += 1
            lost_us = sum(waits.values()) - len(waits) * waits[last]
            times[last].others_waited_s += lost_us / _US_PER_S
    return list(times.values())


def find_straggler(times: Sequence[RankTimes]) -> Straggler | None:
    """Return the rank for which the others waited most, or ``None`` if they did not wait."""
    slowest = max(times, key=lambda each: each.others_waited_s, default=None)
    if slowest is None or slowest.others_waited_s <= 0:
        return None
    others = [each for each in times if each is not slowest]
    longer_s = {
        name: slowest.seconds[name] - statistics.median(each.seconds[name] for each in others)
        for name in (COMPUTING, CATEGORIES["data"], CATEGORIES["checkpoint"])
    }
    cause = max(longer_s, key=longer_s.__getitem__)
    return Straggler(slowest.rank, slowest.others_waited_s, cause, longer_s[cause])


def _times(rank: int, spans: Sequence[Mapping[str, Any]]) -> RankTimes:
    """Return the times of one rank. Each moment counts once."""
    seconds = dict.fromkeys((*CATEGORIES.values(), COMPUTING), 0.0)
    total_us = 0.0
    for began_us, ended_us, name in segments(spans):
        seconds[name] += (ended_us - began_us) / _US_PER_S
        total_us += ended_us - began_us
    return RankTimes(rank, total_us / _US_PER_S, seconds)


def segments(spans: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, float, str]]:
    """Yield begin and end in microseconds, and category, of one rank's activities, without gaps."""
    order = list(CATEGORIES)
    steps: list[tuple[float, int, int]] = []
    for span in spans:
        if span["cat"] in CATEGORIES:
            depth = order.index(span["cat"])
            steps += [(span["ts"], depth, 1), (span["ts"] + span["dur"], depth, -1)]
    began_us = min(span["ts"] for span in spans)
    ended_us = max(span["ts"] + span["dur"] for span in spans)
    open_spans = [0] * len(order)
    for time_us, depth, change in [*sorted(steps), (ended_us, 0, 0)]:
        if time_us > began_us:
            # Spans are nested. Each moment counts for only one category, the first in the order of
            # `CATEGORIES`.
            outermost = next((i for i, count in enumerate(open_spans) if count), None)
            name = COMPUTING if outermost is None else CATEGORIES[order[outermost]]
            yield began_us, time_us, name
            began_us = time_us
        open_spans[depth] += change


def _waits(
    of_ranks: Mapping[int, Sequence[Mapping[str, Any]]],
) -> dict[tuple[str, int], dict[int, float]]:
    """Return how long each rank waited in each collective outside of checkpoints."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    within: set[tuple[str, int]] = set()
    for rank, spans in of_ranks.items():
        # Sort by start time; a span that contains others comes before them.
        saving_until = float("-inf")
        for span in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
            if span["cat"] == "checkpoint":
                saving_until = max(saving_until, span["ts"] + span["dur"])
            elif span["cat"] == "wait":
                key = (span["args"]["channel"], span["args"]["number"])
                found.setdefault(key, {})[rank] = span["dur"]
                if span["ts"] < saving_until:
                    within.add(key)
    return {key: waits for key, waits in found.items() if key not in within}
