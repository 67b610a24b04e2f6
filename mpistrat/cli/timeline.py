"""Command ``mpistrat timeline``: time of each rank by category, and the straggler."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
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
from mpistrat.cli.rank_times import (
    CATEGORIES,
    COMPUTING,
    RankTimes,
    Straggler,
    find_straggler,
    summarize,
)
from mpistrat.cli.timeline_plot import draw
from mpistrat.system.text import rank_list
from mpistrat.tracing.trace import Part, Trace

_COLUMNS = (COMPUTING, *(CATEGORIES[name] for name in ("wait", "move", "data", "checkpoint")))
_CAUSES = {
    COMPUTING: "computed {:.3f} s longer",
    CATEGORIES["data"]: "waited {:.3f} s longer for data",
    CATEGORIES["checkpoint"]: "spent {:.3f} s longer on checkpoints",
}
_MAX_ROWS = 32


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="a timeline, or the parts (*.part) left by a job that was killed",
    )
    parser.add_argument(
        "--plot", type=Path, metavar="PNG", help="also draw a strip of time for each rank"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def _run(arguments: argparse.Namespace) -> int:
    try:
        all_events, facts = _read(arguments.path)
        if arguments.plot is not None:
            all_events = list(all_events)  # they are read twice
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
            draw(all_events, times, arguments.plot)
        except ValueError as error:
            print_error("timeline", error)
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
            raise ValueError(f"There is no timeline {path}, and no part of it (*.part).")
    parts = sorted((Part.open(path) for path in paths), key=lambda part: part.rank)
    for one, other in itertools.pairwise(parts):
        if one.rank == other.rank:
            raise ValueError(f"{one.path} and {other.path} are both from rank {one.rank}.")
    trace = Trace(parts)
    return trace.events(), trace.metadata()


def _read_trace(path: Path) -> tuple[Iterable[Mapping[str, Any]], dict[str, Any]]:
    try:
        trace = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not a timeline: it is not JSON.") from None
    facts = trace.get("otherData") if isinstance(trace, dict) else None
    if not isinstance(facts, dict) or facts.get("format") != "mpistrat-timeline":
        raise ValueError(f"{path} is not a timeline of mpistrat.")
    return trace["traceEvents"], facts


def _print(facts: dict[str, Any], times: Sequence[RankTimes], straggler: Straggler | None) -> None:
    if facts["missing_ranks"]:
        print_line(f"There is no part from {rank_list(facts['missing_ranks'])}.")
    shown = times
    if len(times) > _MAX_ROWS:
        shown = sorted(times, key=lambda each: -each.others_waited_s)[: _MAX_ROWS // 2]
        print_line(f"{len(times)} ranks; the table shows those that the others waited for most.")
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
    print_line(_formatted(straggler, len(times)))


def _row(
    rank: str, total_s: float, seconds: Mapping[str, float], others_waited_s: float
) -> list[str]:
    numbers = (total_s, *(seconds[name] for name in _COLUMNS), others_waited_s)
    return [rank, *(f"{number:.3f}" for number in numbers)]


def _formatted(straggler: Straggler | None, num_ranks: int) -> str:
    if straggler is None:
        return "No rank waited for another one."
    text = f"the others waited {straggler.others_waited_s:.3f} s for it"
    if straggler.longer_s > 0:
        # If the ranks take turns in being late, their totals differ by much less than they waited.
        is_cause = straggler.longer_s >= straggler.others_waited_s / (num_ranks - 1) / 2
        text += f", {'mostly because' if is_cause else 'and'} it "
        text += _CAUSES[straggler.cause].format(straggler.longer_s)
    return f"Slowest: rank {straggler.rank} ({text})."


def _as_json(
    facts: dict[str, Any], times: Sequence[RankTimes], straggler: Straggler | None
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
    "Show how each rank of a job spent its time, and which rank is the slowest.",
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
