"""Timeline of a job as a Chrome trace: each rank records a part, and rank 0 merges the parts."""

from __future__ import annotations

import bisect
import itertools
import json
import logging
import math
import os
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from mpistrat.system import exit_hooks
from mpistrat.system.files import write_atomically
from mpistrat.system.text import rank_list
from mpistrat.tracing import spans

_logger = logging.getLogger("mpistrat")

# "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU

_WAITING = "waiting for ranks"
_MOVING = "moving data"
_US_PER_S = 1e6
_MIB = 2.0**20

_Event = dict[str, Any]


class _Span(NamedTuple):
    """A span of time on one rank."""

    category: str
    """``collective``, or the category passed to `mpistrat.tracing.spans.span`."""
    name: str
    began_ns: int
    """Time by the clock of the rank's node."""
    ended_ns: int
    thread: int
    facts: dict[str, Any]

    @property
    def collective(self) -> tuple[int, int] | None:
        """Channel and number of the collective, if this is one on which all ranks agreed."""
        if self.category != "collective" or not self.facts["agreed_ns"]:
            return None
        return self.facts["channel"], self.facts["number"]


def _label(name: str, rank: int, facts: dict[str, Any]) -> _Event:
    """Return the event that labels the rows of a rank."""
    return {"name": name, "ph": "M", "pid": rank, "tid": 0, "args": facts}


def _slices(
    span: _Span, rank: int, row: int, offset_ns: float, last_rank: int | None
) -> Iterator[_Event]:
    """Yield the events of one span. A collective also has events for waiting and moving data."""
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
            # Use one offset for both ends, so that durations do not change.
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


class _Flows:
    """Arrows from the rank that reached a collective last to each rank that it released."""

    # Keep one arrival per collective, for any number of ranks.

    def __init__(self) -> None:
        self._last: dict[Any, _Arrival] = {}
        self._num_flows = 0

    def add(self, span: _Span, rank: int, row: int, offset_ns: float) -> None:
        """Record when a rank reached a collective."""
        if (collective := span.collective) is not None:
            arrival = _Arrival((span.began_ns - offset_ns) / _NS_PER_US, rank, row)
            # Comparing tuples selects the latest time, then the highest rank, in any order of the
            # ranks.
            self._last[collective] = max(self._last.get(collective, arrival), arrival)

    def last_rank(self, span: _Span) -> int | None:
        """Return the rank that reached a collective last, or ``None`` for other spans."""
        collective = span.collective
        return None if collective is None else self._last[collective].rank

    def arrow(self, span: _Span, rank: int, row: int, offset_ns: float) -> Iterator[_Event]:
        """Yield start and end of the arrow to this rank, if it waited for a different rank."""
        collective = span.collective
        if collective is None or (last := self._last[collective]).rank == rank:
            return
        # Clocks of nodes differ a little; an arrow must not end before it starts.
        ts = max((span.facts["agreed_ns"] - offset_ns) / _NS_PER_US, last.ts)
        if ts > (span.ended_ns - offset_ns) / _NS_PER_US:
            return
        self._num_flows += 1
        shared = {"name": "released", "cat": "flow", "id": self._num_flows}
        yield shared | {"ph": "s", "ts": last.ts, "pid": last.rank, "tid": last.row}
        # "e" binds the arrow to the enclosing slice, not to the next one.
        yield shared | {"ph": "f", "bp": "e", "ts": ts, "pid": rank, "tid": row}


class _Counters:
    """Rates of one rank over time: examples, bytes read, and bytes moved by collectives."""

    def __init__(self, width_us: float) -> None:
        self._width_us = width_us
        self._amounts: dict[str, dict[int, float]] = {}

    def add(self, span: _Span, offset_ns: float) -> None:
        """Count the bytes and examples of a span at its end."""
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

    def events(self, rank: int) -> Iterator[_Event]:
        """Yield the rates, and a zero after each window with a rate."""
        for name, places in sorted(self._amounts.items()):
            rates = {place + 1: 0.0 for place in places}
            rates |= {
                place: amount / (self._width_us / _US_PER_S) for place, amount in places.items()
            }
            for place, rate in sorted(rates.items()):
                ts = place * self._width_us
                args = {name.rpartition("/")[0]: round(rate, 6)}
                yield {"name": name, "ph": "C", "ts": ts, "pid": rank, "tid": 0, "args": args}


