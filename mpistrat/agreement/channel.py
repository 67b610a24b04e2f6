"""A channel: one group of ranks, their common sequence of collectives, and its agreement.

Before each collective the ranks compare what they are about to do in a *round*: one MAX
reduction of four words. It shows whether all brought the same digest, and whether some rank
brought a refusal (its arguments are bad) or its end (it left the program) instead. A rank
that leaves takes part in one last round, so that nobody waits for it in vain.
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
_WORDS = struct.Struct("=4Q")


class Status(enum.IntEnum):
    """What a rank brings to a round."""

    CALL = 0
    """A collective that it is ready to do."""
    REFUSAL = 1
    """An error: the arguments of its call are bad, or its part of some work failed."""
    END = 2
    """It has left the program."""


class Outcome(enum.Enum):
    """What a round has shown."""

    ALL_CALL = "every rank is ready to do the same"
    ALL_REFUSE = "every rank refuses"
    MIXED = "the ranks differ"


class Peers(Protocol):
    """The other ranks of a channel, asked beside MPI. All methods are local, from any thread."""

    def lowest_here(self) -> int:
        """Return the lowest rank that waits in the same collective as this one."""

    def describe(self, site: str) -> tuple[list[int], str]:
        """Return the ranks that others wait for, and a table of all, for a rank at `site`."""

    def describe_lost(self) -> str:
        """Return a table of the ranks whose data will never come, empty without any."""

    def deliver(self, texts: Sequence[str]) -> bool:
        """Give lines to rank 0 to print, and return whether it took them."""

    def is_root_at_work(self) -> bool:
        """Return whether rank 0, which writes files for all, must not be ended yet."""

    def wait_for_work(self) -> None:
        """Wait until to end the job would lose no file that is being finished."""

    def tell_end_of_job(self, limit_s: float) -> None:
        """Tell each other rank, within `limit_s` seconds, that this one ends the job for all."""


_ALL_EQUAL = 2
_CALL, _ALL_CALL = Status.CALL, Outcome.ALL_CALL
"""Not looked up in their classes at each collective."""


class Channel:
    """The agreement of the ranks of one transport."""

    def __init__(self, transport: Transport, timeout_s: float | None) -> None:
        self.transport = transport
        self.rank = transport.rank
        self.size = transport.size
        self.timeout_s = timeout_s
        self.ledger = Ledger()
        self.flight = FlightRecord()
        self.closed: EpochError | None = None
        """What has ended the agreement of the ranks for good."""
        self.pending = False
        """Whether a round was started and is not done."""
        self.lock = threading.RLock()
        """Held by the thread that is in a collective."""
        self.num_strategies = 0
        """How many strategies share the channel."""
        self.checks = True
        """Whether the ranks compare their calls before data moves."""
        self.on_collective: Callable[[int], None] | None = None
        """Called with the number of each collective, from 1, before this rank comes to it."""
        self.on_received: Callable[[Any], None] | None = None
        """Called with each array that a collective has brought, which it may write to."""
        self.on_failure: Callable[[EpochError], object] | None = None
        """Called with `closed`, whenever a collective has ended with it."""
        self.peers: Peers | None = None
        """The other ranks on the side channel, where there is one."""
        self.lost: dict[int, str] = {}
        """What is known of ranks whose processes have died, by rank."""
        self.stuck_at: str | None = None
        """Where this rank gave up to wait in a round, which is still open."""
        self.is_reported = False
        """Whether another rank ends the job and has said why."""
        self.waiting: tuple[str, float] | None = None
        """The collective in which this rank waits for others, and since when."""
        self.thread = threading.get_ident()
        """Identifier of the thread that has waited in a collective last."""
        self.pool = transport.pool
        self.private_pool = Pool()
        """Memory for results: that of the transport, which ranks may share, and of this process
        alone."""
        self._round = transport.round(4)
        self._outgoing = self._round.send.data.cast("B")
        self._incoming = self._round.receive.data.cast("B")

    def is_moving_data(self) -> bool:
        """Return whether this rank waits for data inside the transport, from any thread."""
        return bool(self.transport.occupancy)

    def check_open(self) -> None:
        """Raise the error that closed this channel, if one did."""
        if self.lost and self.closed is None:
            self.closed = self._loss("another collective")
        if self.closed is not None:
            again = type(self.closed)(str(self.closed))
            again._caused_elsewhere = self.closed._caused_elsewhere
            raise again from None

    def start_round(self, status: Status, digest: int) -> None:
        """Bring `status` and `digest` to the next round."""
        _WORDS.pack_into(self._outgoing, 0, status, _MASK - status, digest, _MASK - digest)
        self._round.start()
        self.pending = True

    def round_is_done(self) -> bool:
        """Return whether every rank has come to the round that was started."""
        if self.pending and self._round.done():
            self.pending = False
        return not self.pending

    def outcome(self) -> Outcome:
        """Return what the round that is done has shown."""
        largest, smallest, digest, complement = _WORDS.unpack_from(self._incoming)
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
        """Take part in a round and wait for it. **Collective**.

        `extra` must agree too; unlike `signature` it may be another one each time.
        """
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
                    f"The wait for {_words(signature)} at {call_site()} was interrupted by "
                    f"{type(error).__name__} on rank {self.rank} of {self.size}."
                )
            raise
        self.pending = False
        if known == _ALL_EQUAL and status is _CALL:
            return _ALL_CALL
        return self.outcome()

    def _wait(self, signature: object, timeout_s: float | None) -> None:
        """Wait for ranks that take their time."""
        self.thread = threading.get_ident()
        self.waiting = (_words(signature), time.monotonic())
        try:
            self._wait_long(*self.waiting, timeout_s)
        finally:
            self.waiting = None

    def _wait_long(self, words: str, began: float, timeout_s: float | None) -> None:
        done = self._round.done
        remind_at_s: float | None = None
        while not done():
            waited_s = time.monotonic() - began
            if self.lost:
                self.closed = self._loss(f"{words} at {call_site()}")
                self.check_open()
            if timeout_s is not None and waited_s > timeout_s:
                self.closed = self._timeout(words, timeout_s)
                self.check_open()
            if remind_at_s is None:
                # Not before: most waits are shorter than it takes to read the settings.
                remind_at_s = settings_at_the_end().wait_notice_s if waited_s > 0.01 else None
            elif waited_s > remind_at_s:
                remind_at_s = math.inf
                self._remind(words, waited_s)
            if waited_s < 0.01:
                os.sched_yield()
            else:
                time.sleep(0.0002)

    def _loss(self, where: str) -> EpochError:
        """Return the error for ranks that have died."""
        table = "\n".join(f"  {rank_list([rank])}: {what}" for rank, what in self.lost.items())
        return EpochError(f"{rank_list(self.lost)} ended, so {where} can never complete:\n{table}")

    def _timeout(self, words: str, timeout_s: float) -> EpochTimeoutError:
        """Return the error for ranks that did not come, with what they are doing instead."""
        site = call_site()
        missing, table = self._whereabouts(site)
        return EpochTimeoutError(
            f"{missing} did not come to {words} at {site} within {timeout_s:g} s, as rank "
            f"{self.rank} of {self.size} did:\n{table}\n"
            "This call is collective: every rank must make it. Look for a rank that skips it, or "
            "raise timeout_seconds if one is only slow."
        )

    def _remind(self, words: str, waited_s: float) -> None:
        """Say who is missing, once for all ranks that wait."""
        if self.peers is None or self.peers.lowest_here() == self.rank:
            site = call_site()
            missing, table = self._whereabouts(site)
            _logger.warning(
                "%s of %d has waited for %.0f s in %s at %s. %s did not come yet:\n%s",
                *(rank_list([self.rank]), self.size, waited_s, words, site, missing, table),
            )

    def _whereabouts(self, site: str) -> tuple[str, str]:
        """Return the names of the missing ranks, and a table of where each rank is."""
        if self.peers is None:
            return "Some ranks", "  (there is no side channel to ask them)"
        missing, table = self.peers.describe(site)
        # All may have come just now: too late for the limit all the same.
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
        """Return what this rank says of itself where ranks disagree."""
        said = {"what": what, "site": site, "ended": ended, "cause": cause}
        return said | {"sequence": self.ledger.sequence} | self.ledger.as_json()

    def describe(self) -> dict[str, Any]:
        """Return what the flight record says of this channel beside its collectives."""
        place = {"rank": self.rank, "size": self.size, "next_number": self.ledger.sequence}
        closed = None if self.closed is None else str(self.closed)
        return place | self.ledger.as_json() | {"closed": closed}

    def disagreement(self, reports: Sequence[dict[str, Any]]) -> EpochError:
        """Close the channel, and return the error to raise for the `reports` of all ranks.

        Wherever a round has shown `Outcome.MIXED`, each rank first makes exactly one `exchange`
        of its report, whatever it was about to do, so that they always meet.
        """
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

    def note_end(self) -> None:
        """Call `on_failure` if the agreement of the ranks has ended."""
        if self.closed is not None and self.on_failure is not None:
            self.on_failure(self.closed)

    def close_for_dropped(self, site: str) -> None:
        """Let no more collectives be made: the handle of a reduction was dropped.

        It is logged too, because there may be no further collective to raise it.
        """
        if self.closed is not None:
            return  # it may well be the consequence
        words = f"The handle that start_all_reduce at {site} returned was dropped without wait()"
        remedy = "Keep it, and call wait() on every rank."
        _logger.error("%s. %s", words, remedy)
        self.closed = EpochError(f"{words} on rank {self.rank} of {self.size}. {remedy}")

    def close_in_fork(self) -> None:
        """Let this process, which is a fork of a rank, make no collectives.

        The results that the program holds become its own: the rank goes on with others.
        """
        self.pool.leave_shared_memory()
        self.closed = EpochError(
            f"This process is a fork of rank {self.rank} of {self.size}, and no rank itself. Make "
            "collective calls in the process that it was forked from."
        )

    def note_failure(self, error: BaseException, site: str) -> None:
        """Record that a replica or merge function raised on this rank."""
        self.ledger.failures += 1
        self.ledger.last_failure = f"{type(error).__name__} at {site}"


def _words(signature: object) -> str:
    return str(signature[0]) if isinstance(signature, tuple) else str(signature)
