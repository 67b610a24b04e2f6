"""Channel: one group of ranks, their sequence of collectives, and its agreement.

Before each collective the ranks compare their calls in a *round*: one MAX reduction of four
integers. It shows whether all have contributed the same digest, and whether some rank has
contributed a refusal (its arguments are bad) or its end (it left the program) instead. A rank that
leaves takes part in one last round, so that no rank waits for it forever.
"""

from __future__ import annotations

import json
import logging
import math
import struct
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from mpistrat.agreement.departures import (
    Departure,
    Departures,
    Overlap,
    Peers,
    departure_error,
    fork_error,
    repeated_error,
    timeout_error,
)
from mpistrat.agreement.disagreement import disagreement_error
from mpistrat.agreement.ledger import Ledger, Outcome, Status, call_name
from mpistrat.comm.pool import Pool
from mpistrat.comm.transport import RowReducer, Transport
from mpistrat.errors import CollectiveError, ContextError
from mpistrat.settings import settings_at_the_end
from mpistrat.system.callsite import call_site
from mpistrat.tracing.flight_recorder import FlightRecord

_logger = logging.getLogger("mpistrat")

_MASK = 2**64 - 1
# The status, its complement, the digest and its complement. The largest complement of all ranks is
# the complement of the smallest value, so one MAX shows whether all values are equal.
_VALUES = struct.Struct("=4Q")

_SECOND_LIMIT_S = 5.0
"""How long a rank waits beyond its limit for a round that all ranks have reached."""

_POLL_S = 0.0002

_ALL_EQUAL = 2
_CALL, _ALL_CALL = Status.CALL, Outcome.ALL_CALL
"""Names of the module are faster to look up than class members, in each collective."""


_PROOF_S, _PROOF_POLL_S = 3.0, 0.002
"""How long, and how often, a rank whose wait was ended looks for the rank that has died."""


