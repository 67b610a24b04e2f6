"""Verdict: whether a hang has stood still for long enough, and is certain, to be reported."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from mpistrat.settings import Settings
from mpistrat.watch.cause import Cause, busy_cause, deaths_cause, find_cause
from mpistrat.watch.hang_report import Report
from mpistrat.watch.judge import Job
from mpistrat.watch.rank_links import Rank

_DEATH_S = 2.0
"""How long ranks wait for a dead one before that is reported."""
_CONFIRM_S = 10.0
"""How long to wait for the answers of ranks on a loaded machine."""
_LINES_S = 2.5
"""How long to wait for lines that belong to the calls."""
_AGREEMENT_S = 10.0
"""How long after its time limit an agreement of mpistrat may take to raise its error."""
_BARE = (
    "note: the calls of MPI cannot be seen here (unknown or static MPI library), only the lines of "
    "the program."
)


class Verdict:
    """Verdict on the ranks of a job.

    Parameters
    ----------
    limits : Settings
        Its ``watch_...`` settings.
    ask : callable
        Sends a question with a number to all ranks, each of which answers with its state.
    """

    def __init__(self, limits: Settings, ask: Callable[[int], object]) -> None:
        assert limits.watch_after_s is not None
        self._after_s, self._busy_after_s = limits.watch_after_s, limits.watch_busy_after_s
        self._ends = not limits.watch_report_only
        self._ask = ask
        self._question = 0
        self._asked_s: float | None = None
        self._has_reported_death = False

    def look(
        self, ranks: list[Rank], members: Mapping[str, frozenset[int]], now_s: float
    ) -> Report | None:
        """Return a report if there is one to print now."""
        if not ranks:  # below a site's launcher, none has come yet
            return None
        # A rank in a debugger stands still for as long as its user needs.
        if any(each.tracer for each in ranks) or _lets_wait(ranks, now_s):
            return None
        job = Job(ranks, dict(members))
        needs = job.stuck(now_s)
        if needs:
            return self._proven(job, needs, now_s)
        return None if self._busy_after_s is None else self._busy(job, now_s)

    def _proven(self, job: Job, needs: dict[int, frozenset[int]], now_s: float) -> Report | None:
        waited_s, ranks = _waited(job.ranks, needs, now_s), job.ranks
        dead = [ranks[each] for each in _involved(needs) if ranks[each].state == "dead"]
        if dead and waited_s >= min(_DEATH_S, self._after_s) and not self._has_reported_death:
            self._has_reported_death = True
            found = frozenset(each.number for each in dead)
            return Report(deaths_cause(dead, len(ranks)), ranks, found, waited_s, False)
        if waited_s < self._after_s:
            self._asked_s = None
            return None
        if not self._is_certain(ranks, needs, now_s):
            return None
        return Report(find_cause(job, needs), ranks, frozenset(needs), waited_s, self._ends)

    def _busy(self, job: Job, now_s: float) -> Report | None:
        assert self._busy_after_s is not None
        ranks = job.ranks
        if all(each.is_bare or each.left for each in ranks):
            return self._bare(ranks, now_s)
        needs = job.held_up_by_busy(now_s)
        waited_s = _waited(ranks, needs, now_s) if needs else 0.0
        if not needs or waited_s < self._busy_after_s:
            self._asked_s = None
            return None
        if not self._is_certain(ranks, needs, now_s):
            return None
        return Report(busy_cause(job, needs), ranks, frozenset(needs), waited_s, self._ends)

    def _bare(self, ranks: list[Rank], now_s: float) -> Report | None:
        found = frozenset(each.number for each in ranks if not each.left)
        waited_s = now_s - max(each.changed_s for each in ranks)
        if not found or self._busy_after_s is None or waited_s < self._busy_after_s:
            return None
        cause = Cause("busy", "no rank has come to another line")
        return replace(Report(cause, ranks, found, waited_s, self._ends), note=_BARE)

    def _is_certain(
        self, ranks: list[Rank], needs: dict[int, frozenset[int]], now_s: float
    ) -> bool:
        """Return whether all ranks have said, after the limit, that they still stand there.

        Messages of different ranks are of different moments. On a loaded machine one may be seconds
        old, and its rank may have continued since.
        """
        if self._asked_s is None:
            self._question += 1
            self._asked_s = now_s
            self._ask(self._question)
            return False
        is_late = now_s - self._asked_s > _CONFIRM_S
        asked = (each for each in ranks if each.is_connected and not each.is_stopped)
        if not is_late and any(each.answer != self._question for each in asked if not each.is_bare):
            return False
        fresh = all(ranks[each].lines_version == ranks[each].version for each in needs)
        return fresh or now_s - self._asked_s > _LINES_S


def _involved(needs: dict[int, frozenset[int]]) -> set[int]:
    return set(needs).union(*needs.values())


def _waited(ranks: list[Rank], needs: dict[int, frozenset[int]], now_s: float) -> float:
    """Return how long nothing has changed; 0 while a history belongs to an earlier call."""
    if any(ranks[each].history_version != ranks[each].version for each in needs):
        return 0.0
    return now_s - max(ranks[each].changed_s for each in _involved(needs))


def _lets_wait(ranks: list[Rank], now_s: float) -> bool:
    """Return whether an agreement of mpistrat may still end by its own time limit."""
    return any(
        call.limit_s is not None and now_s - rank.changed_s < call.limit_s + _AGREEMENT_S
        for rank in ranks
        for call in rank.calls
    )
