"""Repeated reductions: the short way through a call that the program has made before.

`CollectiveCall` looks at all that may be unusual in a call, which takes longer than to reduce a few
numbers. Of a call that was made before, only what may have changed since is looked at, by compiled
code. Where anything is not as usual, a `CollectiveCall` does the work.
"""

from __future__ import annotations

import logging
import struct
from collections.abc import Callable
from time import monotonic_ns
from typing import Any

import numpy as np

from mpistrat.agreement.call import Call
from mpistrat.agreement.channel import Channel
from mpistrat.agreement.ledger import SPREAD, Outcome, Status
from mpistrat.arrays import Array
from mpistrat.collectives.prepared import Begun, PreparedReduction
from mpistrat.native import native_library
from mpistrat.system.callsite import CodeOwner, code_owners, issuers, users_place
from mpistrat.tracing.flight_recorder import FlightEntry, State
from mpistrat.tracing.spans import active, state_of_recording

_logger = logging.getLogger("mpistrat")

_WAY = struct.Struct("=12q7Q")
"""How the numbers travel, as ``native/repeated.c`` takes it."""

_PROGRESS, _ENTRY = -2, -1
_OUTSIDE, _INSIDE, _BROUGHT, _AGREED = range(4)
"""How far a call has come, as ``native/repeated.c`` notes it."""


class RepeatedReduction:
    """A prepared reduction of one array, and the calls in which it is repeated."""

    def __init__(
        self, call: Call, reduction: PreparedReduction, new_call: Callable[[], Call]
    ) -> None:
        # `new_call` returns a call like `call`.
        self._new_call = new_call
        self._channel = channel = call.channel
        self._own_timeout_s = call.own_timeout_s
        self.reduction = reduction
        self._keeps_dtypes = reduction.keeps_dtypes
        way, move = reduction.compiled_way()
        occupancy = channel.transport.occupancy
        self._repeat = native_library().repeat
        # In the order of the enumeration in ``native/repeated.c``.
        self._list: list[Any] = [
            channel,
            channel.ledger,
            channel.departures.found,
            call.kind,
            _WAY.pack(*way, reduction.signature.digest or 0, *SPREAD),
            channel.lock.acquire,
            channel.lock.release,
            state_of_recording,
            _logger,
            logging.DEBUG,
            self._begin,
            users_place,
            issuers,
            code_owners,
            CodeOwner.USER,
            channel.flight,
            FlightEntry,
            reduction.signature,
            "",
            State.WAITING,
            self._check_departed,
            channel.meet,
            self._vote,
            self._end_round,
            monotonic_ns,
            State.AGREED,
            self._end,
            move,
            State.DONE,
            channel.pool.take,
            occupancy.__enter__,
            reduction.check_wait,
            occupancy.__exit__,
            _OUTSIDE,
            None,
        ]

    def all_reduce(self, array: np.ndarray, out: np.ndarray | None = None) -> Array | None:
        """Return `array` reduced over ranks, ``None`` where a call must do it. **Collective**.

        The arguments are those of `PreparedReduction.all_reduce`.
        """
        if out is not None and not self._keeps_dtypes:
            return None
        try:
            result: Array | None = self._repeat(self._list, array, out)
        except BaseException as error:
            self._end_failed(error)
            raise
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
        channel, progress = self._channel, self._list[_PROGRESS]
        if progress == _OUTSIDE:
            return
        self._list[_PROGRESS] = _OUTSIDE
        if channel.meet is not None and channel.pending:
            channel.leave_round(channel.inside or "", error)
        if progress == _BROUGHT:
            self.reduction.withdraw_brought()
        self.reduction.withdraw()
        # What travels with the agreement has come with it.
        has_come = self.reduction.travels_with_agreement and channel.checks
        call = self._call_to_end(progress == _AGREED and not has_come)
        call.__exit__(type(error), error, error.__traceback__)

    def _call_to_end(self, is_moving: bool) -> Call:
        """Return a call that takes over what was begun here."""
        call = self._new_call()
        call.resume(self._list[_ENTRY], is_moving)
        return call


def _is_watched() -> bool:
    """Return whether a timeline or a log shows what moves."""
    return active() is not None or _logger.isEnabledFor(logging.DEBUG)


def is_as_usual(channel: Channel) -> bool:
    """Return whether a collective can do without a `Call`, which looks at all that may be."""
    return (
        channel.inside is None
        and channel.closed is None
        and not channel.departures.found
        and channel.on_collective is None
        and channel.on_received is None
        and not _is_watched()
    )
