"""Fast path for reductions that a program repeats.

The first call goes through `CollectiveCall`, which checks every argument; that takes longer than
reducing a few numbers. Later calls with the same arguments run in compiled code
(``native/fast_reduction.c``), which checks only what can have changed. Anything unusual falls back
to `CollectiveCall`.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import Any

import numpy as np

from mpistrat.agreement.call import Call
from mpistrat.agreement.ledger import SPREAD, Outcome, Status, digest_of
from mpistrat.arrays import Array
from mpistrat.collectives.reduction import Begun, Reduction, Row, Use
from mpistrat.errors import CollectiveError
from mpistrat.native import native_library
from mpistrat.system.callsite import CodeOwner, Place, code_owners, issuers, users_place
from mpistrat.tracing.flight_recorder import FlightEntry, State
from mpistrat.tracing.spans import state_of_recording

_CALL, _ALL_CALL = Status.CALL, Outcome.ALL_CALL
"""Names of the module are faster to look up than class members, in each collective."""

_logger = logging.getLogger("mpistrat")


class Progress(enum.IntEnum):
    """How far a call has progressed; as in ``native/fast_reduction.c``."""

    OUTSIDE = 0
    INSIDE = 1
    """The channel is taken."""
    BROUGHT = 2
    """The numbers are where the other ranks read them."""
    AGREED = 3


class FastReduction:
    """A reduction of the same kinds of arrays, and the calls of one replica that repeat it."""

    def __init__(
        self, call: Call, reduction: Reduction, new_call: Callable[[], Call], lends: bool = False
    ) -> None:
        # `new_call` returns a call like `call`. With `lends` it is for `all_reduce_for`, else for
        # `all_reduce`.
        self._new_call, self._lends = new_call, lends
        self._channel = channel = call.channel
        self._own_timeout_s = call.own_timeout_s
        self.reduction = reduction
        self._keeps_dtypes = reduction.keeps_dtypes
        self._use: Use | None = None
        """The use of the results of the next row."""
        self._number: tuple[float, int, str] = (0.0, 0, "")
        """The number that must agree too, and its forms for digests and error messages."""
        path, occupancy = reduction.fast_path(lends), channel.transport.occupancy
        # By name: `create` in native/fast_reduction.c needs each of them, and raises for any other.
        self._compiled = native_library().FastReduction(
            channel=channel,
            ledger=channel.ledger,
            # The dict itself, to which other threads add. Each call checks its length, so
            # `Departures` must never replace it by a new dict.
            departed=channel.departures.found,
            kind=call.kind,
            acquire=channel.lock.acquire,
            release=channel.lock.release,
            recording=state_of_recording,
            logger=_logger,
            debug_level=logging.DEBUG,
            begin=self._start,
            find_place=users_place,
            issuers=issuers,
            code_owners=code_owners,
            user=CodeOwner.USER,
            flight=channel.flight,
            entry_type=FlightEntry,
            signature=reduction.signature,
            waiting=State.WAITING,
            agreed=State.AGREED,
            done=State.DONE,
            check_departed=self._check_departed,
            meet=channel.meet,
            vote=self._vote,
            row=self._reduce_row,
            end_round=self._end_round,
            clock=monotonic_ns,
            end=self._finish,
            move=path.move,
            take=channel.pool.take,
            enter=occupancy.__enter__,
            check=reduction.check_wait,
            exit=occupancy.__exit__,
            digest=digest_of(reduction.signature),
            spread=tuple(SPREAD),
            route=path.route,
            **path.numbers,
        )

    def all_reduce(self, array: np.ndarray, out: np.ndarray | None = None) -> Array | None:
        """Return `array` reduced over ranks, ``None`` if a call must do it. **Collective**.

        The arguments are the same as in `Reduction.all_reduce`.
        """
        # The result may have a different dtype from the array, for example MEAN of integers. The
        # compiled code does not check the dtype of `out`.
        if out is not None and not self._keeps_dtypes:
            return None
        # Repeated in `all_reduce_for`: calling a function for both would take longer than the rest
        # here.
        try:
            result: Array | None = self._compiled.all_reduce(array, out)
        except BaseException as error:
            # The channel may still be taken: without this, all later calls would be overlaps.
            self._end_failed(error)
            raise
        # A signal handler may have called a collective within the compiled code, which does not
        # report it.
        if result is not None and self._channel.overlap is not None:
            self._call_to_end(is_moving=False).end_overlap(None)
        return result

    def all_reduce_for(
        self, use: Use, arrays: Sequence[Array], number: float, text: str
    ) -> list[Array] | None:
        """Reduce `arrays`; `use` is to be called once on this rank with the results.

        Return an empty list if it has been called. Return the results if the caller has to use
        them; the next reduction may overwrite them. Return ``None`` if a call must do everything.
        The ranks must agree on the `number` too, which messages call `text`. **Collective**.
        """
        # By identity: a learning rate is usually the same object in each step, and formatting it
        # takes longer than the rest here.
        if number is not self._number[0]:
            self._number = number, Call.number_of(number), f"{text} {number}"
        if self.reduction.takes_rows:
            self._use = use
        try:
            results: list[Array] | None = self._compiled.all_reduce(
                arrays, None, self._number[1], self._number[2]
            )
        except BaseException as error:
            self._end_failed(error)
            raise
        if results is not None and self._channel.overlap is not None:
            self._call_to_end(is_moving=False).end_overlap(None)
        return results

    def _start(self, given: Any, out: np.ndarray | None) -> Begun:
        arrays = given if self._lends else [given]
        outs = None if out is None else [out]
        return self.reduction.start(self._channel, arrays, outs, self._lends)

    def _finish(self, begun: Begun) -> Any:
        results = self.reduction.finish(self._channel, begun)
        return results if self._lends else results[0]

    def _reduce_row(self, given: Any, out: np.ndarray | None, place: Place, extra: int = 0) -> Any:
        """Return the results of a rank with several replicas: one vote reduces the rows of all."""
        # Without `_start`, `_vote` and `_finish`, because this is done once per replica.
        channel, lends = self._channel, self._lends
        use, self._use = self._use, None
        outs = None if out is None else [out]
        row = Row(self.reduction, given if lends else [given], outs, lends, use, place)
        if channel.checks:
            own_s = self._own_timeout_s
            timeout_s = channel.timeout_s if own_s is None else own_s
            if channel.vote_with(row, timeout_s, extra) is not _ALL_CALL:
                raise self._disagreement()
        if row.results is None:  # the vote has not reduced it
            channel.reduce_row(row)
        results = row.results
        return results if lends or results is None else results[0]

    def _check_departed(self) -> None:
        self._channel.check_departed(self.reduction.signature)

    def _vote(self, extra: int = 0) -> None:
        signature = self.reduction.signature
        if self._channel.vote(_CALL, signature, self._limit_s(), extra) is not _ALL_CALL:
            raise self._disagreement()

    def _limit_s(self) -> float | None:
        """Return the time limit for missing ranks, which the channel may have changed."""
        return self._channel.timeout_s if self._own_timeout_s is None else self._own_timeout_s

    def _end_round(self, known: int) -> None:
        signature = self.reduction.signature
        if self._channel.end_round(known, signature, self._limit_s()) is not _ALL_CALL:
            raise self._disagreement()

    def _disagreement(self) -> CollectiveError:
        call, (number, _, text) = self._new_call(), self._number
        if text:
            call.include(number, text)
        return call.disagreement(self.reduction.signature)

    def _end_failed(self, error: BaseException) -> None:
        """Release the channel after an `error`, if it was taken."""
        channel, progress = self._channel, self._compiled.progress
        if progress == Progress.OUTSIDE:
            return
        self._compiled.progress = Progress.OUTSIDE
        # Without `meet`, the round was run by `vote`, which leaves its round itself.
        if channel.meet is not None and channel.pending:
            # As `Channel.vote` does: compiled code has started the round, but cannot leave it.
            channel.leave_round(channel.inside or "", error)
        # After AGREED the other ranks use the contribution; before BROUGHT there is none.
        if progress == Progress.BROUGHT:
            self.reduction.withdraw_brought()
        self.reduction.withdraw()
        # Data that is sent with the agreement has arrived with it.
        has_come = self.reduction.travels_with_agreement and channel.checks
        call = self._call_to_end(progress == Progress.AGREED and not has_come)
        call.__exit__(type(error), error, error.__traceback__)

    def _call_to_end(self, is_moving: bool) -> Call:
        """Return a call that takes over the call that was begun here."""
        call, entry, channel = self._new_call(), self._compiled.entry, self._channel
        if self.reduction.takes_rows:  # the entry belongs to the rank
            entry = channel.flight.begin(channel.ledger, self.reduction.signature, "", None)
        call.resume(entry, is_moving)
        return call
