"""Closing of a channel: the errors after which its ranks agree on nothing more."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

from mpistrat.agreement.departures import (
    Departure,
    Departures,
    Peers,
    fork_error,
    repeated_error,
)
from mpistrat.agreement.ledger import Ledger, disagreement_error
from mpistrat.comm.pool import Pool
from mpistrat.comm.transport import Transport
from mpistrat.errors import CollectiveError
from mpistrat.system.callsite import call_site

_logger = logging.getLogger("mpistrat")

_PROOF_S = 3.0
"""How long a rank whose wait was ended waits to learn which other one has died."""
_POLL_S = 0.002


class ClosableChannel:
    """The part of `Channel` that ends the agreement of its ranks."""

    rank: int
    size: int
    ranks: Sequence[int]
    """What messages call its ranks: their numbers among all ranks of the strategy."""
    num_ranks_of_all: int
    """How many ranks these numbers are of."""
    ledger: Ledger
    pool: Pool
    departures: Departures
    peers: Peers | None
    stuck_at: str | None
    inside: str | None
    transport: Transport
    closed: RuntimeError | None
    closed_by: int | None
    on_failure: Any
    groups: dict[object, Any]
    ended_beside = False
    """Whether the agreement has ended because that of another group of its ranks has."""

    def place(self, rank: int | None = None) -> str:
        """Return what messages call `rank`, by default this one."""
        number = self.ranks[self.rank if rank is None else rank]
        return f"rank {number} of {self.num_ranks_of_all}"

    def names(self, ranks: Iterable[int]) -> list[int]:
        """Return what messages call these ranks."""
        return [self.ranks[rank] for rank in ranks]

    def check_open(self, owner: int | None = None) -> None:
        """Raise the error that closed this channel, if one did, as strategy `owner` gets it."""
        if self.closed is not None:
            own, self.departures.unreported = self.departures.unreported, None
            if own is not None and self.peers is not None:
                self.peers.report_departure(own, at_once=False)
            if not isinstance(self.closed, CollectiveError):  # freed
                raise type(self.closed)(str(self.closed)) from None
            raise repeated_error(self.closed, self.closed_by, owner) from None

    def check_complete(self, what: str) -> None:
        """Raise if a rank has left that the collective `what` needs."""
        if self.closed is None:
            self.closed = self.departures.error(what)
        self.check_open()

    def explain_loss(self, error: BaseException | None) -> None:
        """Close the channel and raise `CollectiveError` if a wait failed by a rank's death."""
        ranks = self.transport.lost_ranks(error)
        if ranks is None:
            return
        self.transport.revoke()  # the others may wait for this rank
        for rank in ranks:
            what = "gone" if self.peers is None else self.peers.describe_rank(rank)
            self.departures.found.setdefault(rank, Departure("ended", what))
        until = time.monotonic() + _PROOF_S
        while not self.departures.lost() and time.monotonic() < until:
            time.sleep(_POLL_S)  # another rank has left because of it, and this one learns why
        if self.closed is None:
            self.stuck_at = call_site()
            where = f"{self.inside or 'a collective'} at {self.stuck_at}"
            self.closed = self.departures.error(where) or CollectiveError(
                f"A rank has left {where} on {self.place()}, because another one has died."
            )
        self.check_open()

    def leave_interrupted(self, what: str, error: BaseException) -> None:
        """Close the channel, as `error` has interrupted this rank alone in `what`."""
        what = f"{what} at {call_site()} was interrupted by {type(error).__name__}"
        # After other exceptions the rank will end soon.
        self.leave_alone(f"The {what}", f"its {what}" if isinstance(error, Exception) else "")

    def leave_alone(self, what: str, reported: str) -> None:
        """Close the channel, and have waiting ranks learn what is `reported`, if anything."""
        self.stuck_at = call_site()
        self.closed = CollectiveError(f"{what} on {self.place()}.")
        if self.peers is not None and reported:
            self.peers.report_departure(Departure("left", reported))

    def disagreement(self, reports: Sequence[dict[str, Any]]) -> CollectiveError:
        """Close the channel, and return the error to raise for the `reports` of all ranks."""
        # After each round with `Outcome.MIXED`, every rank makes exactly one `exchange` of its
        # report, whatever it was about to do, so that they always meet.
        self.closed = disagreement_error(reports, self.rank, self.ranks)
        return self.closed

    def note_end(self, owner: int) -> None:
        """Call `on_failure` if the agreement of the ranks has ended, in a call of `owner`."""
        if isinstance(self.closed, CollectiveError):
            self.closed_by = owner if self.closed_by is None else self.closed_by
            if self.on_failure is not None:
                self.on_failure(self.closed)
            for group in list(self.groups.values()):
                group.close_beside(self.closed)

    def close_for_dropped(self, site: str) -> None:
        """Close the channel, as the handle of a reduction was dropped."""
        if self.closed is not None:
            return  # it may well be the consequence
        what = f"The handle that start_all_reduce at {site} returned was dropped without wait()"
        remedy = "Keep it, and call wait() on every rank."
        # There may be no further collective to raise it.
        _logger.error("%s. %s", what, remedy)
        # Reported by the next collective: a destructor may run where nothing can be sent.
        self.departures.unreported = Departure("left", what)
        self.closed = CollectiveError(f"{what} on {self.place()}. {remedy}")

    def close_in_fork(self) -> None:
        """Let this process, which is a fork of a rank, make no collectives."""
        # The rank will overwrite the shared memory of results that the program holds here too.
        self.pool.leave_shared_memory()
        self.closed = fork_error(self.rank, self.size)

    def note_failure(self, error: BaseException, site: str) -> None:
        """Record that a replica or merge function raised on this rank."""
        self.ledger.failures += 1
        self.ledger.last_failure = f"{type(error).__name__} at {site}"
        for channel in (self, *self.groups.values()):
            # Where the channel has ended with another one, the others learn why.
            if channel.peers is not None and not channel.ended_beside:
                channel.peers.report_failure()

    def close_beside(self, error: CollectiveError) -> None:
        """Close the channel, as another one of these ranks has ended with `error`."""
        if self.closed is None:
            self.closed, self.ended_beside = error, True
            if self.peers is not None:
                table = str(error).replace("\n", "\n    ")
                departure = Departure("left", f"its strategy has ended:\n    {table}")
                # Soon: a rank that ends because of the error says so in its last round.
                self.peers.report_departure(departure, at_once=False)
