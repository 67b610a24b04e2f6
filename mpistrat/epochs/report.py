"""The words in which ranks that disagree are described."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

__all__ = ["describe_disagreement", "rank_list", "rank_spans", "spell", "text_of"]

_COUNTERS = ("sequence", "runs", "merge_calls", "updates", "failures")
_CALL = re.compile(r"[^'\"]* of ('[^']*'|\"[^\"]*\")|\S+")
_MAX_SPELLED = 4
_MAX_CHARACTERS = 120


def rank_list(ranks: Iterable[int]) -> str:
    """Return ``rank 3`` or ``ranks 0, 2-5``. Local."""
    spans = rank_spans(ranks)
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    is_one = len(spans) == 1 and spans[0][0] == spans[0][1]
    return f"rank {text}" if is_one else f"ranks {text}"


def rank_spans(ranks: Iterable[int]) -> list[list[int]]:
    """Return the first and last rank of each run of `ranks`. Local."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return spans


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


def text_of(error: BaseException) -> str:
    """Return what `error` says, also where its class cannot say it. Local."""
    try:
        return str(error)
    except Exception:
        return "(an error that has no text, because its __str__ fails)"


def spell(detail: object) -> str:
    """Return a detail of a call in short: arrays as ``float32 (4, 3)``, nests as ``[*]``. Local."""
    if isinstance(detail, tuple):
        if len(detail) == 2 and isinstance(detail[1], tuple) and isinstance(detail[0], str):
            return f"{detail[0]} {detail[1]}"
        shown = [spell(each) for each in detail[:_MAX_SPELLED]]
        rest = len(detail) - len(shown)
        return ", ".join(shown) + (f" and {rest} more" if rest else "")
    text = str(detail)
    return text if len(text) <= _MAX_CHARACTERS else text[: _MAX_CHARACTERS - 3] + "..."
