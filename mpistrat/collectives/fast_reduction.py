"""Fast path for reductions that a program repeats.

The first call goes through `CollectiveCall`, which checks every argument; that takes longer than
reducing a few numbers. Later calls with the same arguments run in compiled code
(``native/fast_reduction.c``), which checks only what can have changed. Anything unusual falls back
to `CollectiveCall`.

Replicas that share a rank arrive together, once: each passes its arrays with its vote. If the ranks
agree, one thread reduces them for all replicas of the rank, before any of them resumes.
"""

from __future__ import annotations

import enum
import logging
from collections.abc import Callable, Sequence
from time import monotonic_ns
from typing import TypeVar

import numpy as np

from mpistrat.agreement.call import Call
from mpistrat.agreement.channel import Channel
from mpistrat.agreement.ledger import SPREAD, Outcome, Status
from mpistrat.agreement.replica_channel import Done, ReplicaChannel
from mpistrat.arrays import Array, are_apart
from mpistrat.collectives.reduction import Begun, Reduction
from mpistrat.comm.packing import Packing
from mpistrat.native import native_library
from mpistrat.system.callsite import CodeOwner, code_owners, issuers, users_place
from mpistrat.tracing.flight_recorder import FlightEntry, State
from mpistrat.tracing.spans import active, state_of_recording

_ALL_CALL = Outcome.ALL_CALL
"""Module names are found faster than members of their classes, at each collective."""

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
        self._compiled = native_library().FastReduction(
            channel=channel,
            ledger=channel.ledger,
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
            digest=reduction.signature.digest or 0,
            spread=tuple(SPREAD),
            route=path.route,
            **path.numbers,
        )

    def all_reduce(self, array: np.ndarray, out: np.ndarray | None = None) -> Array | None:
        """Return `array` reduced over ranks, ``None`` where a call must do it. **Collective**.

        The arguments are those of `Reduction.all_reduce`.
        """
        if out is not None and not self._keeps_dtypes:
            return None
        try:
            result: Array | None = self._compiled.all_reduce(array, out)
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
        channel, progress = self._channel, self._compiled.progress
        if progress == Progress.OUTSIDE:
            return
        self._compiled.progress = Progress.OUTSIDE
        if channel.meet is not None and channel.pending:
            channel.leave_round(channel.inside or "", error)
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


Use = Callable[[list[Array]], object]
"""What is done once on this rank with the results."""

_R = TypeVar("_R")

_Brought = tuple["JointReduction", Sequence[Array], "Sequence[np.ndarray] | None", "Use | None"]
"""What one replica brings: its arrays, where the results go, and their use."""