_FORMAT = "mpistrat-timeline-part"
_FORMAT_VERSION = 1
_MIN_WINDOW_NS = 5 * 10**9
_MAX_WINDOWS = 64
_NS_PER_US = 1000
_MIN_COUNTED_US = 1000.0
_NUM_COUNTED = 200
"""Number of windows over which rates are computed."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")

_Agreement = tuple[int, int]
"""When a rank reached a collective, and when it knew that all agreed, in ns."""


class Trace:
    """Spans of all `parts`, on the clock of the first part."""

    # A job has many spans, so they are read several times and never all held in memory.

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = parts
        self._fits = _fit_clocks(parts)

    def write(self, path: Path) -> None:
        """Write the trace to `path`, completely or not at all."""
        write_atomically(path, _texts(self.events(), self.metadata()))

    def metadata(self) -> dict[str, Any]:
        """Return the header of the trace: its ranks, and the offsets of their clocks."""
        size = self._parts[0].header["size"]
        return {
            "format": "mpistrat-timeline",
            "format_version": 1,
            "size": size,
            "missing_ranks": sorted({*range(size)} - {part.rank for part in self._parts}),
            "clocks": [self._clock(part) for part in self._parts],
        }

    def _clock(self, part: Part) -> dict[str, Any]:
        fit = self._fits[part.rank]
        return {
            "rank": part.rank,
            "host": part.header["host"],
            "offset_us": fit.offset_at(part.header["monotonic_ns"]) / _NS_PER_US,
            "error_us": _finite(fit.error_ns / _NS_PER_US),
        }

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield the events: first names of the rows, then spans, arrows and counters per rank."""
        flows = _Flows()
        began_us, ended_us = math.inf, -math.inf
        for rank, row, span, offset_ns in self._spans():
            flows.add(span, rank, row, offset_ns)
            began_us = min(began_us, (span.began_ns - offset_ns) / _NS_PER_US)
            ended_us = max(ended_us, (span.ended_ns - offset_ns) / _NS_PER_US)
        width_us = max(_MIN_COUNTED_US, (ended_us - began_us) / _NUM_COUNTED)
        for part in self._parts:
            rank, host = part.rank, part.header["host"]
            yield _label("process_name", rank, {"name": f"rank {rank} on {host}"})
            yield _label("process_sort_index", rank, {"sort_index": rank})
        of_ranks = itertools.groupby(self._spans(), key=lambda each: each[0])
        for rank, of_rank in of_ranks:
            counters = _Counters(width_us)
            for _, row, span, offset_ns in of_rank:
                yield from _slices(span, rank, row, offset_ns, flows.last_rank(span))
                yield from flows.arrow(span, rank, row, offset_ns)
                counters.add(span, offset_ns)
            yield from counters.events(rank)

    def _spans(self) -> Iterator[tuple[int, int, _Span, float]]:
        """Yield rank, row, span and the offset to subtract from its times, rank after rank."""
        # Times are in microseconds since the first rank opened its part, by that rank's clock.
        zero_ns = self._parts[0].header["monotonic_ns"]
        for part in self._parts:
            fit = self._fits[part.rank]
            # Thread identifiers are long and differ from run to run, so number the rows by first
            # use.
            threads: dict[int, int] = {}
            for span in part.spans():
                row = threads.setdefault(span.thread, len(threads))
                yield part.rank, row, span, fit.offset_at(span.began_ns) + zero_ns


def _texts(all_events: Iterator[dict[str, Any]], facts: dict[str, Any]) -> Iterator[str]:
    """Yield the text of the trace, a line at a time."""
    yield f'{{"displayTimeUnit": "ms",\n"otherData": {json.dumps(facts)},\n"traceEvents": ['
    separator = "\n"
    for event in all_events:
        yield separator + json.dumps(event)
        separator = ",\n"
    yield "\n]}\n"


def _finite(number: float) -> float | None:
    return number if math.isfinite(number) else None


