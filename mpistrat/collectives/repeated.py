"""Repeated reductions: the short way through a call that the program has made before.

`CollectiveCall` looks at all that may be unusual in a call, which takes longer than to reduce a few
numbers. Of a call that was made before, only what may have changed since is looked at here. Where
anything is not as usual, a `CollectiveCall` does the work.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from time import monotonic_ns

import numpy as np

from mpistrat.agreement.call import Call
from mpistrat.agreement.channel import Channel
from mpistrat.agreement.ledger import Outcome, Status
from mpistrat.arrays import Array
from mpistrat.collectives.prepared import PreparedReduction
from mpistrat.system.callsite import users_place
from mpistrat.tracing.flight_recorder import State
from mpistrat.tracing.spans import active

__all__ = ["RepeatedReduction"]

_logger = logging.getLogger("mpistrat")

_CALL, _ALL_CALL, _AGREED, _DONE = Status.CALL, Outcome.ALL_CALL, State.AGREED, State.DONE
"""Module names are found faster than members of their classes, at each collective."""


class RepeatedReduction:
    """A prepared reduction, and the calls in which it is repeated."""

    def __init__(
        self, call: Call, reduction: PreparedReduction, new_call: Callable[[], Call]
    ) -> None:
        # `new_call` returns a call like `call`.
        self._new_call = new_call
        self._channel = call.channel
        self._kind, self._timeout_s = call.kind, call.timeout_s
        self.reduction = reduction

    def all_reduce(
        self, arrays: Sequence[Array], out: Sequence[np.ndarray] | None = None
    ) -> list[Array] | None:
        """Return each array reduced over ranks, ``None`` where a call must do it. **Collective**.

        The arguments are those of `PreparedReduction.all_reduce`.
        """
        channel, reduction = self._channel, self.reduction
        lock = channel.lock
        if out is not None and not reduction.keeps_dtypes:
            return None
        if not lock.acquire(False):
            return None
        if not _is_as_usual(channel):
            lock.release()
            return None
        channel.inside = self._kind
        entry, is_agreed = None, False
        try:
            begun = reduction.begin(channel, arrays, out)
            if channel.checks:
                place, signature = users_place(sys._getframe(2)), reduction.signature
                entry = channel.flight.begin(channel.ledger, signature, "", place)
                if channel.vote(_CALL, signature, self._timeout_s) is not _ALL_CALL:
                    raise self._new_call().disagreement(signature)
                entry.agreed_ns = monotonic_ns()
                entry.state = _AGREED
            is_agreed = True
            results = reduction.end(None, begun)
            if entry is not None:
                entry.ended_ns = monotonic_ns()
                entry.state = _DONE
        except BaseException as error:
            reduction.withdraw()
            call = self._new_call()
            has_come = reduction.travels_with_agreement and channel.checks
            call.resume(entry, is_agreed and not has_come)
            call.__exit__(type(error), error, error.__traceback__)
            raise
        channel.inside = None
        lock.release()
        if channel.overlap is not None:
            call = self._new_call()
            call.resume(entry, is_moving=False)
            call.end_overlap(None)
        return results


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
