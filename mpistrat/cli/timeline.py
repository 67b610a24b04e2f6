"""Command ``mpistrat timeline``: time of each rank by category, and the straggler."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mpistrat.cli.output import (
    Command,
    check_can_draw,
    print_error,
    print_json,
    print_line,
    print_table,
)
from mpistrat.system.text import rank_list
from mpistrat.tracing.trace import Part, Trace

__all__ = ["COMMAND"]

_CATEGORIES = {
    "checkpoint": "checkpoints",
    "data": "waiting for data",
    "wait": "waiting for ranks",
    "move": "moving data",
}
"""Names of the categories. Time within several belongs to the first; the rest is computing."""

_COMPUTING = "computing"

_US_PER_S = 1e6


@dataclass
class _RankTimes:
    """The seconds of one rank."""

    rank: int
    total_s: float = 0.0
    """From its first span to the end of its last."""
    seconds: dict[str, float] = field(default_factory=dict)
    """By the names of `_CATEGORIES`, and for computing."""
    others_waited_s: float = 0.0
    """Time that the other ranks waited because this one came last, summed over them."""
    times_last: int = 0
    """Number of collectives in which it came last."""


@dataclass(frozen=True)
class _Straggler:
    """The rank for which the others waited most."""

    rank: int
    others_waited_s: float
    cause: str
    """The category on which it spent most more than the others."""
    longer_s: float
    """How much longer than the median of the others."""


def summarize(events: Iterable[Mapping[str, Any]]) -> list[_RankTimes]:
    """Return the times of each rank in the events of a trace, in rank order."""
    of_ranks: dict[int, list[Mapping[str, Any]]] = {}
    for event in events:
        if event["ph"] == "X":
            of_ranks.setdefault(event["pid"], []).append(event)
    times = {rank: _times(rank, spans) for rank, spans in sorted(of_ranks.items())}
    for waits in _waits(of_ranks).values():
        if len(waits) > 1:
            last = min(waits, key=waits.__getitem__)
            times[last].times_last += 1
            lost_us = sum(waits.values()) - len(waits) * waits[last]
            times[last].others_waited_s += lost_us / _US_PER_S
    return list(times.values())


def find_straggler(times: Sequence[_RankTimes]) -> _Straggler | None:
    """Return the rank for which the others waited most, ``None`` if they did not wait."""
    slowest = max(times, key=lambda each: each.others_waited_s, default=None)
    if slowest is None or slowest.others_waited_s <= 0:
        return None
    others = [each for each in times if each is not slowest]
    longer_s = {
        name: slowest.seconds[name] - statistics.median(each.seconds[name] for each in others)
        for name in (_COMPUTING, _CATEGORIES["data"], _CATEGORIES["checkpoint"])
    }
    cause = max(longer_s, key=longer_s.__getitem__)
    return _Straggler(slowest.rank, slowest.others_waited_s, cause, longer_s[cause])


def _times(rank: int, spans: Sequence[Mapping[str, Any]]) -> _RankTimes:
    """Return the times of one rank, each moment counted once."""
    began_us = min(span["ts"] for span in spans)
    total_us = max(span["ts"] + span["dur"] for span in spans) - began_us
    order = list(_CATEGORIES)
    steps: list[tuple[float, int, int]] = []
    for span in spans:
        if span["cat"] in _CATEGORIES:
            depth = order.index(span["cat"])
            steps += [(span["ts"], depth, 1), (span["ts"] + span["dur"], depth, -1)]
    open_spans = [0] * len(order)
    spent_us = [0.0] * len(order)
    before_us = began_us
    for time_us, depth, change in sorted(steps):
        outermost = next((i for i, count in enumerate(open_spans) if count), None)
        if outermost is not None:
            spent_us[outermost] += time_us - before_us
        open_spans[depth] += change
        before_us = time_us
    seconds = {_CATEGORIES[name]: spent_us[i] / _US_PER_S for i, name in enumerate(order)}
    seconds[_COMPUTING] = (total_us - sum(spent_us)) / _US_PER_S
    return _RankTimes(rank, total_us / _US_PER_S, seconds)


def _waits(
    of_ranks: Mapping[int, Sequence[Mapping[str, Any]]],
) -> dict[tuple[str, int], dict[int, float]]:
    """Return how long each rank waited in each collective outside of checkpoints."""
    found: dict[tuple[str, int], dict[int, float]] = {}
    within: set[tuple[str, int]] = set()
    for rank, spans in of_ranks.items():
        # By start; a span that contains others comes before them.
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


_COLOURS = {
    _COMPUTING: "#4c9f70",
    _CATEGORIES["move"]: "#3b6fb6",
    _CATEGORIES["wait"]: "#d1495b",
    _CATEGORIES["data"]: "#edae49",
    _CATEGORIES["checkpoint"]: "#7d7d7d",
}
_INCHES_PER_RANK = 0.3
_MAX_INCHES = 40.0


def _draw(times: Sequence[_RankTimes], path: Path) -> None:
    """Draw a bar for each rank, divided by category, into a PNG."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    height = min(1.5 + _INCHES_PER_RANK * len(times), _MAX_INCHES)
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    ranks = [each.rank for each in times]
    left = [0.0] * len(times)
    for name, colour in _COLOURS.items():
        widths = [each.seconds[name] for each in times]
        axes.barh(ranks, widths, left=left, color=colour, label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_xlabel("seconds")
    axes.set_ylabel("rank")
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.invert_yaxis()
    figure.legend(loc="outside upper center", ncols=len(_COLOURS), frameon=False)
    figure.savefig(path, format="png", dpi=150)


_COLUMNS = (_COMPUTING, *(_CATEGORIES[name] for name in ("wait", "move", "data", "checkpoint")))
_MAX_ROWS = 32


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="a timeline, or the parts (*.part) left by a job that was killed",
    )
    parser.add_argument("--plot", type=Path, metavar="PNG", help="also draw the times into PNG")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _run(arguments: argparse.Namespace) -> int:
    try:
        all_events, facts = _read(arguments.path)
        times = summarize(all_events)
    except (ValueError, OSError) as error:
        print_error("timeline", error)
        return 2
    except (KeyError, TypeError, AttributeError) as error:
        print_error("timeline", f"The timeline is damaged: {type(error).__name__}: {error}.")
        return 2
    straggler = find_straggler(times)
    if arguments.plot is not None:
        try:
            check_can_draw()
            _draw(times, arguments.plot)
        except ValueError as error:
            print_error("timeline", error)
            return 2
        except OSError as error:
            print_error("timeline", f"{arguments.plot} cannot be written: {error.strerror}.")
            return 2
    if arguments.json:
        print_json(_as_json(facts, times, straggler))
    else:
        _print(facts, times, straggler)
    return 0


