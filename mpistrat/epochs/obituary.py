"""What is printed when a job fails: one traceback, and a line for each other cause."""

from __future__ import annotations

import re
import sys
import traceback
from types import TracebackType
from typing import Any

from mpistrat.epochs.callsite import is_inside
from mpistrat.epochs.parting import Parting
from mpistrat.epochs.report import rank_list, text_of
from mpistrat.errors import EpochError, MpistratError

__all__ = ["describe_failure", "print_failures"]

_MAX_LINES = 30
_MAX_OTHERS = 5


def describe_failure(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None, site: str
) -> tuple[dict[str, Any], str]:
    """Return what the other ranks must know of a failure, and its traceback. Local."""
    # Two ranks fail alike if they disagree about the same, or fail at the same place.
    same = (
        re.sub(r"rank \d+ of", "rank of", text_of(error)) if isinstance(error, EpochError) else site
    )
    facts = {
        "failed": True,
        "cause": not getattr(error, "caused_elsewhere", False),
        "summary": f"{kind.__name__}: {text_of(error)}".split("\n")[0][:300].removesuffix(": "),
        "key": [kind.__name__, same],
    }
    told = traceback.TracebackException(kind, error, trace)
    if isinstance(error, MpistratError | KeyboardInterrupt):
        # It says what the user did. Where this package noticed is of no use to them.
        told.stack[:] = [frame for frame in told.stack if not is_inside(frame.filename)]
    lines = list(told.format(chain=False))
    cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    if cause is not None:
        lines.append(f"caused by {type(cause).__name__}: {text_of(cause)}\n")
    return facts, "".join(lines)


def print_failures(parting: Parting, text: str | None, among: str) -> bool:
    """Print the traceback `text` of this rank if it is the one to speak for all. Local.

    Parameters
    ----------
    parting : Parting
    text : str or None
    among : str
        Which ranks of the job the channel is of, where these are not all.

    Returns
    -------
    bool
        Whether it was.
    """
    failed = {rank: each for rank, each in parting.reports.items() if "failed" in each}
    causes = {rank: each for rank, each in failed.items() if each["cause"]} or failed
    if text is None or parting.channel.rank != min(causes):
        return False
    groups: dict[tuple[str, ...], list[int]] = {}
    for rank, each in causes.items():
        groups.setdefault(tuple(each["key"]), []).append(rank)
    (_, ranks), *others = groups.items()
    sites = list(dict.fromkeys(causes[rank]["site"] for rank in ranks))
    size = parting.channel.size
    who = f"{rank_list(ranks)} of {size}" + (f" (among {among} of the job)" if among else "")
    lines = [f"mpistrat: {who} failed at {', '.join(sites[:3])}:"]
    lines += _shortened(text.rstrip("\n").split("\n"))
    for _, ranks in others[:_MAX_OTHERS]:
        each = causes[ranks[0]]
        lines.append(f"mpistrat: {rank_list(ranks)} failed at {each['site']}: {each['summary']}")
    print("\n".join(lines), file=sys.stderr, flush=True)
    return True


def _shortened(lines: list[str]) -> list[str]:
    if len(lines) <= _MAX_LINES:
        return lines
    head = 3
    omitted = len(lines) - _MAX_LINES
    return [*lines[:head], f"  ... {omitted} lines ...", *lines[head + omitted :]]
