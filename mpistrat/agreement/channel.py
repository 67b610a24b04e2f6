"""Channel: one group of ranks, their sequence of collectives, and its agreement.

Before each collective the ranks compare their calls in a *round*: one MAX reduction of four
integers. It shows whether all brought the same digest, and whether some rank brought a refusal (its
arguments are bad) or its end (it left the program) instead. A rank that leaves takes part in one
last round, so that no rank waits for it in vain.
"""

from __future__ import annotations

import enum
import json
import logging
import math
import os
import struct
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from mpistrat.agreement.ledger import Ledger, describe_disagreement
from mpistrat.comm.pool import Pool
from mpistrat.comm.transport import Transport
from mpistrat.errors import EpochError, EpochMismatchError, EpochTimeoutError
from mpistrat.settings import settings_at_the_end
from mpistrat.system.callsite import call_site
from mpistrat.system.text import rank_list
from mpistrat.tracing.flight_recorder import FlightRecord

__all__ = ["Channel", "Outcome", "Peers", "Status"]

_logger = logging.getLogger("mpistrat")

_MASK = 2**64 - 1
_VALUES = struct.Struct("=4Q")


class Status(enum.IntEnum):
    """The status that a rank brings to a round."""

    CALL = 0
    """A collective that it is ready to make."""
    REFUSAL = 1
    """An error: the arguments of its call are bad, or its part of some work failed."""
    END = 2
    """It has left the program."""


class Outcome(enum.Enum):
    """The result of a round."""

    ALL_CALL = "every rank is ready to do the same"
    ALL_REFUSE = "every rank refuses"
    MIXED = "the ranks differ"


class Peers(Protocol):
    """The other ranks of a channel, asked beside MPI, from any thread."""

    def lowest_waiting(self) -> int:
        """Return the lowest rank that waits in the same collective as this one."""

    def describe(self, site: str) -> tuple[list[int], str]:
        """Return the ranks that this one, at `site`, waits for, and a table of all."""

    def describe_lost(self) -> str:
        """Return a table of the ranks whose data will never come, empty without any."""

    def deliver(self, texts: Sequence[str]) -> bool:
        """Send lines to rank 0 to print, and return whether it accepted them."""

    def is_root_at_work(self) -> bool:
        """Return whether rank 0 is still finishing a file for all."""

    def wait_for_work(self) -> None:
        """Wait until no rank is finishing a file, which the end of the job would lose."""

    def leave(self) -> None:
        """End the watches among the ranks, when all of them close the channel."""

    def report_end_of_job(self, limit_s: float) -> None:
        """Report to each other rank, within `limit_s` seconds, that this one ends the job."""


_ALL_EQUAL = 2
_CALL, _ALL_CALL = Status.CALL, Outcome.ALL_CALL
"""Module names are found faster than members of their classes, at each collective."""


