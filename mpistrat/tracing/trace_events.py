"""Trace events of Chrome and Perfetto: spans, flow arrows between ranks, and counters."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

# "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

_NS_PER_US = 1000
_WAITING = "waiting for ranks"
_MOVING = "moving data"
_US_PER_S = 1e6
_MIB = 2.0**20

Event = dict[str, Any]


class Span(NamedTuple):
    """A span of time on one rank."""

    category: str
    """``collective``, or what `mpistrat.tracing.spans.span` was given."""
    name: str
    began_ns: int
    """By the clock of the rank's node."""
    ended_ns: int
    thread: int
    facts: dict[str, Any]

    @property
    def meeting(self) -> tuple[int, int] | None:
        """Which collective of which channel all ranks agreed on here, if this is one."""
        if self.category != "collective" or not self.facts["agreed_ns"]:
            return None
        return self.facts["channel"], self.facts["number"]


def label(name: str, rank: int, facts: dict[str, Any]) -> Event:
    """Return the event that labels the rows of a rank."""
    return {"name": name, "ph": "M", "pid": rank, "tid": 0, "args": facts}


def slices(
    span: Span, rank: int, row: int, offset_ns: float, last_rank: int | None
) -> Iterator[Event]:
    """Yield the events of one span: for a collective also its waiting, and its moving of data."""
    facts = {key: value for key, value in span.facts.items() if key != "agreed_ns"}
    pieces = [(span.name, span.category, span.began_ns, span.ended_ns, facts)]
    if span.category == "collective":
        agreed_ns = span.facts["agreed_ns"]
        number = {"channel": facts["channel"], "number": facts["number"]}
        facts["kind"] = span.name
        if last_rank is not None:
            facts["last_rank"] = last_rank
        came_last = {"came_last": True} if last_rank == rank else {}
        waited_until_ns = agreed_ns or span.ended_ns
        pieces.append((_WAITING, "wait", span.began_ns, waited_until_ns, number | came_last))
        if agreed_ns:
            pieces.append((_MOVING, "move", agreed_ns, span.ended_ns, number))
    for name, category, began_ns, ended_ns, args in pieces:
        yield {
            "name": name,
            "cat": category,
            "ph": "X",
            # One offset for both ends, so that no duration changes.
            "ts": (began_ns - offset_ns) / _NS_PER_US,
            "dur": (ended_ns - began_ns) / _NS_PER_US,
            "pid": rank,
            "tid": row,
            "args": args,
        }


class _Arrival(NamedTuple):
    ts: float
    rank: int
    row: int


class Flows:
    """Arrows from the rank that came last to a collective, to each rank that it released."""

    # One arrival is kept for each collective, whatever the number of ranks.

    def __init__(self) -> None:
        self._last: dict[Any, _Arrival] = {}
        self._num_flows = 0

    def add(self, span: Span, rank: int, row: int, offset_ns: float) -> None:
        """Take note of when a rank came to a collective."""
        if (meeting := span.meeting) is not None:
            arrival = _Arrival((span.began_ns - offset_ns) / _NS_PER_US, rank, row)
            # Tuples: the latest time counts, then the highest rank, whatever the order of the
            # ranks.
            self._last[meeting] = max(self._last.get(meeting, arrival), arrival)

    def last_rank(self, span: Span) -> int | None:
        """Return who came last to a collective, ``None`` for other spans."""
        meeting = span.meeting
        return None if meeting is None else self._last[meeting].rank

    def arrow(self, span: Span, rank: int, row: int, offset_ns: float) -> Iterator[Event]:
        """Yield start and finish of the arrow to this rank, if it waited for another."""
        meeting = span.meeting
        if meeting is None or (last := self._last[meeting]).rank == rank:
            return
        # Clocks of nodes differ a little; an arrow must not end before it starts.
        ts = max((span.facts["agreed_ns"] - offset_ns) / _NS_PER_US, last.ts)
        if ts > (span.ended_ns - offset_ns) / _NS_PER_US:
            return
        self._num_flows += 1
        shared = {"name": "released", "cat": "flow", "id": self._num_flows}
        yield shared | {"ph": "s", "ts": last.ts, "pid": last.rank, "tid": last.row}
        # "e" binds to the slice around it, not to the next one.
        yield shared | {"ph": "f", "bp": "e", "ts": ts, "pid": rank, "tid": row}


class Counters:
    """Rates of one rank over time: examples, bytes read and bytes moved by collectives."""

    def __init__(self, width_us: float) -> None:
        self._width_us = width_us
        self._amounts: dict[str, dict[int, float]] = {}

    def add(self, span: Span, offset_ns: float) -> None:
        """Count what a span has read or moved, at its end."""
        place = math.floor((span.ended_ns - offset_ns) / _NS_PER_US / self._width_us)
        size_bytes = span.facts.get("bytes", 0)
        if span.category == "collective":
            self._count("moved MiB/s", place, size_bytes / _MIB)
        elif span.category == "data":
            self._count("read MiB/s", place, size_bytes / _MIB)
            self._count("examples/s", place, span.facts.get("examples", 0))

    def _count(self, name: str, place: int, amount: float) -> None:
        if amount:
            places = self._amounts.setdefault(name, {})
            places[place] = places.get(place, 0) + amount

    def events(self, rank: int) -> Iterator[Event]:
        """Yield the rates, and zero after each window in which there was something."""
        for name, places in sorted(self._amounts.items()):
            rates = {place + 1: 0.0 for place in places}
            rates |= {
                place: amount / (self._width_us / _US_PER_S) for place, amount in places.items()
            }
            for place, rate in sorted(rates.items()):
                ts = place * self._width_us
                args = {name.rpartition("/")[0]: round(rate, 6)}
                yield {"name": name, "ph": "C", "ts": ts, "pid": rank, "tid": 0, "args": args}