class JointReduction:
    """A reduction that the replicas of a rank repeat together."""

    def __init__(self, call: Call, reduction: Reduction, new_call: Callable[[], Call]) -> None:
        # `new_call` returns a call like `call`.
        assert isinstance(call.channel, ReplicaChannel)
        self._channel, self._new_call = call.channel, new_call
        self._kind, self._timeout_s = call.kind, call.timeout_s
        self.reduction = reduction
        self._reducers = reduction.of_replicas
        self._lent: list[np.ndarray] = []

    def all_reduce(self, array: np.ndarray, out: np.ndarray | None = None) -> Array | None:
        """Return `array` reduced over replicas: see `FastReduction.all_reduce`."""
        if out is not None and not self.reduction.keeps_dtypes:
            return None
        results = self._meet([array], None if out is None else [out], None)
        return None if results is None else results[0]

    def all_reduce_for(
        self, use: Use, arrays: Sequence[Array], extra: tuple[float, str]
    ) -> list[Array] | None:
        """Have `use` called once on this rank with the results; **Collective**.

        Return an empty list if it was, the results if this replica has to see to it, since not all
        replicas here have come this way, and ``None`` where a call must do all. `extra` is a number
        that must agree too, and what it is called.
        """
        return self._meet(arrays, None, use, extra)

    def _meet(
        self,
        arrays: Sequence[Array],
        out: Sequence[np.ndarray] | None,
        use: Use | None,
        extra: tuple[float, str] | None = None,
    ) -> list[Array] | None:
        channel = self._channel
        meetings, sequence = channel.meetings, channel.ledger.sequence
        if meetings.usual_at != sequence:
            if not channel.checks or not _is_as_usual(channel):
                return None
            meetings.usual_at = sequence  # the others need not look again
        lock = channel.lock
        if not lock.acquire(False):
            return None
        if channel.inside is not None:
            lock.release()
            return None
        channel.inside = self._kind
        signature = self.reduction.signature
        brought = self, arrays, out, use
        number = 0 if extra is None else Call.number_of(extra[0])
        results: list[Array]
        try:
            do = _reduce_each if use is None else _reduce_and_use
            answer = channel.vote_and_do(signature, self._timeout_s, number, brought, do)
            if type(answer) is Done:
                results = answer.outcome
            elif answer is _ALL_CALL:
                results = self.reduction.end(None, self._packed(brought))
                if out is not None:
                    np.copyto(out[0], results[0])
                    results = list(out)
            else:
                call = self._new_call()
                if extra is not None:
                    call.include(extra[0], f"{extra[1]} {extra[0]}")
                raise call.disagreement(signature)
        except BaseException as error:
            self._call_to_end().__exit__(type(error), error, error.__traceback__)
            raise
        channel.inside = None
        lock.release()
        if channel.overlap is not None:
            self._call_to_end().end_overlap(None)
        return results

    def _call_to_end(self) -> Call:
        """Return a call that takes over what was begun here."""
        call, channel = self._new_call(), self._channel
        entry = channel.flight.begin(channel.ledger, self.reduction.signature, "", None)
        call.resume(entry, is_moving=False)
        return call

    def reduce(self, brought: Sequence[_Brought]) -> Sequence[list[Array]]:
        """Return the results of each replica of this rank, in its own memory."""
        plan, op = self.reduction.plan, self.reduction.op
        if plan.is_single and plan.is_plain:
            return self._reduce_singles(brought)
        packings = list(map(self._packed, brought))
        for number, reducer in enumerate(self._reducers):
            reducer.reduce_together(op, [each.messages[number] for each in packings])
        return [each.unpack() for each in packings]

    def reduce_to_lent(self, brought: Sequence[_Brought]) -> list[Array]:
        """Return the results once, where they lie until the next ones."""
        if not self.reduction.keeps_dtypes:
            return self.reduce(brought)[0]
        if not self._lent:
            self._lent = [np.empty(*each) for each in self.reduction.plan.results]
        self._reduce_arrays([arrays for _, arrays, _, _ in brought], self._lent)
        return list[Array](self._lent)

    def _reduce_singles(self, brought: Sequence[_Brought]) -> list[list[Array]]:
        """Do `reduce` with one array of each replica, whose result has its dtype."""
        arrays: list[np.ndarray] = [arrays[0] for _, arrays, _, _ in brought]
        first, pool = arrays[0], self._channel.pool
        results = [
            pool.take(first.shape, first.dtype) if out is None else out[0]
            for _, _, out, _ in brought
        ]
        total = results[0]
        # Replicas may bring memory of each other, such as one array for all.
        if any(out is not None for _, _, out, _ in brought) and not are_apart(arrays, results):
            total = pool.take(first.shape, first.dtype)
        if first.size:
            self._reduce_arrays([[each] for each in arrays], [total])
            for result in results:
                if result is not total:
                    np.copyto(result, total)
        return [[each] for each in results]

    def _reduce_arrays(
        self, of_replicas: Sequence[Sequence[Array]], targets: Sequence[np.ndarray]
    ) -> None:
        """Write the reduction of the arrays that replicas have brought, as they lie in memory."""
        packs, op = self.reduction.plan.packs, self.reduction.op
        if len(packs) == 1:
            if packs[0].num_bytes:
                self._reducers[0].reduce_arrays(op, of_replicas, targets)
            return
        for reducer, each in zip(self._reducers, packs, strict=True):
            at = [*each.small, *each.large]
            if each.num_bytes:
                rows = [[arrays[position] for position in at] for arrays in of_replicas]
                reducer.reduce_arrays(op, rows, [targets[position] for position in at])

    def _packed(self, brought: _Brought) -> Packing:
        # Not to `out`, which may be memory that another replica has brought.
        joint, arrays, _, use = brought
        return joint.reduction.pack(joint._channel, arrays, None, lends=use is not None)

    def or_leave(
        self, reduce: Callable[[Sequence[_Brought]], _R], brought: Sequence[_Brought]
    ) -> _R:
        """Return what `reduce` returns; if it fails, the other ranks learn that no data comes."""
        try:
            return reduce(brought)
        except BaseException as error:
            self._channel.leave_data(error)
            raise


def _reduce_each(brought: Sequence[_Brought]) -> Sequence[list[Array]]:
    """Reduce what replicas have brought, for each. **Collective** over ranks."""
    joint = brought[0][0]
    return joint.or_leave(joint.reduce, brought)


def _reduce_and_use(brought: Sequence[_Brought]) -> Sequence[list[Array]]:
    """Have the first replica's `use` called with the results. **Collective** over ranks."""
    joint, _, _, use = brought[0]
    assert use is not None
    use(joint.or_leave(joint.reduce_to_lent, brought))
    return [[]] * len(brought)


def _is_as_usual(channel: Channel) -> bool:
    """Return whether a collective can do without a `Call`, which looks at all that may be."""
    return (
        channel.inside is None
        and channel.closed is None
        and not channel.departures.found
        and channel.on_collective is None
        and channel.on_received is None
        and active() is None
        and not _logger.isEnabledFor(logging.DEBUG)
    )
