"""Departures of ranks from a channel, and the protocol by which ranks report them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from mpistrat.errors import CollectiveError, CollectiveTimeoutError, ContextError
from mpistrat.system.text import rank_list, ranks_by_value


class Departure(NamedTuple):
    """The end of the collectives of one rank, as that rank or a different one reports it."""

    act: str
    """What the rank did, as a verb: a key of `_CAUSES`."""
    what: str
    waited_s: float | None = None
    """How long it had waited for other ranks, if it gave up because of that."""


class Peers(Protocol):
    """The other ranks of a channel, queried without MPI, from any thread."""

    def lowest_waiting(self) -> int:
        """Return the lowest rank that waits in the same collective as this one."""

    def describe(self, site: str) -> tuple[str, str]:
        """Return in words the ranks for which this one waits at `site`, and a table of all."""

    def describe_rank(self, rank: int) -> str:
        """Return in words where one rank is."""

    def offer_to_leave(self, site: str, departure: Departure) -> tuple[str, str] | None:
        """Do `describe`, and keep missing ranks from arriving; ``None`` if no rank is missing."""

    def report_failure(self) -> None:
        """Report to each other rank, with a delay, that a function has failed on this rank."""

    def report_departure(self, departure: Departure, at_once: bool = True) -> None:
        """Report to each waiting rank that this rank has left the channel.

        If not `at_once`, report with a delay, unless this rank ends before: its end says more.
        """

    def describe_lost(self) -> str:
        """Return a table of the ranks whose data will never arrive, empty if there are none."""

    def deliver(self, texts: Sequence[str]) -> bool:
        """Send lines for rank 0 to print, and return whether it accepted them."""

    def is_first_to_end(self) -> bool:
        """Return whether no lower rank has reached the end of the program."""

    def is_root_at_work(self) -> bool:
        """Return whether rank 0 is still finishing a file for all ranks."""

    def wait_for_work(self) -> None:
        """Wait until no rank is finishing a file that would be lost at the end of the job."""

    def leave(self) -> None:
        """End the watch over the ranks, when all of them close the channel."""

    def report_end_of_job(self, limit_s: float) -> None:
        """Report to each other rank, within `limit_s` seconds, that this one ends the job."""


class Overlap(NamedTuple):
    """A collective that was called while this rank was in another one."""

    error: ContextError
    """The error that the second call raised."""
    what: str
    site: str


class Failure(NamedTuple):
    """A replica or merge function that raised on one rank, which may have caught the error."""

    number: int
    """Number of collectives that the rank had reached."""
    failures: int
    """How many functions have failed there since the start: see `Ledger`."""
    what: str


class Departures:
    """What a rank knows of other ranks that have left or failed, recorded from any thread."""

    def __init__(self, ranks: Sequence[int] = ()) -> None:
        self.ranks = ranks
        """Names of the channel's ranks in messages."""
        self.found: dict[int, Departure] = {}
        """Departures of the ranks that will never arrive."""
        self.failures: dict[int, Failure] = {}
        """The last failure of each rank."""
        self.unreported: Departure | None = None
        """The departure of this rank, until a collective can report it."""
        self.listener: Callable[[int], object] = bool
        """Called with a rank whose process has died, with a delay, from any thread."""
        self._lock = threading.Lock()
        """Held while an offer is checked, which may be removed from `found` again."""

    def offer(self, rank: int, departure: Departure, has_come: Callable[[], bool]) -> bool:
        """Record that `rank` leaves unless this rank `has_come`, and return whether it has."""
        with self._lock:
            # The order matters. `Channel.vote` counts its collective first and looks at `found`
            # second; here the departure is noted first and the count is checked second. So at least
            # one side sees the other. If both looked first, this rank could wait for a rank that
            # has given up on it.
            known = self.found.setdefault(rank, departure)
            comes = has_come()
            # An earlier departure of that rank is final, whatever this rank has counted since.
            if comes and known is departure:
                del self.found[rank]
        return comes

    def error(self, where: str) -> CollectiveError | None:
        """Return the error of this rank, which is `where`, if a different rank has left."""
        with self._lock:
            found = {self._name(rank): each for rank, each in self.found.items()}
            return departure_error(found, where) if found else None

    def _name(self, rank: int) -> int:
        return self.ranks[rank] if self.ranks else rank

    def lost(self) -> dict[int, str]:
        """Return the ranks whose processes have died, each with a description."""
        # A copy: the thread of the monitor may add a rank during the loop, and a dict that grows
        # meanwhile raises RuntimeError.
        return {rank: each.what for rank, each in list(self.found.items()) if each.act == "ended"}

    def waited_s(self) -> float | None:
        """Return how long a rank had waited when it gave up, if one has."""
        with self._lock:
            return next((each.waited_s for each in self.found.values() if each.waited_s), None)

    def failed_before(self, number: int, failures: int) -> dict[int, Departure]:
        """Return the ranks whose failures keep them from matching collective `number`."""
        # The counts only rise, and ranks with different counts do not agree.
        return {
            self._name(rank): Departure("failed", each.what)
            for rank, each in self.failures.items()
            if each.number < number and each.failures > failures
        }


_CAUSES = {"ended": False, "gave up": False, "left": True, "failed": True}
"""Whether a rank that has left reports the cause itself. A rank that died cannot; if it gave up,
this rank is the cause."""


def departure_error(departures: Mapping[int, Departure], where: str) -> CollectiveError:
    """Return the error of a rank that is `where`, for the `departures` of other ranks."""
    first = next(iter(departures.values()))
    alike = [rank for rank, each in departures.items() if each.act == first.act]
    groups = ranks_by_value((rank, each.what) for rank, each in departures.items())
    table = "\n".join(f"  {rank_list(ranks)}: {what}" for what, ranks in groups.items())
    text = f"{rank_list(alike)} {first.act}, so {where} can never complete:\n{table}"
    if first.waited_s is None:
        error = CollectiveError(text)
    else:
        error = CollectiveTimeoutError(
            f"{text}\nThis rank came too late. Make a new strategy on every rank, or raise "
            "timeout_seconds if it is only slow."
        )
    error._caused_elsewhere = _CAUSES[first.act]
    return error


def timeout_error(
    who: str, table: str, what: str, site: str, waited_s: float, place: str
) -> CollectiveTimeoutError:
    """Return the error of a rank that has waited for `who`; `table` says where all ranks are."""
    return CollectiveTimeoutError(
        f"{who} did not come to {what} at {site} within the timeout of {waited_s:g} s, as "
        f"{place} did:\n{table}\n"
        "This call is collective: every rank must make it. Look for a rank that skips it, or raise "
        "timeout_seconds if one is only slow."
    )


def fork_error(rank: int, size: int) -> CollectiveError:
    """Return the error of a process that was forked from `rank`."""
    return CollectiveError(
        f"This process is a fork of rank {rank} of {size}, not a rank. Make collective "
        "calls in the process that it was forked from."
    )


def repeated_error(
    closed: CollectiveError, closed_by: int | None, owner: int | None
) -> CollectiveError:
    """Return the error that closed a channel in a call of `closed_by`, for a call of `owner`."""
    text = str(closed)
    if None not in (closed_by, owner) and closed_by != owner:
        text = (
            f"Strategy {owner} is closed, because strategy {closed_by} is, on the same "
            "communicator. They share one sequence of collectives, and are numbered in the order "
            "in which they were made. Make new ones. "
            f"The error of strategy {closed_by} was:\n{text}"
        )
    again = type(closed)(text)
    again._caused_elsewhere = closed._caused_elsewhere
    return again
