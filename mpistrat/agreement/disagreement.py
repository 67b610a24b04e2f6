"""Messages about disagreements: which ranks are where, and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from mpistrat.errors import CollectiveError, CollectiveMismatchError
from mpistrat.system.text import rank_list

_VALUES = re.compile(r"with (the value \S+|values of digest [0-9a-f]{16})")
_WIDE = 60
"""Longer calls do not shift the places behind the others."""
_COUNTERS = ("sequence", "runs", "merge_calls", "updates", "failures", "batches")
_CALL = re.compile(r"[^'\"(]* of ('[^']*'|\"[^\"]*\")|[^\s(]+")


def disagreement_error(
    reports: Sequence[dict[str, Any]], rank: int, ranks: Sequence[int] | None = None
) -> CollectiveError:
    """Return the error of `rank` for the `Channel.report` of each rank, named as in `ranks`."""
    names = range(len(reports)) if ranks is None else ranks
    by_name = dict(zip(names, reports, strict=True))
    guilty = [each for each, report in by_name.items() if report["cause"]]
    ended = [each for each, report in by_name.items() if report["ended"]]
    table = _describe_disagreement(by_name)
    error: CollectiveError
    if ended:
        error = CollectiveError(
            f"{rank_list(ended)} ended, so this collective can never complete:\n{table}"
        )
    else:
        error = CollectiveMismatchError(
            f"The ranks made different collective calls:\n{table}\n{_rule(by_name)}"
        )
    # A rank that has failed may report that other ranks failed first, in a different group of
    # ranks.
    has_failed = any(by_name[each].get("failed") for each in ended)
    error._caused_elsewhere = names[rank] not in guilty and (bool(guilty) or has_failed)
    return error


def _describe_disagreement(reports: Mapping[int, dict[str, Any]]) -> str:
    """Return a table of which ranks are where, from the `Channel.report` of each, and a remedy."""
    counters_differ = len({_counters(report) for report in reports.values()}) > 1
    has_runs = any(any(_counters(report)[1:-1]) for report in reports.values())  # torch has none
    # Ranks may have processed different batches before, and now work on the same one.
    num_before, num_now = (
        len({str(report[name]) for report in reports.values()}) for name in ("batches", "batch")
    )
    groups: dict[tuple[str, str], list[int]] = {}
    calls = calls_with_structures([*reports.values()])
    for (rank, report), call in zip(reports.items(), calls, strict=True):
        place = _place(report, counters_differ, has_runs, num_before > num_now == 1)
        if report["ended"]:
            call, place = f"{call} at {place}", ""
        groups.setdefault((call, place), []).append(rank)
    return "\n".join(_table(groups) + _remedy(reports))


def calls_with_structures(reports: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the call of each report, with its structure where calls of one kind differ in it."""
    structures: dict[str, set[str]] = {}
    for report in reports:
        structures.setdefault(_kind(report), set()).add(report.get("structure", ""))
    return [
        f"{report['what']} structured as {report['structure']}"
        if len(structures[_kind(report)]) > 1 and report.get("structure")
        else report["what"]
        for report in reports
    ]


def _table(groups: Mapping[tuple[str, str], list[int]]) -> list[str]:
    """Return a line for each call, with the ranks that made it before and the place behind it."""
    names = [f"  {rank_list(ranks)}:" for ranks in groups.values()]
    name_width = max(map(len, names))
    call_width = max((len(call) for call, _ in groups if len(call) <= _WIDE), default=0)
    return [
        f"{name:{name_width}} {call:{call_width}}  {place}".rstrip()
        for name, (call, place) in zip(names, groups, strict=True)
    ]


def _rule(reports: Mapping[int, dict[str, Any]]) -> str:
    """Return what the ranks have to do, and a likely cause if they are at different places."""
    places = {(_kind(report), report["site"], report["sequence"]) for report in reports.values()}
    if len(places) > 1:
        return (
            "All ranks must make the same calls in the same order. Is one of them inside "
            '"if rank == 0", or does a loop end earlier on one rank?'
        )
    return (
        "All ranks must make the same calls in the same order, with the same op, dtype, shape, "
        "structure and name."
    )


def _kind(report: Mapping[str, Any]) -> str:
    """Return the first word of a call: ``reduce``."""
    return re.split(r"[\s(]", report["what"], maxsplit=1)[0]


def _remedy(reports: Mapping[int, dict[str, Any]]) -> list[str]:
    """Return a line about a call that only some ranks make, for example under ``if rank == 0``."""
    calls_without_values = {_VALUES.sub("", report["what"]) for report in reports.values()}
    if len(calls_without_values) == 1 and any(_VALUES.search(r["what"]) for r in reports.values()):
        return [
            "The values differ from rank to rank, but outside of strategy.run all ranks pass one "
            "value for all replicas: forgot strategy.run? Or combine the values first: "
            'strategy.reduce("mean", value), strategy.broadcast(value).'
        ]
    if len(calls_without_values) == 1 < len({report["batches"] for report in reports.values()}):
        return [
            "The ranks work on different batches: did a loop over the dataset end early on some of "
            "them (break, close, an exception)? All ranks must leave it after the same batch."
        ]
    places: dict[str, list[int]] = {}
    calls: dict[str, list[int]] = {}
    for rank, report in reports.items():
        if "failed" in report or report["cause"] or report["last_failure"]:
            return []
        call = _CALL.match(report["what"])
        places.setdefault(_kind(report), []).append(rank)
        if call is not None and not report["ended"]:
            calls.setdefault(call[0], []).append(rank)
    if len(places) < 2 or not calls:
        return []
    call_text, ranks = min(calls.items(), key=lambda item: len(item[1]))
    if 2 * len(ranks) > len(reports):
        return []
    if len(calls) == 2 and {len(ranks) for ranks in calls.values()} == {len(ranks)}:
        # It is unknown which half of the ranks is right.
        both = " and ".join(calls)
        return [f"{both} are collective calls: every rank must make both, in the same order."]
    return [
        f"{call_text} is a collective call: every rank must make it, not {rank_list(ranks)} alone."
    ]


def _counters(report: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(report[name] for name in _COUNTERS)


def _place(report: dict[str, Any], counters_differ: bool, has_runs: bool, has_skipped: bool) -> str:
    line: str = report["site"]
    if report["ended"]:
        return line + (f", after {report['last_failure']}" if report["last_failure"] else "")
    if counters_differ:
        line += f", as collective {report['sequence']}"
        if has_runs:
            line += f" after {report['runs']} runs and {report['merge_calls']} merge_calls"
        if report["updates"]:
            line += f" and {report['updates']} updates"
        if report["batch"]:
            line += f", with batch {report['batch'][1]} of pass {report['batch'][0]}"
            line += " after different ones" if has_skipped else ""
        if report["last_failure"]:
            line += f"; before that {report['last_failure']}"
    return line
