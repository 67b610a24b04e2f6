"""Judgement: which ranks can never go on.

A rank that waits needs one rank of each of some sets. Ranks outside MPI may always go on; a rank
that waits may go on if each of its sets holds one that may. What is left can never go on.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mpistrat.watch.rank_links import (
    ANY,
    COLLECTIVES,
    NOBODY,
    RECEIVES,
    SENDS,
    Call,
    Made,
    Rank,
    Wait,
)

Sets = list[frozenset[int]]
"""Sets of ranks, one rank of each of which is needed. Without a set, nothing is needed."""

_FREE: Sets = []
_STANDS_S = 1.5
"""A rank that has changed since may go on."""
ONE_OF_ALL = ("make group", "free", "window", "window group")
"""Classes of calls of which only the communicator is known: they may need any other rank."""
_NEEDS_NOTHING = ("local", "abort", "outside", "start", "request free", "ready")
_NEVER = ("ended", "dead", "killed", "stopped")


@dataclass
class Job:
    """All ranks of a job, and the members of their communicators."""

    ranks: list[Rank]
    members: dict[str, frozenset[int]]
    """World ranks, by the key of a communicator."""
    _found: dict[tuple[str, int, Made | None], list[int]] = field(default_factory=dict)

    def needs(self, rank: Rank) -> list[Sets]:
        """Return what each call of a rank needs. One that gets it lets the rank go on."""
        return [self._needs_of(rank, call) for call in rank.calls]

    def _needs_of(self, rank: Rank, call: Call) -> Sets:
        if call.kind in _NEEDS_NOTHING:
            return _FREE
        if call.kind == "init":
            return [
                frozenset({each.number})
                for each in self._others(rank)
                if not each.in_world and not _is_in(each, "init")
            ]
        if call.kind == "finalize":
            return [
                frozenset({each.number})
                for each in self._others(rank)
                if each.left is None and not _is_in(each, "finalize")
            ]
        if any(each is None for each in call.waits):
            return _FREE
        each_needs = [self._needs_of_wait(rank, each) for each in call.waits if each is not None]
        if not each_needs:  # all requests are null, or persistent and not started
            return _FREE
        if len(each_needs) == 1:
            return each_needs[0]
        # Some of several requests may be complete, so their peers are not needed any more. Which,
        # nobody can see from outside: the rank is held up only if none of all peers may go on.
        if not all(each_needs):
            return _FREE
        return [frozenset().union(*(one for sets in each_needs for one in sets))]

    def _others(self, rank: Rank) -> Iterable[Rank]:
        return (each for each in self.ranks if each is not rank)

    def _needs_of_wait(self, rank: Rank, wait: Wait) -> Sets:
        # What is not known must never be a reason to end a job.
        if wait.group is None or wait.group not in self.members:
            return _FREE
        others = self.members[wait.group] - {rank.number}
        if wait.is_open:  # only this rank itself can fill the partitions
            return [frozenset({rank.number})]
        if wait.kind in SENDS or wait.kind in RECEIVES:
            return self._needs_of_message(rank, wait, wait.kind in SENDS, wait.peer, wait.tag)
        if wait.kind == "sendrecv":
            sent = self._needs_of_message(rank, wait, True, wait.peer, wait.tag)
            received = self._needs_of_message(rank, wait, False, wait.peer2, wait.tag2)
            # Nobody can see from outside which half is complete, so any of the peers may let the
            # rank continue.
            parts = [*sent, *received]
            return [frozenset().union(*parts)] if parts else _FREE
        if wait.kind in COLLECTIVES and wait.number > 0:
            return [frozenset({m}) for m in self._missing(rank, wait) if m != rank.number]
        if wait.kind in ONE_OF_ALL:
            return [others] if others else _FREE
        return _FREE

    def _needs_of_message(self, rank: Rank, wait: Wait, is_sent: bool, peer: int, tag: int) -> Sets:
        if peer == NOBODY:
            return _FREE
        assert wait.group is not None
        peers = self.members[wait.group] - {rank.number} if peer == ANY else frozenset({peer})
        if any(self._has_other_end(rank, wait.group, is_sent, each, tag) for each in peers):
            return _FREE
        return [peers]

    def _has_other_end(self, rank: Rank, group: str, is_sent: bool, peer: int, tag: int) -> bool:
        """Return whether `peer` has a send or receive that fits: then the library is at work."""
        other = self.ranks[peer]
        waits = [one for call in other.calls for one in call.waits if one is not None]
        for each in (*waits, *other.pending):
            if each.group != group or each.is_open:
                continue
            ends = []
            if each.kind in (RECEIVES if is_sent else SENDS):
                ends.append((each.peer, each.tag))
            elif each.kind == "sendrecv":
                ends.append((each.peer2, each.tag2) if is_sent else (each.peer, each.tag))
            if any(
                of in (rank.number, ANY) and (tag == own or ANY in (tag, own)) for of, own in ends
            ):
                return True
        return False

    def _missing(self, rank: Rank, wait: Wait) -> list[int]:
        """Return the members that have not made the collective for which `rank` waits."""
        assert wait.group is not None
        own = rank.history_of(wait.group)
        call = (wait.group, wait.number, own.last.get(wait.number) if own else None)
        if call not in self._found:  # the same for all ranks that wait there
            self._found[call] = [
                each
                for each in sorted(self.members[wait.group])
                if not self.has_made(each, rank, wait)
            ]
        return self._found[call]

    def has_made(self, member: int, rank: Rank, wait: Wait) -> bool:
        """Return whether a member has made the collective for which `rank` waits, and the same."""
        assert wait.group is not None
        theirs = self.ranks[member].history_of(wait.group)
        if theirs is None or theirs.made < wait.number:
            return False
        own = rank.history_of(wait.group)
        mine = own.last.get(wait.number) if own else None
        made = theirs.last.get(wait.number)
        # Only the last collectives are known. An older one counts as equal, because a wrong guess
        # would end a job that works.
        return mine is None or made is None or mine.differs(made) is None

    def stuck(self, now_s: float) -> dict[int, frozenset[int]]:
        """Return the ranks that wait and can never go on, and for each those that it needs."""
        may_go = {
            each.number
            for each in self.ranks
            if each.state not in (*_NEVER, "waits")
            or (each.state == "waits" and now_s - each.changed_s < _STANDS_S)
        }
        waiting = {
            each.number: self.needs(each)
            for each in self.ranks
            if each.state == "waits" and each.number not in may_go
        }
        return _held_up(waiting, may_go)

    def held_up_by_busy(self, now_s: float) -> dict[int, frozenset[int]]:
        """Return the same where ranks outside MPI, and those that poll, never go on either."""
        may_go = {each.number for each in self.ranks if now_s - each.changed_s < _STANDS_S}
        may_go -= {each.number for each in self.ranks if each.state in _NEVER}
        waiting = {
            each.number: self.needs(each)
            for each in self.ranks
            if each.state == "waits" and each.number not in may_go
        }
        return _held_up(waiting, may_go)


def _held_up(waiting: Mapping[int, list[Sets]], may_go: set[int]) -> dict[int, frozenset[int]]:
    left = dict(waiting)
    while True:
        going = {
            rank
            for rank, calls in left.items()
            if any(all(one & may_go for one in sets) for sets in calls)
        }
        if not going:
            break
        may_go = may_go | going
        left = {rank: calls for rank, calls in left.items() if rank not in going}
    return {
        rank: frozenset().union(*(one for sets in calls for one in sets if not one & may_go))
        for rank, calls in left.items()
    }


def core(needs: Mapping[int, frozenset[int]]) -> set[int]:
    """Return the ranks that wait only for one another, or never go on by themselves."""
    # Most ranks need the same ones.
    of_needs = {each: _reached_from(each, needs) for each in set(needs.values())}
    reached = {rank: of_needs[each] for rank, each in needs.items()}
    found: set[int] = set()
    for rank, reach in reached.items():
        # A rank is in a last component if all that it reaches reach it, too.
        if all(rank in reached.get(each, {each}) for each in reach):
            found |= {rank}
        found |= {each for each in reach if each not in needs}
    return found


def _reached_from(ranks: frozenset[int], needs: Mapping[int, frozenset[int]]) -> set[int]:
    reach, waiting = set(ranks), list(ranks)
    while waiting:
        more = needs.get(waiting.pop(), frozenset()) - reach
        reach |= more
        waiting += more
    return reach


def _is_in(rank: Rank, kind: str) -> bool:
    return any(call.kind == kind for call in rank.calls)