@dataclass(frozen=True)
class Part:
    """Spans of one rank."""

    path: Path
    header: dict[str, Any]
    """Rank, size, host, process and clock."""

    @classmethod
    def open(cls, path: Path) -> Part:
        """Return the part in the file `path`, or raise `ValueError` if it is not a part."""
        with open(path, encoding="utf-8") as file:
            header = _parsed(file.readline())
        if not isinstance(header, dict) or header.get("format") != _FORMAT:
            raise ValueError(f"{path} is not a part of a timeline.")
        if header.get("format_version") != _FORMAT_VERSION:
            raise ValueError(
                f"{path} has version {header.get('format_version')} of the format; this is for "
                f"version {_FORMAT_VERSION}."
            )
        return cls(path, header)

    @staticmethod
    def path_of(timeline: Path, rank: int) -> Path:
        """Return the path to which `rank` writes its part of `timeline`."""
        return timeline.with_name(f"{timeline.name}.rank{rank}.part")

    @staticmethod
    def paths_of(timeline: Path) -> list[Path]:
        """Return the existing parts of `timeline`, in rank order."""
        found = timeline.parent.glob(f"{timeline.name}.rank*.part")
        return sorted(found, key=lambda each: (len(each.name), each.name))

    @staticmethod
    def new_header(rank: int, size: int) -> dict[str, Any]:
        """Return the first line of the part of this process."""
        return {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "rank": rank,
            "size": size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "clock": _clock(),
            "wall_clock_ns": time.time_ns(),
            "monotonic_ns": time.monotonic_ns(),
        }

    @property
    def rank(self) -> int:
        """Rank in the world."""
        return int(self.header["rank"])

    def spans(self) -> Iterator[_Span]:
        """Yield the spans in the order in which they ended."""
        with open(self.path, encoding="utf-8") as file:
            next(file, None)
            for line in file:
                fields = _parsed(line)
                if isinstance(fields, list) and len(fields) == len(_Span._fields):
                    yield _Span(*fields)


def _clock() -> str:
    """Return an identifier of the monotonic clock, the same on ranks that share a clock."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return socket.gethostname()


def _parsed(line: str) -> Any:
    """Return the JSON in `line`, or ``None`` if a killed rank has written only a part of it."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


@dataclass(frozen=True)
class _ClockFit:
    """Offset of the clock of a rank from the reference."""

    times_ns: Sequence[float]
    """Times on the rank's clock at which the offset is known."""
    offsets_ns: Sequence[float]
    """Offsets at these times; linear in between, constant before and after."""
    error_ns: float
    """Largest possible error of the best offset; infinite if no offset is known."""

    def offset_at(self, time_ns: float) -> float:
        """Return the offset to subtract from `time_ns` of this rank."""
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


def _fit_clocks(parts: Sequence[Part]) -> dict[int, _ClockFit]:
    """Return the offset of each rank's clock from the clock of the first rank."""
    reference = parts[0]
    agreements = _agreements(reference)
    return {
        part.rank: fit_clock(
            agreements, _agreements(part), part.header["clock"] == reference.header["clock"]
        )
        for part in parts
    }


def _agreements(part: Part) -> dict[tuple[str, int], _Agreement]:
    return {
        (span.facts["channel"], span.facts["number"]): (span.began_ns, span.facts["agreed_ns"])
        for span in part.spans()
        if span.category == "collective" and span.facts["agreed_ns"]
    }


def fit_clock(
    reference: Mapping[Any, _Agreement], own: Mapping[Any, _Agreement], is_same: bool
) -> _ClockFit:
    """Return the offset of a rank's clock from the reference rank's, from their collectives."""
    common = sorted((own[key], reference[key]) for key in own.keys() & reference.keys())
    windows = [_fit_window(window) for window in _windows(common)]
    # Ranks of one node share a clock, unless the collectives prove otherwise.
    if is_same and all(low <= 0 <= high for _, _, low, high in windows):
        return _ClockFit((), (), 0.0)
    if not windows:
        return _ClockFit((), (), float("inf"))
    error_ns = min(max(high - offset, offset - low) for _, offset, low, high in windows)
    return _ClockFit(
        [time for time, _, _, _ in windows], [offset for _, offset, _, _ in windows], error_ns
    )


