"""Failure report: one folded traceback for the job, and a line for each further cause."""

from __future__ import annotations

import itertools
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from mpistrat.errors import CollectiveError, MpistratError
from mpistrat.settings import settings_at_the_end
from mpistrat.system.callsite import CodeOwner, code_owners
from mpistrat.system.text import rank_list, text_of

_MAX_LINES = 30
_MAX_LINES_OF_MESSAGE = 24
_MAX_CHARACTERS = 2000
_MAX_OTHERS = 5


def describe_failure(
    kind: type[BaseException],
    error: BaseException,
    trace: TracebackType | None,
    site: str,
    closed: Sequence[BaseException | None] = (),
) -> tuple[dict[str, Any], str]:
    """Return the facts on a failure for the other ranks, and its traceback as text.

    `closed` are the errors that closed channels of this rank: `error` may be one of them, wrapped.
    """
    origin = _origin(error, closed)
    name, reason = type(origin).__name__, text_of(origin)
    # Two failures are the same if the ranks raise the same disagreement, or fail at the same place.
    same = (
        re.sub(r"rank \d+ of", "rank of", reason) if isinstance(origin, CollectiveError) else site
    )
    facts = {
        "failed": True,
        "cause": not getattr(origin, "_caused_elsewhere", False),
        "summary": f"{name}: {reason}".split("\n")[0][:300].removesuffix(": "),
        "key": [name, same],
    }
    parts = _folded(kind, error, trace)
    message = list(parts.format_exception_only())
    lines = list(parts.format(chain=False))
    stack = lines[: -len(message)]
    if [*stack, *message] != lines:  # a group, whose errors have stacks too
        stack, message = lines, []
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        message.append(f"caused by {type(cause).__name__}: {text_of(cause)}\n")
    own = _lines(message)
    if origin is not error and not settings_at_the_end().full_traceback:
        own = f"{name}: {reason}".split("\n")
    # A long message must not push out the stack, nor its own first line.
    shown = _shortened(own, _MAX_LINES_OF_MESSAGE, _MAX_LINES_OF_MESSAGE // 2)
    return facts, "\n".join([*_shortened(_lines(stack), _MAX_LINES - len(shown)), *shown])


def _origin(error: BaseException, closed: Sequence[BaseException | None]) -> BaseException:
    """Return the error of `closed` that `error` quotes, as C++ code quotes errors that it wraps."""
    if isinstance(error, CollectiveError):
        return error
    text = text_of(error)
    wrapped = (
        each for each in closed if isinstance(each, CollectiveError) and text_of(each) in text
    )
    return next(wrapped, error)


def format_failure(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> str | None:
    """Return the folded traceback, or ``None`` if there is nothing to fold."""
    parts = _folded(kind, error, trace)
    if not any(isinstance(each.stack, _FoldedStack) for each in _chain(parts)):
        return None
    return "".join(parts.format())


class _FoldedStack(traceback.StackSummary):
    """Stack in which one line stands for consecutive frames of this package."""

    # The frames stay in the list. The program's debugger and loggers use the exception's own
    # traceback, which is not changed.

    def __init__(self, frames: Sequence[traceback.FrameSummary]) -> None:
        super().__init__(frames)
        self.pieces: list[str | traceback.StackSummary] = []

    def format(self, **options: Any) -> list[str]:
        """Return the lines of each piece."""
        lines: list[str] = []
        for piece in self.pieces:
            lines += [piece] if isinstance(piece, str) else piece.format(**options)
        return lines


def _folded(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> traceback.TracebackException:
    parts = traceback.TracebackException(kind, error, trace)
    if not settings_at_the_end().full_traceback:
        for each in _chain(parts):
            _fold(each, is_explained=isinstance(error, MpistratError | KeyboardInterrupt))
    return parts


def _chain(parts: traceback.TracebackException) -> list[traceback.TracebackException]:
    """Return an exception with its causes, contexts and, for a group, members."""
    inner = [parts.__cause__, parts.__context__, *(getattr(parts, "exceptions", None) or ())]
    return [parts, *(each for one in inner if one is not None for each in _chain(one))]


def _fold(parts: traceback.TracebackException, is_explained: bool) -> None:
    """Fold the frames of this package, except the innermost ones of an unexpected error."""
    frames = list(parts.stack)
    is_ours = _frames_to_fold(frames)
    if frames and is_ours[-1] and not is_explained and not _is_raised(frames[-1]):
        # The package did not raise it on purpose, so its innermost frames may say more than the
        # message.
        end = len(frames)
        while end and is_ours[end - 1]:
            end -= 1
            is_ours[end] = False
    if not any(is_ours):
        return
    stack = _FoldedStack(frames)
    hint = "; MPISTRAT_FULL_TRACEBACK=on shows them"
    for ours, run in itertools.groupby(zip(is_ours, frames, strict=True), lambda pair: pair[0]):
        piece = [frame for _, frame in run]
        if ours:
            what = "1 frame" if len(piece) == 1 else f"{len(piece)} frames"
            stack.pieces.append(f"  [{what} of mpistrat{hint}]\n")
            hint = ""
        else:
            stack.pieces.append(traceback.StackSummary.from_list(piece))
    parts.stack = stack


def _frames_to_fold(frames: Sequence[traceback.FrameSummary]) -> list[bool]:
    """Return which frames are of this package, or of Python between two such frames."""
    owners = [code_owners[frame.filename] for frame in frames]
    is_ours = [owner is CodeOwner.PACKAGE for owner in owners]
    last: int | None = None
    for position, owner in enumerate(owners):
        if owner is CodeOwner.PACKAGE:
            if last is not None:
                is_ours[last:position] = [True] * (position - last)
            last = position
        elif owner is CodeOwner.USER:
            last = None
    return is_ours


def _is_raised(frame: traceback.FrameSummary) -> bool:
    return (frame.line or "").startswith("raise")


def print_failures(
    reports: Mapping[int, dict[str, Any]], rank: int, size: int, text: str | None, among: str
) -> bool:
    """Print `text`, the traceback of this rank, if it reports for all. Return whether it does."""
    # `reports` come from `Channel.report`; `among` names the ranks if the job has more.
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
