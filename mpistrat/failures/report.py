"""Failure report: one traceback for the job, and a line for each other cause."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Mapping
from types import TracebackType
from typing import Any

from mpistrat.errors import EpochError, MpistratError
from mpistrat.system.callsite import CodeOwner, code_owners
from mpistrat.system.text import rank_list, text_of

__all__ = ["describe_failure", "print_failures"]

_MAX_LINES = 30
_MAX_LINES_OF_MESSAGE = 24
_MAX_CHARACTERS = 2000
_MAX_OTHERS = 5


def describe_failure(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None, site: str
) -> tuple[dict[str, Any], str]:
    """Return the facts on a failure for the other ranks, and its traceback as text."""
    # Two ranks fail alike if they disagree about the same, or fail at the same place.
    same = (
        re.sub(r"rank \d+ of", "rank of", text_of(error)) if isinstance(error, EpochError) else site
    )
    facts = {
        "failed": True,
        "cause": not getattr(error, "_caused_elsewhere", False),
        "summary": f"{kind.__name__}: {text_of(error)}".split("\n")[0][:300].removesuffix(": "),
        "key": [kind.__name__, same],
    }
    parts = traceback.TracebackException(kind, error, trace)
    if isinstance(error, MpistratError | KeyboardInterrupt):
        # Its message says what the user did. Frames of this package would only distract.
        parts.stack[:] = [
            frame for frame in parts.stack if code_owners[frame.filename] is not CodeOwner.PACKAGE
        ]
    message = list(parts.format_exception_only())
    lines = list(parts.format(chain=False))
    stack = lines[: -len(message)]
    if [*stack, *message] != lines:  # a group, whose errors have stacks too
        stack, message = lines, []
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        message.append(f"caused by {type(cause).__name__}: {text_of(cause)}\n")
    # A long message must not push out the stack, nor its own first line.
    shown = _shortened(_lines(message), _MAX_LINES_OF_MESSAGE, _MAX_LINES_OF_MESSAGE // 2)
    return facts, "\n".join([*_shortened(_lines(stack), _MAX_LINES - len(shown)), *shown])


def print_failures(
    reports: Mapping[int, dict[str, Any]], rank: int, size: int, text: str | None, among: str
) -> bool:
    """Print `text`, the traceback of this rank, if it reports for all; return whether it does."""
    # `reports` are those of `Channel.report`; `among` names the ranks if there are more in the job.
    failed = {other: each for other, each in reports.items() if "failed" in each}
    causes = {other: each for other, each in failed.items() if each["cause"]} or failed
    if text is None or rank != min(causes):
        return False
    groups: dict[tuple[str, ...], list[int]] = {}
    for other, each in causes.items():
        groups.setdefault(tuple(each["key"]), []).append(other)
    (_, ranks), *others = groups.items()
    sites = list(dict.fromkeys(causes[other]["site"] for other in ranks))
    who = f"{rank_list(ranks)} of {size}" + (f" (among {among} of the job)" if among else "")
    lines = [f"mpistrat: {who} failed at {', '.join(sites[:3])}:"]
    lines.append(text)
    for _, ranks in others[:_MAX_OTHERS]:
        each = causes[ranks[0]]
        lines.append(f"mpistrat: {rank_list(ranks)} failed at {each['site']}: {each['summary']}")
    print("\n".join(lines), file=sys.stderr, flush=True)
    return True


def _lines(texts: list[str]) -> list[str]:
    joined = "".join(texts).rstrip("\n")
    return [each[:_MAX_CHARACTERS] for each in joined.split("\n")] if joined else []


def _shortened(lines: list[str], limit: int, head: int = 3) -> list[str]:
    if len(lines) <= limit:
        return lines
    omitted = len(lines) - limit
    return [*lines[:head], f"  ... {omitted} lines ...", *lines[head + omitted :]]
