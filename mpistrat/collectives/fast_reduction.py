"""Fast path for reductions that a program repeats.

The first call goes through `CollectiveCall`, which checks every argument; that takes longer than
reducing a few numbers. Later calls with the same arguments run in compiled code
(``native/fast_reduction.c``), which checks only what can have changed. Anything unusual falls back
to `CollectiveCall`.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable
from time import monotonic_ns

import numpy as np

from mpistrat.agreement.call import Call
from mpistrat.agreement.ledger import SPREAD, Outcome, Status
from mpistrat.arrays import Array
from mpistrat.collectives.reduction import Begun, Reduction
from mpistrat.native import native_library
from mpistrat.system.callsite import CodeOwner, code_owners, issuers, users_place
from mpistrat.tracing.flight_recorder import FlightEntry, State
from mpistrat.tracing.spans import state_of_recording

_logger = logging.getLogger("mpistrat")


class Progress(enum.IntEnum):
    """How far a call has come; as in ``native/fast_reduction.c``."""

    OUTSIDE = 0
    INSIDE = 1
    """The channel is taken."""
    BROUGHT = 2
    """The numbers are where the other ranks look for them."""
    AGREED = 3


class FastReduction:
    """A reduction of one array, and the calls that repeat it."""

    def __init__(self, call: Call, reduction: Reduction, new_call: Callable[[], Call]) -> None:
        # `new_call` returns a call like `call`.
        self._new_call = new_call
        self._channel = channel = call.channel
        self._own_timeout_s = call.own_timeout_s
        self.reduction = reduction
        self._keeps_dtypes = reduction.keeps_dtypes
        path, occupancy = reduction.fast_path(), channel.transport.occupancy
        # By name: `create` in native/fast_reduction.c wants each of them, and refuses any other.
        self._compiled = native_library().FastReduction(
            channel=channel,
            ledger=channel.ledger,
            # The dict itself, to which other threads add. Its length is looked at in each call, so
            # `Departures` must never put a new dict in its place.
            departed=channel.departures.found,
            kind=call.kind,
            acquire=channel.lock.acquire,
            release=channel.lock.release,
            recording=state_of_recording,
            logger=_logger,
            debug_level=logging.DEBUG,
            begin=self._begin,
            find_place=users_place,
            issuers=issuers,
            code_owners=code_owners,
            user=CodeOwner.USER,
            flight=channel.flight,
            entry_type=FlightEntry,
            signature=reduction.signature,
            extra="",
            waiting=State.WAITING,
            agreed=State.AGREED,
            done=State.DONE,
            check_departed=self._check_departed,
            meet=channel.meet,
            vote=self._vote,
            end_round=self._end_round,
            clock=monotonic_ns,
            end=self._end,
            move=path.move,
            take=channel.pool.take,
            enter=occupancy.__enter__,
            check=reduction.check_wait,
            exit=occupancy.__exit__,
            # Known since the ranks have compared the first call. Without checks it is None, and
            # nothing uses it.
            digest=reduction.signature.digest or 0,
            spread=tuple(SPREAD),
            route=path.route,
            **path.numbers,
        )

    def all_reduce(self, array: np.ndarray, out: np.ndarray | None = None) -> Array | None:
        """Return `array` reduced over ranks, ``None`` where a call must do it. **Collective**.

        The arguments are those of `Reduction.all_reduce`.
        """
        # The result may have a different dtype than the array, such as MEAN of integers. The
        # compiled code does not look at the dtype of `out`.
        if out is not None and not self._keeps_dtypes:
            return None
        try:
            result: Array | None = self._compiled.all_reduce(array, out)
        except BaseException as error:
            # The channel is still taken, if it was: without this, all later calls would be
            # overlaps.
            self._end_failed(error)
            raise
        # A signal handler may have called a collective within the compiled code, which reports
        # nothing.
        if result is not None and self._channel.overlap is not None:
            self._call_to_end(is_moving=False).end_overlap(None)
        return result

    def _begin(self, array: np.ndarray, out: np.ndarray | None) -> Begun:
        outs = None if out is None else [out]
        return self.reduction.begin(self._channel, [array], outs)

    def _check_departed(self) -> None:
        self._channel.check_departed(self.reduction.signature)

    def _vote(self) -> None:
        signature = self.reduction.signature
        outcome = self._channel.vote(Status.CALL, signature, self._limit_s())
        if outcome is not Outcome.ALL_CALL:
            raise self._new_call().disagreement(signature)

    def _limit_s(self) -> float | None:
        """Return the time limit for missing ranks, which the channel may have changed since."""
        return self._channel.timeout_s if self._own_timeout_s is None else self._own_timeout_s

    def _end_round(self, known: int) -> None:
        signature = self.reduction.signature
        outcome = self._channel.end_round(known, signature, self._limit_s())
        if outcome is not Outcome.ALL_CALL:
            raise self._new_call().disagreement(signature)

    def _end(self, begun: Begun) -> Array:
        return self.reduction.end(None, begun)[0]

    def _end_failed(self, error: BaseException) -> None:
        """Give the channel back after an `error`, if it was taken."""
        channel, progress = self._channel, self._compiled.progress
        if progress == Progress.OUTSIDE:
            return
        self._compiled.progress = Progress.OUTSIDE
        # Without `meet`, the vote went through `vote`, which leaves its round itself.
        if channel.meet is not None and channel.pending:
            # As `Channel.vote` does: compiled code has started the round, but cannot leave it.
            channel.leave_round(channel.inside or "", error)
        # After AGREED the other ranks use what was contributed; before BROUGHT there is nothing.
        if progress == Progress.BROUGHT:
            self.reduction.withdraw_brought()
        self.reduction.withdraw()
        # What travels with the agreement has come with it.
        has_come = self.reduction.travels_with_agreement and channel.checks
        call = self._call_to_end(progress == Progress.AGREED and not has_come)
        call.__exit__(type(error), error, error.__traceback__)

    def _call_to_end(self, is_moving: bool) -> Call:
        """Return a call that takes over what was begun here."""
        call = self._new_call()
        call.resume(self._compiled.entry, is_moving)
        return call