class Channel:
    """The agreement of the ranks of one transport."""

    shares_memory = False
    """Whether arrays of other ranks of the group may be in the memory of this process."""
    ended_beside = False
    """Whether the agreement has ended because a different group of its ranks has ended."""

    def __init__(self, transport: Transport, timeout_s: float | None) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.ranks: Sequence[int] = range(transport.size)
        """Names of its ranks in messages: their numbers among all ranks of the strategy."""
        self.num_ranks_of_all = transport.size
        """Number of all ranks of the strategy."""
        self.timeout_s = timeout_s
        """How long to wait for missing ranks, if a call has no limit itself."""
        self.ledger = Ledger()
        self.flight = FlightRecord()
        self.closed: RuntimeError | None = None
        """The error that has permanently ended the agreement of the ranks."""
        self.closed_by: int | None = None
        """The number of the strategy whose call raised it."""
        self.pending = False
        """Whether a round was started and is not complete."""
        # Reentrant, so that the kind of overlap can be named: a signal handler on the thread that
        # is in a collective can acquire the lock again, a second thread cannot. A plain lock fails
        # for both.
        self.lock = threading.RLock()
        """Held by the thread that is in a collective."""
        self.inside: str | None = None
        """The kind of that collective."""
        self.overlap: Overlap | None = None
        """A collective called meanwhile, which other ranks do not know of yet."""
        self.running: Callable[[], tuple[int, str] | None] = lambda: None
        """Returns the thread of the replica that runs now, and the name of the call, if any."""
        self.is_tolerant = False
        """Whether a test has shown that the ranks survive the death of one."""
        self.is_revoked: Callable[[], bool] = bool
        """Returns whether a rank of the program has revoked its communicator."""
        self.num_strategies = 0
        """How many strategies have shared the channel."""
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        """Collectives of the strategies that share the channel now."""
        self.on_free: Callable[[], None] | None = None
        """Removes everything that watches the channel, before its transport is closed."""
        self.checks = True
        """Whether the ranks compare their calls before data is moved."""
        self.on_collective: Callable[[int], None] | None = None
        """Called with the number of each collective, from 1, before this rank reaches it."""
        self.on_received: Callable[[Any], None] | None = None
        """Called with each array that a collective has returned; it may write to the array."""
        self.on_failure: Callable[[CollectiveError], object] | None = None
        """Called with the error `closed` when a collective has ended with it."""
        self.peers: Peers | None = None
        """The other ranks on the side channel, if there is one."""
        self.departures = Departures(self.ranks)
        """Other ranks that will reach no further collective."""
        self.reports: list[dict[str, Any]] = []
        """Reports of the ranks, if their replicas disagree."""
        self.stuck_at: str | None = None
        """Line where this rank stopped waiting in a round, which is still open."""
        self.is_reported = False
        """Whether a different rank ends the job and has said why."""
        self.waiting: tuple[str, float] | None = None
        """The collective in which this rank waits for other ranks, and since when."""
        self.wait_limit_s: float | None = None
        """The time limit of that wait."""
        self.identity = ""
        """Name of the channel that is the same on all its ranks, for `mpistrat watch`."""
        self.thread = threading.get_ident()
        """Identifier of the last thread that has waited in a collective."""
        self.groups: dict[object, Any] = {}
        """Channels of some of these ranks; they end with this channel."""
        self.pool = transport.pool
        self.private_pool = Pool()
        """Memory for results that no other rank maps, unlike the transport's `pool`."""
        self.row_reducer: RowReducer | None = None
        """Reduces the arrays of this rank's replicas together, if it has several."""
        self.row: Any = None
        """Arrays of this replica, to reduce as soon as the next vote has agreed."""
        self._departed = self.departures.found
        # One round for all collectives, so that a persistent request of MPI is prepared only once.
        self._round = transport.round(4)
        self.meet: Callable[[int, int], int] | None = self._round.meet
        """Takes part in a round for `vote`, if one rank is one replica."""
        # The same memory as bytes: struct writes four numbers faster than NumPy assigns them.
        self._outgoing = self._round.send.data.cast("B")
        self._incoming = self._round.receive.data.cast("B")

    def is_moving_data(self) -> bool:
        """Return whether this rank waits for data inside the transport, from any thread."""
        return bool(self.transport.occupancy)

    def enter(self, kind: str) -> bool:
        """Begin a collective, and return False if this rank is already in one."""
        # Not blocking: two threads that waited here for each other would make their collectives in
        # different orders on different ranks.
        if not self.lock.acquire(False):
            return False
        if self.inside is not None:  # on this thread: the lock is reentrant
            self.lock.release()
            return False
        self.inside = kind
        return True

    def leave(self) -> None:
        """End the collective that `enter` began."""
        # First, because a second thread may enter after the release, and this line would clear its
        # `inside`.
        self.inside = None
        self.lock.release()

    def start_round(self, status: Status, digest: int) -> None:
        """Contribute `status` and `digest` to the next round."""
        _VALUES.pack_into(self._outgoing, 0, status, _MASK - status, digest, _MASK - digest)
        self._round.start()
        self.pending = True

    def round_is_done(self) -> bool:
        """Return whether every rank has reached the round that was started."""
        if self.pending and self._round.done():
            self.pending = False
        return not self.pending

    def outcome(self) -> Outcome:
        """Return the result of the completed round."""
        largest, smallest, digest, complement = _VALUES.unpack_from(self._incoming)
        if largest != _MASK - smallest or digest != _MASK - complement or largest == Status.END:
            return Outcome.MIXED
        return Outcome.ALL_CALL if largest == Status.CALL else Outcome.ALL_REFUSE

    def all_come(self, limit_ns: int) -> bool:
        """Announce that this rank reaches its next collective; return whether all do in time."""
        return self.closed is None and self._round.expect(limit_ns, self.ledger.sequence + 1)

    def all_ended_well(self) -> bool:
        """Return whether every rank contributed its end, with digest 0, to the round."""
        _, smallest, digest, _ = self._round.receive.tolist()
        return bool(_MASK - smallest == Status.END and digest == 0)

    def all_ended(self) -> bool:
        """Return whether every rank contributed its end to the completed round."""
        return bool(_MASK - self._round.receive.tolist()[1] == Status.END)

    def vote(
        self, status: Status, signature: object, timeout_s: float | None, extra: int = 0
    ) -> Outcome:
        """Take part in a round and wait for it. **Collective**."""
        # The ranks must also agree on `extra`. It is not in `signature`, whose digest is kept. The
        # collective is counted before departures are checked: see `MonitorClient.handlers`.
        if self.on_collective is not None:
            self.on_collective(self.ledger.sequence + 1)
        ledger = self.ledger
        digest = ledger.digest(signature) ^ extra
        ledger.sequence += 1
        if self._departed:
            self.check_departed(signature)
        # Set before this rank contributes: an exception of a signal handler may leave `meet` at any
        # time, and the last round must then know that this round is still open.
        self.pending = True
        try:
            known = self._round.meet(status, digest)
            if known != _ALL_EQUAL or status is not _CALL:
                return self.end_round(known, signature, timeout_s)
        except BaseException as error:
            self.leave_round(call_name(signature), error)
            raise
        self.pending = False
        return _ALL_CALL

    def vote_with(self, row: Any, timeout_s: float | None, extra: int) -> Outcome:
        """Vote for the reduction of a `Row`, on a rank with several replicas. **Collective**."""
        raise AssertionError("a rank with one replica has no rows")

    def reduce_row(self, row: Any) -> None:
        """Reduce a `Row` together with the rows of this rank's other replicas. **Collective**."""
        raise AssertionError("a rank with one replica has no rows")

    def check_departed(self, signature: object) -> None:
        """Raise if the call with this `signature` needs a rank that has left."""
        if self._departed:
            self.check_complete(f"{call_name(signature)} at {call_site()}")

    def end_round(self, known: int, signature: object, timeout_s: float | None) -> Outcome:
        """Wait for late ranks, if nothing is `known`, and return the outcome. **Collective**."""
        if not known:
            self._wait(signature, timeout_s)
        self.pending = False
        return self.outcome()

    def leave_round(self, what: str, error: BaseException) -> None:
        """Close the channel, because the round stays open and the ranks can no longer agree."""
        # Withdrawn first: otherwise, in shared memory, a rank that arrives later would find that
        # all have arrived, and wait for data that this rank never sends.
        self._round.withdraw()
        self.explain_loss(error)
        if self.closed is not None:
            # No request of a collective can be cancelled (MPI 4.1, section 6.12), so a further
            # round would be matched with this one. `stuck_at` prevents the end of the program from
            # starting one.
            self.stuck_at = call_site()
            return
        self.leave_interrupted(f"wait for {what}", error)

    def _wait(self, signature: object, timeout_s: float | None) -> None:
        """Wait for late ranks."""
        self.thread = threading.get_ident()
        self.wait_limit_s = timeout_s
        self.waiting = (call_name(signature), time.monotonic())
        try:
            while not self._wait_uninterrupted(*self.waiting, timeout_s):
                pass
        finally:
            self.waiting = None

    def _wait_uninterrupted(self, what: str, began: float, timeout_s: float | None) -> bool:
        """Wait; return False if a signal handler interrupted the wait by calling a collective."""
        try:
            self._wait_long(what, began, timeout_s)
        except ContextError as error:
            # Other ranks may have completed this round, so this rank must end it before it reports.
            if self.overlap is None or error is not self.overlap.error:
                raise
            return False
        return True

    def _wait_long(self, what: str, began: float, timeout_s: float | None) -> None:
        done = self._round.done
        remind_at_s: float | None = None
        limit_s = math.inf if timeout_s is None else timeout_s
        # MPI moves messages only while it is called, so this loop must keep polling.
        while not done():
            waited_s = time.monotonic() - began
            if self._departed:
                self._check_departed(what)
            self.check_open()  # a different thread may have closed it
            if self.departures.failures:
                self._check_failures(what)
            if timeout_s is not None and waited_s > limit_s:
                # A limit above the call's own limit has been set below: this is the second time.
                self.give_up(what, timeout_s, is_last=limit_s > timeout_s)
                # Every other rank has counted this collective, so the round should end soon. But a
                # rank may be stopped between counting and sending: after the second limit this rank
                # leaves in any case.
                limit_s = waited_s + _SECOND_LIMIT_S
            if remind_at_s is None:
                # Not earlier: most waits are shorter than reading the settings.
                remind_at_s = settings_at_the_end().wait_notice_s if waited_s > 0.01 else None
            elif waited_s > remind_at_s:
                remind_at_s = math.inf
                self._remind(what, waited_s)
            self._round.rest(waited_s)

    def _check_departed(self, what: str) -> None:
        """Raise, while waiting, if a rank has left."""
        waited_s = self.departures.waited_s()
        if waited_s is not None:  # a different rank waited for the same ranks and gave up
            self.give_up(what, waited_s, is_last=True)
        self.check_complete(f"{what} at {call_site()}")

    def _check_failures(self, what: str) -> None:
        """Raise, while waiting, if a function has failed on a rank for which this one waits."""
        failed = self.departures.failed_before(self.ledger.sequence, self.ledger.failures)
        if failed:
            site = call_site()
            whom = ", ".join(f"rank {rank} ({each.what})" for rank, each in failed.items())
            departure = Departure("gave up", f"waited in {what} at {site} for {whom}")
            self._leave(departure, lambda *_: departure_error(failed, f"{what} at {site}"))

    def give_up(self, what: str, waited_s: float, is_last: bool) -> None:
        """Raise because of missing ranks; return if all have arrived, unless it `is_last`."""
        site = call_site()
        departure = Departure("gave up", f"waited {waited_s:g} s in {what} at {site}", waited_s)

        def error(who: str, table: str) -> CollectiveError | None:
            if not who and self._departed:
                return None  # this rank was late itself, after the others had given up
            who = who or "Some ranks"  # all have arrived just now
            return timeout_error(who, table, what, site, waited_s, self.place())

        self._leave(departure, error, site, is_last)

    def _leave(
        self,
        departure: Departure,
        error: Callable[[str, str], CollectiveError | None],
        site: str = "",
        is_last: bool = False,
    ) -> None:
        """Leave the round with the `error` for the missing ranks and a table of all, if any."""
        if self.peers is None:
            self.closed = error(*self._missing_ranks(site))
        # One message both asks and announces. With two messages, a rank could arrive in between:
        # this rank would leave anyway, and that rank would wait forever.
        elif (missing := self.peers.offer_to_leave(site, departure)) or is_last:
            self.closed = error(*(missing or self._missing_ranks(site)))
            if self.closed is not None:
                self.peers.report_departure(departure)
        self.check_open()  # without an error all have arrived, and the round ends soon

    def _remind(self, what: str, waited_s: float) -> None:
        """Log the missing ranks, once for all ranks that wait."""
        if self.peers is None or self.peers.lowest_waiting() == self.rank:
            site = call_site()
            missing, table = self._missing_ranks(site)
            _logger.warning(
                "%s has waited for %.0f s in %s at %s. %s did not come yet:\n%s",
                *(self.place(), waited_s, what, site),
                *(missing or "Some ranks", table),
            )

    def _missing_ranks(self, site: str) -> tuple[str, str]:
        """Return the missing ranks as text, and a table of where each rank is."""
        if self.peers is None:
            return "", "  (there is no side channel to ask them)"
        return self.peers.describe(site)

    def exchange(self, value: Any) -> list[Any]:
        """Return the JSON `value` of every rank, in rank order. **Collective**, unchecked."""
        # MPI needs the length of each part before the parts (Allgatherv), so the lengths are sent
        # first.
        own = _json_item(value)
        lengths = self.transport.all_gather(np.array([own.size], np.int64), [1] * self.size)
        return _json_items(self.transport.all_gather(own, lengths.tolist()))

    def barrier(self) -> None:
        """Wait for all ranks. **Collective**, unchecked."""
        self.transport.all_gather(np.zeros(1, np.uint8), [1] * self.size)

    def start_exchange(self, value: Any) -> Callable[[], list[Any] | None]:
        """Begin an exchange; the returned function returns ``None`` until all values arrive."""
        own = _json_item(value)
        transport, counts = self.transport, [1] * self.size
        # Nonblocking, because a rank that ends polls the exchanges of several channels in turn.
        poll = transport.start_all_gather(np.array([own.size], np.int64), counts)
        lengths: list[int] | None = None

        def values() -> list[Any] | None:
            nonlocal lengths, poll
            found = poll()
            if found is None:
                return None
            if lengths is None:
                lengths = found.tolist()
                poll = transport.start_all_gather(own, lengths)
                return values()
            return _json_items(found)

        return values

    def exchange_reports(self, report: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the report of every rank after a round with `Outcome.MIXED`. **Collective**."""
        # A rank that ends is in the last rounds of several channels, each of different ranks. It
        # must not wait in one of them for ranks that wait for it in another. No limit of an
        # agreement applies here. `occupancy` makes the watchdog look, in case a rank stops before
        # it has sent its report.
        with self.transport.occupancy:
            try:
                poll = self.start_exchange(report)
                while (reports := poll()) is None:
                    time.sleep(_POLL_S)
            except BaseException as error:  # from a signal handler: other ranks wait for this one
                if self.closed is None:
                    self.leave_interrupted("exchange of reports", error)
                raise
        return reports

    def report(
        self, what: str, site: str, *, ended: bool = False, cause: bool = False
    ) -> dict[str, Any]:
        """Return the report of this rank, for ranks that disagree."""
        report = {"what": what, "site": site, "ended": ended, "cause": cause}
        return report | {"sequence": self.ledger.sequence} | self.ledger.as_json()

    def describe(self) -> dict[str, Any]:
        """Return the facts about this channel for a flight record, without its collectives."""
        place = {"rank": self.rank, "size": self.size, "next_number": self.ledger.sequence}
        return place | self.ledger.as_json() | {"closed": self.closed and str(self.closed)}

    def free(self) -> None:
        """Free the communicator, and everything that belongs to the channel. **Collective**."""
        self.closed = RuntimeError("Every strategy on this communicator was closed.")
        # Before the watch ends: a rank may die during this wait.
        self.transport.drain()
        if self.on_free is not None:
            self.on_free()
        # Reference cycles with this object would keep the memory until a garbage collection.
        self.on_free = self.peers = None
        self.transport.close()

    def place(self, rank: int | None = None) -> str:
        """Return the name of `rank` in messages, by default of this rank."""
        number = self.ranks[self.rank if rank is None else rank]
        return f"rank {number} of {self.num_ranks_of_all}"

    def names(self, ranks: Iterable[int]) -> list[int]:
        """Return the numbers of these ranks in messages."""
        return [self.ranks[rank] for rank in ranks]

    def check_open(self, owner: int | None = None) -> None:
        """Raise the error that closed this channel, if any, in the form for strategy `owner`."""
        if self.closed is not None:
            # Set by `close_for_dropped`, which runs in a destructor and cannot send.
            own, self.departures.unreported = self.departures.unreported, None
            if own is not None and self.peers is not None:
                self.peers.report_departure(own, at_once=False)
            if not isinstance(self.closed, CollectiveError):  # freed
                raise type(self.closed)(str(self.closed)) from None
            # A new error each time: Python appends to the traceback of an error that is raised
            # again, and several threads may raise it.
            raise repeated_error(self.closed, self.closed_by, owner) from None

    def check_complete(self, what: str) -> None:
        """Raise if the collective `what` needs a rank that has left."""
        if self.closed is None:
            # Waits for an offer that is being checked. The error is None if the offer is withdrawn:
            # this rank has arrived in time.
            self.closed = self.departures.error(what)
        self.check_open()

    def explain_loss(self, error: BaseException | None) -> None:
        """Close the channel and raise `CollectiveError` if a wait failed because a rank died."""
        ranks = self.transport.lost_ranks(error)
        if ranks is None:
            return
        self.transport.revoke()  # other ranks may wait for this one
        # An earlier report of a monitor is more precise than this one, and stays.
        for rank in ranks:
            what = "gone" if self.peers is None else self.peers.describe_rank(rank)
            self.departures.found.setdefault(rank, Departure("ended", what))
        until = time.monotonic() + _PROOF_S
        while not self.departures.lost() and time.monotonic() < until:
            # A different rank has left because of the death, and this rank waits to learn why.
            time.sleep(_PROOF_POLL_S)
        if self.closed is None:
            self.stuck_at = call_site()
            where = f"{self.inside or 'a collective'} at {self.stuck_at}"
            self.closed = self.departures.error(where) or CollectiveError(
                f"A rank has left {where} on {self.place()}, because another one has died."
            )
        self.check_open()

    def leave_interrupted(self, what: str, error: BaseException) -> None:
        """Close the channel, because `error` has interrupted only this rank in `what`."""
        what = f"{what} at {call_site()} was interrupted by {type(error).__name__}"
        # After other exceptions the rank will end soon.
        self.leave_alone(f"The {what}", f"its {what}" if isinstance(error, Exception) else "")

    def leave_alone(self, what: str, reported: str, is_in_round: bool = True) -> None:
        """Close the channel, and tell waiting ranks what is `reported`, if anything.

        Unless this rank `is_in_round`, it still ends together with the others.
        """
        if is_in_round:
            self.stuck_at = call_site()
        self.closed = CollectiveError(f"{what} on {self.place()}.")
        if self.peers is not None and reported:
            self.peers.report_departure(Departure("left", reported))

    def disagreement(self, reports: Sequence[dict[str, Any]]) -> CollectiveError:
        """Close the channel, and return the error to raise for the `reports` of all ranks."""
        # After each round with `Outcome.MIXED`, every rank makes exactly one `exchange` of its
        # report, whatever it was about to do, so that these exchanges always match.
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
        """Close the channel, because the handle of a reduction was dropped."""
        if self.closed is not None:
            return  # the drop may be a consequence of the closing
        what = f"The handle that start_all_reduce at {site} returned was dropped without wait()"
        remedy = "Keep it, and call wait() on every rank."
        # Logged too, in case no later collective raises it.
        _logger.error("%s. %s", what, remedy)
        # Reported by the next collective: a destructor may run where nothing can be sent.
        self.departures.unreported = Departure("left", what)
        self.closed = CollectiveError(f"{what} on {self.place()}. {remedy}")

    def close_in_fork(self) -> None:
        """Close the channel in this process, which is a fork of a rank."""
        # The rank will overwrite the shared memory of results that this process holds too.
        self.pool.leave_shared_memory()
        self.closed = fork_error(self.rank, self.size)

    def note_failure(self, error: BaseException, site: str) -> None:
        """Record that a replica or merge function raised on this rank."""
        self.ledger.failures += 1
        self.ledger.last_failure = f"{type(error).__name__} at {site}"
        for channel in (self, *self.groups.values()):
            # If the channel has ended together with a different one, that one tells the other ranks
            # why.
            if channel.peers is not None and not channel.ended_beside:
                channel.peers.report_failure()

    def close_beside(self, error: CollectiveError) -> None:
        """Close the channel, because a different channel of these ranks has ended with `error`."""
        if self.closed is None:
            self.closed, self.ended_beside = error, True
            if self.peers is not None:
                table = str(error).replace("\n", "\n    ")
                departure = Departure("left", f"its strategy has ended:\n    {table}")
                # Not at once: a rank that ends because of the error reports that in its last round.
                self.peers.report_departure(departure, at_once=False)


def _json_item(value: Any) -> np.ndarray:
    """Return the bytes of one JSON value, which are joined with the values of the other ranks."""
    return np.frombuffer(json.dumps(value).encode() + b",", np.uint8)


def _json_items(joined: np.ndarray) -> list[Any]:
    """Return the values, parsed together: each of 1,000 replicas gets the values of all."""
    items: list[Any] = json.loads(b"[" + joined.tobytes()[:-1] + b"]")
    return items
