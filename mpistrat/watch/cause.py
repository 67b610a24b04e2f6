"""Cause of a hang: its kind, the ranks to look at first, and what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass, replace

from mpistrat.system.text import rank_list, ranks_by_value
from mpistrat.watch.judge import ONE_OF_ALL, Job, core
from mpistrat.watch.rank_links import (
    ANY,
    AT_THE_END,
    COLLECTIVES,
    RECEIVES,
    SENDS,
    Call,
    Made,
    Rank,
    Wait,
)

_PICKLED = frozenset(
    ("allgather", "allreduce", "alltoall", "bcast", "exscan", "gather", "reduce", "scan", "scatter")
)
"""Methods of mpi4py that are collectives, though they consist of messages."""

REMEDIES = {
    "different collectives": "make the same collectives in the same order on every rank",
    "different roots": "pass the same root on every rank",
    "different lengths": "pass buffers of the same number of bytes on every rank",
    "missing ranks": "make the call on every rank of the communicator; is it inside an if, or does "
    "a loop end earlier on some ranks?",
    "unmatched message": "check source, destination, tag and number of the messages",
    "cycle": "let one of the ranks receive before it sends, or use Sendrecv or Isend",
    "ended": "look for an early return, a swallowed exception or a shorter loop on the ranks that "
    "have ended",
    "died": "look at the line, at the memory of the machine, and at dmesg",
    "stopped": "kill -CONT the process, or look who stopped it",
    "busy": "look at that line: an endless loop, a slow file system, a lock of another thread",
    "polling": "look at what the rank polls for",
    "not started": "start MPI on every rank, and all ranks with one launcher",
}


_OF_SOME = ("cycle", "unmatched message")
"""Causes that lie with ranks that wait for one another, while others wait for these."""


@dataclass(frozen=True)
class Cause:
    """Why ranks cannot go on."""

    kind: str
    sentence: str
    odd: frozenset[int] = frozenset()

    @property
    def remedy(self) -> str:
        """What to do."""
        return REMEDIES[self.kind]


def title(call: str, rank: Rank, with_call: bool = True) -> str:
    """Return expression and MPI function of what a rank calls."""
    name = rank.place.expression
    if not name:
        return call
    return f"{name} ({call})" if with_call else name


def find_cause(job: Job, needs: dict[int, frozenset[int]]) -> Cause:
    """Return the cause for which the ranks in `needs` cannot go on."""
    ranks = core(needs) or set(needs)
    # The order matters: a dead rank explains all that follows from it, and the messages inside a
    # pickled collective would look like unmatched ones.
    finders: tuple[Callable[[Job, set[int]], Cause | None], ...] = (
        _of_processes,
        _of_pickled,
        _of_collectives,
        _of_windows,
        _of_messages,
    )
    # The core of a hang may be only the ranks at the end of the program, which wait for all.
    for chosen in (ranks, set(needs) | ranks):
        for find in finders:
            if (cause := find(job, chosen)) is not None:
                if not cause.odd and cause.kind in _OF_SOME and len(ranks) < len(needs):
                    return replace(cause, odd=frozenset(ranks))
                return cause
    return Cause("missing ranks", f"{rank_list(ranks)} wait for one another")


def _of_processes(job: Job, ranks: set[int]) -> Cause | None:
    for state, kind, what in (
        ("dead", "died", "died"),
        ("stopped", "stopped", "stopped by a signal"),
        ("ended", "ended", "over"),
    ):
        found = {each for each in ranks if job.ranks[each].state == state}
        if found:
            text = "died" if kind == "died" else f"{_verb(found)} {what}"
            whom = _verb(found, "it", "them")
            sentence = f"{rank_list(found)} {text}, and other ranks wait for {whom}"
            return Cause(kind, sentence, _unless_all(job, found))
    return None


def _verb(ranks: Sized, one: str = "is", several: str = "are") -> str:
    return one if len(ranks) == 1 else several


def _unless_all(job: Job, ranks: Iterable[int]) -> frozenset[int]:
    found = frozenset(ranks)
    return found if len(found) < len(job.ranks) else frozenset()


def _fewer(job: Job, *groups: set[int]) -> frozenset[int]:
    """Return the ranks outside the largest group; none if that is not the only one."""
    ordered = sorted(groups, key=len)
    if len(ordered) < 2 or len(ordered[-1]) == len(ordered[-2]):
        return frozenset()
    return _unless_all(job, set().union(*ordered[:-1]))


def _collective_waits(job: Job, ranks: Iterable[int]) -> dict[str, list[tuple[Rank, Wait]]]:
    found: dict[str, list[tuple[Rank, Wait]]] = {}
    for each in sorted(ranks):
        rank = job.ranks[each]
        for call in _calls(rank):
            for wait in call.waits:
                if wait is not None and wait.kind in COLLECTIVES and wait.group in job.members:
                    assert wait.group is not None
                    found.setdefault(wait.group, []).append((rank, wait))
    return found


def _calls(rank: Rank) -> Iterable[Call]:
    return [rank.main_call] if rank.main_call is not None else rank.calls


def _of_collectives(job: Job, ranks: set[int]) -> Cause | None:
    chosen = _collective_waits(job, ranks)
    stuck = [each.number for each in job.ranks if each.state == "waits"]
    waits = {g: each for g, each in _collective_waits(job, stuck).items() if g in chosen}
    by_size = sorted(waits, key=lambda group: (-len(waits[group]), group))
    for group in by_size:
        if (cause := _difference(job, group)) is not None:
            return cause
    for group in by_size:
        if (cause := _missing(job, group, waits[group], ranks)) is not None:
            return cause
    return None


def _noun(group: str) -> str:
    nouns = {"0": "communicator", "1": "window", "2": "file", "3": "strategy"}
    return nouns[group.partition(":")[0]]


def _difference(job: Job, group: str) -> Cause | None:
    """Return the first collective of a communicator in which its members differ."""
    members = [job.ranks[each] for each in sorted(job.members[group])]
    histories = {r.number: each for r in members if (each := r.history_of(group)) is not None}
    numbers = sorted({number for each in histories.values() for number in each.last})
    # The first difference is the cause. After it, all later calls may differ, too.
    for number in numbers:
        made = [(r, each.last[number]) for r, each in histories.items() if number in each.last]
        by_made = ranks_by_value(made)
        kinds = {a.differs(b) for a in by_made for b in by_made} - {None}
        if not kinds:
            continue
        kind = next(
            each
            for each in ("different collectives", "different roots", "different lengths")
            if each in kinds
        )
        parts: dict[str, set[int]] = {}
        for one, theirs in by_made.items():
            parts.setdefault(_shown(job, kind, one, theirs, group, number), set()).update(theirs)
        text = ", ".join(
            f"{what} on {rank_list(theirs)}"
            for what, theirs in sorted(parts.items(), key=lambda item: (-len(item[1]), item[0]))
        )
        sentence = f"call {number} of the {_noun(group)} is {text}"
        return Cause(kind, sentence, _fewer(job, *parts.values()))
    return None


def _shown(job: Job, kind: str, made: Made, ranks: Sequence[int], group: str, number: int) -> str:
    if kind == "different roots":
        return f"{made.function} with root {made.root}"
    if kind == "different lengths":
        return f"{made.function} of {made.bytes} bytes"
    for each in ranks:  # the expression is known only of a call that has not returned
        for call in _calls(job.ranks[each]):
            for wait in call.waits:
                if wait is not None and (wait.group, wait.number) == (group, number):
                    return title(made.function, job.ranks[each])
    return made.function


def _missing(job: Job, group: str, waits: list[tuple[Rank, Wait]], ranks: set[int]) -> Cause | None:
    number = min(wait.number for _, wait in waits)
    callers = {
        each.number
        for each in job.ranks
        if each.state == "waits"
        for call in _calls(each)
        for one in call.waits
        if one is not None and (one.group, one.number) == (group, number)
    }
    rank, wait = next((rank, wait) for rank, wait in waits if wait.number == number)
    missing = {m for m in job.members[group] - callers if not job.has_made(m, rank, wait)}
    if not missing:
        return None
    what = f"call {number} of the {_noun(group)}, {title(wait.function, rank)}"
    at_end = {each for each in missing if _is_at_end(job.ranks[each])}
    odd = missing if len(missing) <= len(callers) else callers
    failed = {each for each in at_end if job.ranks[each].after}
    who = f"{rank_list(callers)} {_verb(callers, 'waits', 'wait')}"
    if at_end == missing:
        kind = "ended" if failed or odd == missing else "missing ranks"
        where = f"{rank_list(missing)} {_verb(missing)} at the end of the program"
        return Cause(kind, f"{who} in {what}; {where}", _unless_all(job, failed or odd))
    elsewhere = {
        each: title(call.function, job.ranks[each])
        for each in missing - at_end
        for call in _calls(job.ranks[each])
        if any(w is not None and w.kind in COLLECTIVES for w in call.waits)
    }
    if elsewhere.keys() == missing:
        others = ", ".join(
            f"{where} on {rank_list(theirs)}"
            for where, theirs in ranks_by_value(elsewhere.items()).items()
        )
        sentence = f"{what} on {rank_list(callers)}, {others}"
        return Cause("different collectives", sentence, _odd_of(job, missing, callers))
    have = _verb(missing, "has", "have")
    sentence = f"{who} in {what}; {rank_list(missing)} {have} not made it"
    return Cause("missing ranks", sentence, _unless_all(job, odd))


def _odd_of(job: Job, missing: set[int], callers: set[int]) -> frozenset[int]:
    return _fewer(job, missing, callers)


def _is_at_end(rank: Rank) -> bool:
    return rank.state == "ended" or is_leaving(rank)


def is_leaving(rank: Rank) -> bool:
    """Return whether a rank is in MPI_Finalize, or in the last agreement of mpistrat."""
    return any(call.kind == "finalize" or call.function == AT_THE_END for call in rank.calls)


def _method(rank: Rank) -> str:
    return (rank.place.expression or "").rpartition(".")[2]


def _of_pickled(job: Job, ranks: set[int]) -> Cause | None:
    """Return the cause among collectives of Python objects, which consist of messages."""
    callers = {each for each in ranks if _is_in_pickled(job.ranks[each])}
    if not callers:
        return None
    places = ranks_by_value(
        (each, (job.ranks[each].place.expression or "")) for each in sorted(callers)
    )
    main, theirs = max(places.items(), key=lambda item: len(item[1]))
    others = ranks - set(theirs)
    if len(places) > 1:
        text = ", ".join(f"{name} on {rank_list(r)}" for name, r in places.items())
        groups = [set(each) for each in places.values()]
        return Cause("different collectives", f"{text}", _fewer(job, *groups))
    if not others:
        return None
    at_end = all(_is_at_end(job.ranks[each]) for each in others)
    failed = {each for each in others if job.ranks[each].after}
    odd = failed or (others if len(others) <= len(theirs) else set(theirs))
    what = "at the end of the program" if at_end else "elsewhere"
    waits = _verb(theirs, "waits", "wait")
    sentence = f"{rank_list(theirs)} {waits} in {main}; {rank_list(others)} {_verb(others)} {what}"
    kind = "ended" if at_end and (failed or odd == others) else "missing ranks"
    return Cause(kind, sentence, _unless_all(job, odd))


def _is_in_pickled(rank: Rank) -> bool:
    # A rank at the end may still have the line of its last call.
    return rank.state == "waits" and not is_leaving(rank) and _method(rank) in _PICKLED


def _of_windows(job: Job, ranks: set[int]) -> Cause | None:
    """Return the cause among calls of which only the communicator is known."""
    callers = {
        each
        for each in ranks
        for call in _calls(job.ranks[each])
        if any(wait is not None and wait.kind in ONE_OF_ALL for wait in call.waits)
    }
    if not callers or callers == ranks:
        return None
    first = job.ranks[min(callers)]
    others = ranks - callers
    at_end = all(_is_at_end(job.ranks[each]) for each in others)
    where = "at the end of the program" if at_end else "elsewhere"
    call = first.main_call or first.calls[0]
    sentence = (
        f"{rank_list(callers)} {_verb(callers, 'waits', 'wait')} in {title(call.function, first)}; "
        f"{rank_list(others)} {_verb(others)} {where}"
    )
    odd = others if len(others) < len(callers) else callers
    return Cause("missing ranks", sentence, _unless_all(job, odd))


def _of_messages(job: Job, ranks: set[int]) -> Cause | None:
    waits = [
        (job.ranks[each], wait)
        for each in sorted(ranks)
        for call in _calls(job.ranks[each])
        for wait in call.waits
        if wait is not None
        and (wait.kind in SENDS or wait.kind in RECEIVES or wait.kind == "sendrecv")
    ]
    if not waits:
        return None
    waiters = {rank.number for rank, _ in waits}
    at_end = {each for each in ranks - waiters if _is_at_end(job.ranks[each])}
    text = "; ".join(dict.fromkeys(_message(rank, wait) for rank, wait in waits[:3]))
    failed = {each for each in at_end if job.ranks[each].after}
    if at_end:
        sentence = f"{text}; {rank_list(at_end)} {_verb(at_end)} at the end of the program"
        kind = "ended" if failed else "unmatched message"
        return Cause(kind, sentence, _unless_all(job, failed or waiters))
    if ranks - waiters or _are_crossed(waits):
        odd = waiters if len(waiters) < len(ranks) else ()
        return Cause("unmatched message", text, _unless_all(job, odd))
    return Cause("cycle", text)


def _are_crossed(waits: Sequence[tuple[Rank, Wait]]) -> bool:
    """Return whether a rank sends to one that receives from it, which does not fit."""
    sends = [(r.number, w) for r, w in waits if w.kind in SENDS]
    receives = [(r.number, w) for r, w in waits if w.kind in RECEIVES]
    return any(
        sent.peer == receiver and wanted.peer in (sender, ANY)
        for sender, sent in sends
        for receiver, wanted in receives
    )


def _message(rank: Rank, wait: Wait) -> str:
    tag = "" if wait.tag == ANY else f", tag {wait.tag}"
    who = "any rank" if wait.peer == ANY else f"rank {wait.peer}"
    if wait.kind in RECEIVES:
        return f"rank {rank.number} waits for a message from {who}{tag}"
    return f"rank {rank.number} waits to send to {who}{tag}"


def busy_cause(job: Job, needs: dict[int, frozenset[int]]) -> Cause:
    """Return the cause where ranks wait for one that is outside MPI, or that polls."""
    wanted = set().union(*needs.values()) - needs.keys()
    for state, kind, what in (
        ("absent", "not started", "not started MPI"),
        ("polls", "polling", "not stopped polling"),
        ("outside", "busy", "not come out of its own code"),
    ):
        found = {each for each in wanted if job.ranks[each].state == state}
        if found:
            have = f"which {_verb(found, 'has', 'have')} {what}"
            sentence = (
                f"{rank_list(needs)} {_verb(needs, 'waits', 'wait')} for {rank_list(found)}, {have}"
            )
            return Cause(kind, sentence, _unless_all(job, found))
    return Cause("busy", f"{rank_list(needs)} do not go on")


def deaths_cause(dead: Sequence[Rank], size: int) -> Cause:
    """Return the cause where ranks have died."""
    where = "; ".join(f"rank {each.number} at {each.place}" for each in dead[:3])
    found = frozenset(each.number for each in dead)
    sentence = f"{where}: the process has ended without leaving MPI"
    return Cause("died", sentence, found if len(found) < size else frozenset())
