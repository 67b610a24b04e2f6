"""One trace for all ranks, in the format of Chrome's tracing and of Perfetto."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpistrat.files import write_atomically
from mpistrat.timeline.clocks import ClockFit, Meeting, fit_clock
from mpistrat.timeline.parts import Part, Span

__all__ = ["events", "fit_clocks", "metadata", "write_trace"]

_WAITING = "waiting for ranks"
_MOVING = "moving data"

_NS_PER_US = 1000


def fit_clocks(parts: Sequence[Part]) -> dict[int, ClockFit]:
    """Return how the clock of each rank stands to that of the first one. Local."""
    reference = parts[0]
    meetings = _meetings(reference)
    return {
        part.rank: fit_clock(
            meetings, _meetings(part), part.header["clock"] == reference.header["clock"]
        )
        for part in parts
    }


def _meetings(part: Part) -> dict[tuple[str, int], Meeting]:
    return {
        (span.facts["channel"], span.facts["number"]): (span.began_ns, span.facts["agreed_ns"])
        for span in part.spans()
        if span.category == "collective" and span.facts["agreed_ns"]
    }


def write_trace(path: Path, parts: Sequence[Part]) -> None:
    """Write the trace of `parts` to `path`, whole or not at all. Local.

    The spans are read twice and never held together, because a job has many.
    """
    fits = fit_clocks(parts)
    write_atomically(path, _texts(events(parts, fits), metadata(parts, fits)))


def _texts(all_events: Iterator[dict[str, Any]], facts: dict[str, Any]) -> Iterator[str]:
    """Yield the text of the trace, a line at a time."""
    yield f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(facts)},\n"traceEvents": ['
    separator = "\n"
    for event in all_events:
        yield separator + json.dumps(event)
        separator = ",\n"
    yield "\n]}\n"


def metadata(parts: Sequence[Part], fits: Mapping[int, ClockFit]) -> dict[str, Any]:
    """Return what the trace says of itself: its ranks, and how well their clocks agree. Local."""
    size = parts[0].header["size"]
    return {
        "format": "mpistrat-timeline",
        "format_version": 1,
        "size": size,
        "missing_ranks": sorted({*range(size)} - {part.rank for part in parts}),
        "clocks": [
            {
                "rank": part.rank,
                "host": part.header["host"],
                "offset_us": fits[part.rank].offset_at(part.header["monotonic_ns"]) / _NS_PER_US,
                "error_us": _finite(fits[part.rank].error_ns / _NS_PER_US),
            }
            for part in parts
        ],
    }


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


def events(parts: Sequence[Part], fits: Mapping[int, ClockFit]) -> Iterator[dict[str, Any]]:
    """Yield the events of the trace: names of the rows, then the spans of rank after rank. Local.

    Times are microseconds since the first rank's part was opened, on that rank's clock.
    """
    zero_ns = parts[0].header["monotonic_ns"]
    for part in parts:
        rank, host = part.rank, part.header["host"]
        yield _label("process_name", rank, {"name": f"rank {rank} on {host}"})
        yield _label("process_sort_index", rank, {"sort_index": rank})
        threads: dict[int, int] = {}
        for span in part.spans():
            row = threads.setdefault(span.thread, len(threads))
            for name, category, began_ns, ended_ns, facts in _pieces(span):
                # One offset for both ends, so that no duration changes.
                offset_ns = fits[rank].offset_at(began_ns) + zero_ns
                yield {
                    "name": name,
                    "cat": category,
                    "ph": "X",
                    "ts": (began_ns - offset_ns) / _NS_PER_US,
                    "dur": (ended_ns - began_ns) / _NS_PER_US,
                    "pid": rank,
                    "tid": row,
                    "args": facts,
                }


def _label(name: str, rank: int, facts: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "ph": "M", "pid": rank, "tid": 0, "args": facts}


def _pieces(span: Span) -> Iterator[tuple[str, str, int, int, dict[str, Any]]]:
    """Yield name, category, begin, end and facts of the events for one span."""
    if span.category != "collective":
        yield span.name, span.category, span.began_ns, span.ended_ns, span.facts
        return
    facts = {key: value for key, value in span.facts.items() if key != "agreed_ns"}
    agreed_ns = span.facts["agreed_ns"]
    yield span.name, "collective", span.began_ns, span.ended_ns, facts | {"kind": span.name}
    number = {"channel": facts["channel"], "number": facts["number"]}
    yield _WAITING, "wait", span.began_ns, agreed_ns or span.ended_ns, number
    if agreed_ns:
        yield _MOVING, "move", agreed_ns, span.ended_ns, number
