"""Report of a hang, as text of at most 40 lines and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mpistrat.system.text import rank_list
from mpistrat.watch.cause import Cause
from mpistrat.watch.rank_links import ANY, AT_THE_END, RECEIVES, SENDS, Call, Rank, Wait

EXIT_CODE = 86
_MAX_GROUPS = 30
_PREFIX = "mpistrat watch"


@dataclass(frozen=True)
class Report:
    """What is reported once for a job."""

    cause: Cause
    ranks: Sequence[Rank]
    stuck: frozenset[int]
    """Ranks without progress, or those that died."""
    waited_s: float
    ends_job: bool
    bracket: str = ""
    """Signal or exit code of a rank that died."""
    note: str = ""
    """A line on what the watch could not see."""

    def text(self) -> str:
        """Return the report as it is printed."""
        return "\n".join(self._lines()) + "\n" + self.last_line()

    def _lines(self) -> list[str]:
        size = len(self.ranks)
        if self.cause.kind == "died":
            bracket = f" ({self.bracket})" if self.bracket else ""
            first = f"{_PREFIX}: {rank_list(self.stuck)} of {size} died{bracket}"
        else:
            who = rank_list(self.stuck)
            first = f"{_PREFIX}: no progress for {self.waited_s:.0f} s on {who} of {size}"
        lines = [first, *self._group_lines()]
        lines += [f"  cause: {self.cause.kind}: {self.cause.sentence}"]
        lines += [f"  do: {self.cause.remedy}"]
        lines += [f"  {self.note}"] if self.note else []
        return lines

    def last_line(self) -> str:
        """Return the line that says how the job ends; empty if it does not."""
        return f"{_PREFIX}: the job is ended with exit code {EXIT_CODE}.\n" * self.ends_job

    def _groups(self) -> list[tuple[str, list[int], bool]]:
        found: dict[tuple[str, bool], list[int]] = {}
        for rank in self.ranks:
            is_odd = rank.number in self.cause.odd
            found.setdefault((describe(rank), is_odd), []).append(rank.number)
        groups = [(text, ranks, is_odd) for (text, is_odd), ranks in found.items()]
        return sorted(groups, key=lambda group: (-len(group[1]), group[1]))

    def _group_lines(self) -> list[str]:
        groups = self._groups()
        rest = []
        if len(groups) > _MAX_GROUPS:
            # Odd ranks must be shown, and their groups are mostly the smallest.
            first = [each for each in groups if each[2]]
            others = [each for each in groups if not each[2]]
            shown = (first + others)[:_MAX_GROUPS]
            rest = [each for each in groups if each not in shown]
            groups = [each for each in groups if each in shown]
        lines = [
            f"  {rank_list(ranks)}: {text}" + ("  <- odd" if is_odd else "")
            for text, ranks, is_odd in groups
        ]
        if rest:
            ranks = [rank for _, theirs, _ in rest for rank in theirs]
            lines.append(f"  {rank_list(ranks)}: elsewhere ({len(rest)} lines, see --json)")
        return lines

    def json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return {
            "format": "mpistrat watch",
            "format_version": 1,
            "kind": self.cause.kind,
            "odd": sorted(self.cause.odd),
            "size": len(self.ranks),
            "waited_s": round(self.waited_s, 1),
            "cause": self.cause.sentence,
            "do": self.cause.remedy,
            "ended": self.ends_job,
            "groups": [self._group_json(ranks) for _, ranks, _ in self._groups()],
        }

    def _group_json(self, ranks: list[int]) -> dict[str, Any]:
        rank = self.ranks[ranks[0]]
        call = rank.main_call
        place = rank.place
        return {
            "ranks": ranks,
            "state": rank.state,
            "call": call.function if call else rank.polls.get(rank.pid),
            "expression": place.expression,
            "file": place.file,
            "line": place.line,
            "details": _details(call) or None if call else None,
            "stack": list(place.stack),
        }


def describe(rank: Rank) -> str:
    """Return where a rank is, and what it does there."""
    place = rank.place
    if rank.state == "ended":
        after = f" after {rank.after}" if rank.after else ""
        return f"left the program{after}"
    if rank.state == "dead":
        return f"died, last seen at {place}"
    if rank.state == "killed":
        return f"ended by the launcher, at {place}"
    if rank.state == "stopped":
        return f"stopped (SIGSTOP) at {place}"
    call = rank.main_call
    if call is not None and call.function == AT_THE_END:
        return "at the end of the program (agreement of mpistrat)"
    if call is not None and call.kind == "finalize":
        after = f", after {rank.after}" if rank.after else ""
        where = "" if rank.is_at_end or not place.file else f" at {place}"
        return f"at the end of the program (MPI_Finalize){after}{where}"
    if rank.state == "absent" and call is None:
        return "has not started MPI" + (f", at {place}" if place.file else "")
    if rank.pid in rank.polls:
        return f"polls with {rank.polls[rank.pid]} at {place}"
    if call is not None:
        details = _details(call)
        inner = f"({call.function}{' ' + details if details else ''})"
        if not place.file:
            return f"{call.function} at unknown place {inner}"
        return f"{place.expression or call.function} at {place} {inner}"
    what = f": {place.expression}" if place.expression else ""
    if rank.is_at_end:
        after = f" after {rank.after}" if rank.after else ""
        return f"at the end of the program, outside MPI{after}"
    if rank.computes:
        return f"computes at {place}{what}"
    return f"is outside MPI, without using the CPU, at {place}{what}"


def _details(call: Call) -> str:
    waits = [each for each in call.waits if each is not None]
    if call.kind == "wait":
        shown = [f"for {each.function}{_peer(each)}" for each in waits[:2]]
        more = len(call.waits) - len(shown)
        return ", ".join(shown) + (f" and {more} more" if shown and more else "")
    return _peer(waits[0]).strip() if waits else ""


def _peer(wait: Wait) -> str:
    if wait.kind == "sendrecv":
        source = "any rank" if wait.peer2 == ANY else f"rank {wait.peer2}"
        return f" to rank {wait.peer}{_tag(wait.tag)}, from {source}{_tag(wait.tag2)}"
    if wait.kind in SENDS:
        return f" to rank {wait.peer}{_tag(wait.tag)}"
    if wait.kind in RECEIVES:
        source = "any rank" if wait.peer == ANY else f"rank {wait.peer}"
        return f" from {source}{_tag(wait.tag)}"
    return "" if wait.root is None else f" root {wait.root}"


def _tag(tag: int) -> str:
    return "" if tag == ANY else f", tag {tag}"