def _windows(
    common: Sequence[tuple[_Agreement, _Agreement]],
) -> list[list[tuple[_Agreement, _Agreement]]]:
    """Return the collectives in windows that are so short that the clocks hardly drift."""
    if not common:
        return []
    began_ns, ended_ns = common[0][0][0], common[-1][0][0]
    width_ns = max(_MIN_WINDOW_NS, (ended_ns - began_ns) // _MAX_WINDOWS + 1)
    windows: dict[int, list[tuple[_Agreement, _Agreement]]] = {}
    for pair in common:
        windows.setdefault((pair[0][0] - began_ns) // width_ns, []).append(pair)
    return list(windows.values())


def _fit_window(
    window: Sequence[tuple[_Agreement, _Agreement]],
) -> tuple[float, float, float, float]:
    """Return time, offset, and the lower and upper bound of the offset."""
    # No rank learns of an agreement before the last rank has arrived. So on a common clock each
    # rank arrives before any other has agreed, which bounds the offset from both sides.
    low = max(own_began - agreed for (own_began, _), (_, agreed) in window)
    high = min(own_agreed - began for (_, own_agreed), (began, _) in window)
    # All ranks learn of the agreement at about the same time, so take the median difference. The
    # middle of the bounds would be biased if one rank is always late.
    likely = statistics.median(own_agreed - agreed for (_, own_agreed), (_, agreed) in window)
    offset = min(max(likely, low), high) if low <= high else (low + high) / 2
    time_ns = statistics.fmean(own_agreed for (_, own_agreed), _ in window)
    return time_ns, offset, low, high


_PATIENCE_S = 3.0
"""How long rank 0 waits for parts that a shared file system does not show yet."""


def start(path: str, rank: int, size: int) -> None:
    """Record spans for the timeline `path` from now on. A second call does nothing."""
    if spans.active() is not None:
        return
    # Make the path absolute, because the program may change its working folder.
    target = Path(path).absolute()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if rank == 0:
            # If this job is killed, the timeline of an older job must not be mistaken for its own.
            target.unlink(missing_ok=True)
        # Each rank writes its own file. A shared one would need a message per span, or a lock.
        recorder = spans.Recorder(str(Part.path_of(target, rank)), Part.new_header(rank, size))
    except OSError as error:
        raise OSError(
            f"MPISTRAT_TIMELINE={path!r} cannot be written by rank {rank} of {size}: "
            f"{error.strerror}. Name a file in a folder that every rank can write to."
        ) from None
    spans.record_on(recorder)
    session = _Session(target, rank, size, recorder)
    exit_hooks.at(exit_hooks.Phase.FAILED, lambda failure: session.flush())
    exit_hooks.at(exit_hooks.Phase.BEFORE_LAST_ROUND, session.flush)
    exit_hooks.at(exit_hooks.Phase.AFTER_LAST_ROUND, session.merge)


class _Session:
    """Part of this rank, and on rank 0 also the merged timeline."""

    def __init__(self, target: Path, rank: int, size: int, recorder: spans.Recorder) -> None:
        self._target = target
        self._rank = rank
        self._size = size
        self._recorder = recorder

    def flush(self) -> None:
        """Write the spans so far."""
        try:
            self._recorder.flush()
        except OSError as error:
            self._complain(f"cannot be written: {error.strerror or error}")

    def merge(self) -> None:
        """End the recording, and on rank 0 merge the parts of all ranks."""
        self.flush()
        spans.record_on(None)
        if self._rank != 0:
            return
        try:
            parts = self._parts()
            Trace(parts).write(self._target)
            # Remove the parts only now: before this, nothing else has their spans.
            for part in parts:
                part.path.unlink(missing_ok=True)
        except (OSError, ValueError) as error:
            self._complain(f"cannot be put together: {error}")

    def _parts(self) -> Sequence[Part]:
        paths = [Part.path_of(self._target, rank) for rank in range(self._size)]
        end = time.monotonic() + _PATIENCE_S
        while missing := [rank for rank, path in enumerate(paths) if not path.exists()]:
            if time.monotonic() > end:
                self._complain(f"has no part of {rank_list(missing)}")
                break
            time.sleep(0.05)
        return [Part.open(path) for path in paths if path.exists()]

    def _complain(self, text: str) -> None:
        _logger.warning("The timeline %s", text)