def _read(paths: Sequence[Path]) -> tuple[Iterable[Mapping[str, Any]], dict[str, Any]]:
    """Return the events and the metadata of the timeline, or raise ValueError or OSError."""
    if len(paths) == 1 and not paths[0].name.endswith(".part"):
        (path,) = paths
        if path.exists():
            return _read_trace(path)
        paths = Part.paths_of(path)
        if not paths:
            raise ValueError(f"There is no timeline {path}, and no part of it.")
    parts = sorted((Part.open(path) for path in paths), key=lambda part: part.rank)
    for one, other in itertools.pairwise(parts):
        if one.rank == other.rank:
            raise ValueError(f"{one.path} and {other.path} are both of rank {one.rank}.")
    trace = Trace(parts)
    return trace.events(), trace.metadata()


def _read_trace(path: Path) -> tuple[Iterable[Mapping[str, Any]], dict[str, Any]]:
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is no timeline: it is not JSON.") from None
    facts = trace.get("otherData") if isinstance(trace, dict) else None
    if not isinstance(facts, dict) or facts.get("format") != "mpistrat-timeline":
        raise ValueError(f"{path} is no timeline of mpistrat.")
    return trace["traceEvents"], facts


def _print(
    facts: dict[str, Any], times: Sequence[_RankTimes], straggler: _Straggler | None
) -> None:
    if facts["missing_ranks"]:
        print_line(f"There is no part of {rank_list(facts['missing_ranks'])}.")
    shown = times
    if len(times) > _MAX_ROWS:
        shown = sorted(times, key=lambda each: -each.others_waited_s)[: _MAX_ROWS // 2]
        print_line(f"{len(times)} ranks; here are those that the others waited for most.")
    print_line("Seconds of each rank:")
    rows = [
        _row(str(each.rank), each.total_s, each.seconds, each.others_waited_s) for each in shown
    ]
    if len(shown) < len(times):
        middle = {
            name: statistics.median(each.seconds[name] for each in times) for name in _COLUMNS
        }
        total_s = statistics.median(each.total_s for each in times)
        waited_s = statistics.median(each.others_waited_s for each in times)
        rows.append(_row("median", total_s, middle, waited_s))
    print_table(("rank", "total", *_COLUMNS, "others waited"), rows)
    print_line(_formatted(straggler))


def _row(
    rank: str, total_s: float, seconds: Mapping[str, float], others_waited_s: float
) -> list[str]:
    numbers = (total_s, *(seconds[name] for name in _COLUMNS), others_waited_s)
    return [rank, *(f"{number:.3f}" for number in numbers)]


def _formatted(straggler: _Straggler | None) -> str:
    if straggler is None:
        return "No rank waited for another."
    text = (
        f"The slowest is rank {straggler.rank}: the others waited "
        f"{straggler.others_waited_s:.3f} s for it"
    )
    if straggler.longer_s <= 0:
        return text + "."
    return f"{text}. It spent {straggler.longer_s:.3f} s more than they on {straggler.cause}."


def _as_json(
    facts: dict[str, Any], times: Sequence[_RankTimes], straggler: _Straggler | None
) -> dict[str, Any]:
    return {
        "size": facts["size"],
        "missing_ranks": facts["missing_ranks"],
        "clocks": facts["clocks"],
        "ranks": [dataclasses.asdict(each) for each in times],
        "straggler": None if straggler is None else dataclasses.asdict(straggler),
    }


COMMAND = Command(
    "timeline",
    "Show how each rank of a job spent its time, and which is the slowest.",
    _add_arguments,
    _run,
    "measure",
    """\
Find out whether a job computes, moves data, waits for data or waits for a slow rank. A job that
runs with MPISTRAT_TIMELINE=FILE records a timeline, which https://ui.perfetto.dev shows in full.

  MPISTRAT_TIMELINE=trace.json mpiexec -n 4 python train.py
  mpistrat timeline trace.json
""",
)