class Channel:
    """The agreement of the ranks of one transport."""

    def __init__(self, transport: Transport, timeout_s: float | None) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.timeout_s = timeout_s
        """How long to wait for missing ranks, where a call gives no limit itself."""
        self.ledger = Ledger()
        self.flight = FlightRecord()
        self.closed: RuntimeError | None = None
        """The error that has ended the agreement of the ranks for good."""
        self.pending = False
        """Whether a round was started and is not done."""
        self.lock = threading.RLock()
        """Held by the thread that is in a collective."""
        self.num_strategies = 0
        """How many strategies have shared the channel."""
        self.users: weakref.WeakSet[Any] = weakref.WeakSet()
        """The collectives of the strategies that share it now."""
        self.on_free: Callable[[], None] | None = None
        """Removes all that watches the channel, before its transport is closed."""
        self.checks = True
        """Whether the ranks compare their calls before data moves."""
        self.on_collective: Callable[[int], None] | None = None
        """Called with the number of each collective, from 1, before this rank comes to it."""
        self.on_received: Callable[[Any], None] | None = None
        """Called with each array that a collective has returned, which it may write to."""
        self.on_failure: Callable[[EpochError], object] | None = None
        """Called with `closed`, whenever a collective has ended with it."""
        self.peers: Peers | None = None
        """The other ranks on the side channel, where there is one."""
        self.lost: dict[int, str] = {}
        """Ranks whose processes have died, each with a description."""
        self.stuck_at: str | None = None
        """Where this rank stopped waiting in a round, which is still open."""
        self.is_reported = False
        """Whether another rank ends the job and has said why."""
        self.waiting: tuple[str, float] | None = None
        """The collective in which this rank waits for others, and since when."""
        self.thread = threading.get_ident()
        """Identifier of the thread that has waited in a collective last."""
        self.pool = transport.pool
        self.private_pool = Pool()
        """Memory for results that no other rank maps, unlike `pool`, which is the transport's."""
        self._round = transport.round(4)
        self._outgoing = self._round.send.data.cast("B")
        self._incoming = self._round.receive.data.cast("B")

    def is_moving_data(self) -> bool:
        """Return whether this rank waits for data inside the transport, from any thread."""
        return bool(self.transport.occupancy)

    def check_open(self) -> None:
        """Raise the error that closed this channel, if one did."""
        self.close_for_lost("another collective")
        if self.closed is not None:
            again = type(self.closed)(str(self.closed))
            if isinstance(again, EpochError) and isinstance(self.closed, EpochError):
                again._caused_elsewhere = self.closed._caused_elsewhere
            raise again from None

    def start_round(self, status: Status, digest: int) -> None:
        """Bring `status` and `digest` to the next round."""
        _VALUES.pack_into(self._outgoing, 0, status, _MASK - status, digest, _MASK - digest)
        self._round.start()
        self.pending = True

    def round_is_done(self) -> bool:
        """Return whether every rank has come to the round that was started."""
        if self.pending and self._round.done():
            self.pending = False
        return not self.pending

    def outcome(self) -> Outcome:
        """Return the result of the round that is done."""
        largest, smallest, digest, complement = _VALUES.unpack_from(self._incoming)
        if largest != _MASK - smallest or digest != _MASK - complement or largest == Status.END:
            return Outcome.MIXED
        return Outcome.ALL_CALL if largest == Status.CALL else Outcome.ALL_REFUSE

    def all_ended_well(self) -> bool:
        """Return whether every rank brought the end with digest 0 to the round."""
        _, smallest, digest, _ = self._round.receive.tolist()
        return bool(_MASK - smallest == Status.END and digest == 0)

    def all_ended(self) -> bool:
        """Return whether every rank brought its end to the round that is done."""
        return bool(_MASK - self._round.receive.tolist()[1] == Status.END)

    def vote(
        self, status: Status, signature: object, timeout_s: float | None, extra: int = 0
    ) -> Outcome:
        """Take part in a round and wait for it. **Collective**."""
        # `extra` must agree too. It is not in `signature`, whose digest is kept.
        if self.on_collective is not None:
            self.on_collective(self.ledger.sequence + 1)
        ledger = self.ledger
        digest = ledger.digest(signature) ^ extra
        self.pending = True
        try:
            ledger.sequence += 1
            known = self._round.meet(status, digest)
            if not known:
                self._wait(signature, timeout_s)
        except BaseException as error:
            # The round stays open, so nothing can be agreed upon any more.
            self.stuck_at = call_site()
            if self.closed is None:
                self.closed = EpochError(
                    f"The wait for {_call_name(signature)} at {call_site()} was interrupted by "
                    f"{type(error).__name__} on rank {self.rank} of {self.size}."
                )
            raise
        self.pending = False
        if known == _ALL_EQUAL and status is _CALL:
            return _ALL_CALL
        return self.outcome()

    def _wait(self, signature: object, timeout_s: float | None) -> None:
        """Wait for late ranks."""
        self.thread = threading.get_ident()
        self.waiting = (_call_name(signature), time.monotonic())
        try:
            self._wait_long(*self.waiting, timeout_s)
        finally:
            self.waiting = None

    def _wait_long(self, what: str, began: float, timeout_s: float | None) -> None:
        done = self._round.done
        remind_at_s: float | None = None
        while not done():
            waited_s = time.monotonic() - began
            if self.lost:
                self.closed = self._loss(f"{what} at {call_site()}")
                self.check_open()
            if timeout_s is not None and waited_s > timeout_s:
                self.closed = self._timeout(what, timeout_s)
                self.check_open()
            if remind_at_s is None:
                # Not before: most waits are shorter than it takes to read the settings.
                remind_at_s = settings_at_the_end().wait_notice_s if waited_s > 0.01 else None
            elif waited_s > remind_at_s:
                remind_at_s = math.inf
                self._remind(what, waited_s)
            if waited_s < 0.01:
                os.sched_yield()
            else:
                time.sleep(0.0002)

    def close_for_lost(self, where: str) -> None:
        """Close the channel if ranks have died, which will never come to `where`."""
        if self.lost and self.closed is None:
            self.closed = self._loss(where)

    def _loss(self, where: str) -> EpochError:
        """Return the error for ranks that have died."""
        table = "\n".join(f"  {rank_list([rank])}: {what}" for rank, what in self.lost.items())
        return EpochError(f"{rank_list(self.lost)} ended, so {where} can never complete:\n{table}")

    def _timeout(self, what: str, timeout_s: float) -> EpochTimeoutError:
        """Return the error for ranks that did not come, with what they are doing instead."""
        site = call_site()
        missing, table = self._missing_ranks(site)
        return EpochTimeoutError(
            f"{missing} did not come to {what} at {site} within {timeout_s:g} s, as rank "
            f"{self.rank} of {self.size} did:\n{table}\n"
            "This call is collective: every rank must make it. Look for a rank that skips it, or "
            "raise timeout_seconds if one is only slow."
        )

    def _remind(self, what: str, waited_s: float) -> None:
        """Log the missing ranks, once for all ranks that wait."""
        if self.peers is None or self.peers.lowest_waiting() == self.rank:
            site = call_site()
            missing, table = self._missing_ranks(site)
            _logger.warning(
                "%s of %d has waited for %.0f s in %s at %s. %s did not come yet:\n%s",
                *(rank_list([self.rank]), self.size, waited_s, what, site, missing, table),
            )

    def _missing_ranks(self, site: str) -> tuple[str, str]:
        """Return the missing ranks as text, and a table of where each rank is."""
        if self.peers is None:
            return "Some ranks", "  (there is no side channel to ask them)"
        missing, table = self.peers.describe(site)
        # All may have arrived just now, which is too late for the limit.
        return (rank_list(missing) if missing else "Some ranks").capitalize(), table

    def exchange(self, value: Any) -> list[Any]:
        """Return the JSON `value` of every rank, in rank order. **Collective**, unchecked."""
        own = np.frombuffer(json.dumps(value).encode(), np.uint8)
        lengths = self.transport.all_gather(np.array([own.size], np.int64), [1] * self.size)
        joined = self.transport.all_gather(own, lengths.tolist()).tobytes()
        ends = np.cumsum(lengths).tolist()
        return [json.loads(joined[a:b]) for a, b in zip([0, *ends], ends, strict=False)]

    def report(
        self, what: str, site: str, *, ended: bool = False, cause: bool = False
    ) -> dict[str, Any]:
        """Return the report of this rank, for ranks that disagree."""
        report = {"what": what, "site": site, "ended": ended, "cause": cause}
        return report | {"sequence": self.ledger.sequence} | self.ledger.as_json()

    def describe(self) -> dict[str, Any]:
        """Return the facts on this channel in a flight record, its collectives apart."""
        place = {"rank": self.rank, "size": self.size, "next_number": self.ledger.sequence}
        closed = None if self.closed is None else str(self.closed)
        return place | self.ledger.as_json() | {"closed": closed}

    def disagreement(self, reports: Sequence[dict[str, Any]]) -> EpochError:
        """Close the channel, and return the error to raise for the `reports` of all ranks."""
        # After each round with `Outcome.MIXED`, every rank makes exactly one `exchange` of its
        # report, whatever it was about to do, so that they always meet.
        guilty = [rank for rank, each in enumerate(reports) if each["cause"]]
        ended = [rank for rank, each in enumerate(reports) if each["ended"]]
        table = describe_disagreement(reports)
        error: EpochError
        if ended:
            error = EpochError(
                f"{rank_list(ended)} ended, so this collective can never complete:\n{table}"
            )
        else:
            error = EpochMismatchError(
                f"The ranks disagree:\n{table}\n"
                "Every rank must make the same collective calls in the same order, with the same "
                "op, dtype, shape, structure and name."
            )
        error._caused_elsewhere = bool(guilty) and self.rank not in guilty
        self.closed = error
        return error

    def free(self) -> None:
        """Free the communicator, and all that belongs to the channel. **Collective**."""
        self.closed = RuntimeError("Every strategy on this communicator was closed.")
        self.transport.drain()
        if self.on_free is not None:
            self.on_free()
        # What refers to this object in a circle would keep the memory until a garbage collection.
        self.on_free = self.peers = None
        self.transport.close()

    def note_end(self) -> None:
        """Call `on_failure` if the agreement of the ranks has ended."""
        if isinstance(self.closed, EpochError) and self.on_failure is not None:
            self.on_failure(self.closed)

    def close_for_dropped(self, site: str) -> None:
        """Close the channel, as the handle of a reduction was dropped."""
        if self.closed is not None:
            return  # it may well be the consequence
        what = f"The handle that start_all_reduce at {site} returned was dropped without wait()"
        remedy = "Keep it, and call wait() on every rank."
        # There may be no further collective to raise it.
        _logger.error("%s. %s", what, remedy)
        self.closed = EpochError(f"{what} on rank {self.rank} of {self.size}. {remedy}")

    def close_in_fork(self) -> None:
        """Let this process, which is a fork of a rank, make no collectives."""
        # The rank will overwrite the shared memory of results that the program holds here too.
        self.pool.leave_shared_memory()
        self.closed = EpochError(
            f"This process is a fork of rank {self.rank} of {self.size}, and no rank itself. Make "
            "collective calls in the process that it was forked from."
        )

    def note_failure(self, error: BaseException, site: str) -> None:
        """Record that a replica or merge function raised on this rank."""
        self.ledger.failures += 1
        self.ledger.last_failure = f"{type(error).__name__} at {site}"


def _call_name(signature: object) -> str:
    return str(signature[0]) if isinstance(signature, tuple) else str(signature)
