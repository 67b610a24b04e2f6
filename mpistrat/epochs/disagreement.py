"""The table of disagreement: which ranks are where, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mpistrat.epochs.report import rank_list

__all__ = ["describe_disagreement"]

_COUNTERS = ("sequence", "runs", "merge_calls", "updates", "failures")
_CALL = re.compile(r"[^'\"]* of ('[^']*'|\"[^\"]*\")|\S+")


def describe_disagreement(reports: Sequence[dict[str, Any]]) -> str:
    """Return the table of which ranks are where, and what to do about it. Local.

    Parameters
    ----------
    reports : sequence of dict
        What each rank, in rank order, said of itself (`Channel.report`).
    """
    counters_differ = len({_counters(report) for report in reports}) > 1
    groups: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        groups.setdefault(_line(report, counters_differ), []).append(rank)
    lines = [f"  {rank_list(ranks)}: {line}" for line, ranks in groups.items()]
    return "\n".join(lines + _remedy(reports))


def _remedy(reports: Sequence[dict[str, Any]]) -> list[str]:
    """Return a line about a call that only some ranks make, the usual mistake behind ``if``."""
    places: dict[str, list[int]] = {}
    calls: dict[str, list[int]] = {}
    for rank, report in enumerate(reports):
        if "failed" in report or report["last_failure"]:
            return []
        call = _CALL.match(report["what"])
        places.setdefault(report["what"].split()[0], []).append(rank)
        if call is not None and not report["ended"]:
            calls.setdefault(call[0], []).append(rank)
    if len(places) < 2 or not calls:
        return []
    call_words, ranks = min(calls.items(), key=lambda item: len(item[1]))
    if 2 * len(ranks) > len(reports):
        return []
    return [
        f"{call_words} is a collective call: every rank must make it, not {rank_list(ranks)} alone."
    ]


def _counters(report: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(report[name] for name in _COUNTERS)


def _line(report: dict[str, Any], counters_differ: bool) -> str:
    line = f"{report['what']} at {report['site']}"
    if report["ended"]:
        return line + (f", after {report['last_failure']}" if report["last_failure"] else "")
    if counters_differ:
        line += (
            f", as collective {report['sequence']} after {report['runs']} runs and "
            f"{report['merge_calls']} merge_calls"
            + (f" and {report['updates']} updates" if report["updates"] else "")
        )
        if report["last_failure"]:
            line += f"; before that {report['last_failure']}"
    return line
