"""Joint reductions: those that the replicas of a rank repeat together.

The replicas stop once per reduction: each passes its arrays with its vote. If the ranks agree, one
thread reduces them for all replicas of the rank, before any of them resumes.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from mpistrat.agreement.call import Call
from mpistrat.agreement.channel import Channel
from mpistrat.agreement.ledger import Outcome
from mpistrat.arrays import Array, are_apart
from mpistrat.collectives.reduction import Reduction
from mpistrat.comm.packing import Packing
from mpistrat.replicas.channel import Done, ReplicaChannel
from mpistrat.replicas.reducer import ReplicaReducer
from mpistrat.tracing.spans import active

_ALL_CALL = Outcome.ALL_CALL
"""Module names are found faster than members of their classes, at each collective."""

_logger = logging.getLogger("mpistrat")

Use = Callable[[list[Array]], object]
"""Called once on this rank with the results."""

_R = TypeVar("_R")

_Contribution = tuple[
    "JointReduction", Sequence[Array], "Sequence[np.ndarray] | None", "Use | None"
]
"""Contribution of one replica: its arrays, where the results go, and their use."""


class JointReduction:
    """A reduction that the replicas of a rank repeat together."""

    def __init__(
        self,
        call: Call,
        reduction: Reduction,
        reducers: list[ReplicaReducer],
        new_call: Callable[[], Call],
    ) -> None:
        # `reducers` are those of the packs; `new_call` returns a call like `call`.
        assert isinstance(call.channel, ReplicaChannel)
        self._channel, self._new_call = call.channel, new_call
        self._kind, self._timeout_s = call.kind, call.timeout_s
        self.reduction = reduction
        self._reducers = reducers
        self._lent: list[np.ndarray] = []

    def all_reduce(self, array: np.ndarray, out: np.ndarray | None = None) -> Array | None:
        """Return `array` reduced over replicas: see `FastReduction.all_reduce`."""
        if out is not None and not self.reduction.keeps_dtypes:
            return None
        results = self._repeat([array], None if out is None else [out], None)
        return None if results is None else results[0]

    def all_reduce_for(
        self, use: Use, arrays: Sequence[Array], extra: tuple[float, str]
    ) -> list[Array] | None:
        """Have `use` called once on this rank with the results; **Collective**.

        Return an empty list if it was; the results if this replica has to use them itself, because
        other replicas here have made the call in a different way; ``None`` if a call must do all.
        `extra` is a number that must agree too, and its name.
        """
        return self._repeat(arrays, None, use, extra)

    def _repeat(
        self,
        arrays: Sequence[Array],
        out: Sequence[np.ndarray] | None,
        use: Use | None,
        extra: tuple[float, str] | None = None,
    ) -> list[Array] | None:
        channel = self._channel
        links, sequence = channel.links, channel.ledger.sequence
        if links.usual_at != sequence:
            # Only the first of the replicas of a rank looks, as they reach the same collective
            # before any of them goes on.
            if not channel.checks or not _is_as_usual(channel):
                return None
            links.usual_at = sequence  # the others need not look again
        # The fast form of `Call.__enter__`; what does not fit here is left to a `Call`, which
        # explains it.
        lock = channel.lock
        if not lock.acquire(False):
            return None
        if channel.inside is not None:
            lock.release()
            return None
        channel.inside = self._kind
        signature = self.reduction.signature
        given = self, arrays, out, use
        number = 0 if extra is None else Call.number_of(extra[0])
        results: list[Array]
        try:
            do = _reduce_each if use is None else _reduce_and_use
            answer = channel.vote_and_do(signature, self._timeout_s, number, given, do)
            if type(answer) is Done:
                results = answer.outcome
            elif answer is _ALL_CALL:
                # All agree, but some replica of this rank has no joint reduction for it: each
                # reduces by itself.
                results = self.reduction.end(None, self._packed(given))
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

    def reduce(self, given: Sequence[_Contribution]) -> Sequence[list[Array]]:
        """Return the results of each replica of this rank, in its own memory."""
        plan, op = self.reduction.plan, self.reduction.op
        if plan.is_single and plan.is_plain:
            return self._reduce_singles(given)
        packings = list(map(self._packed, given))
        for number, reducer in enumerate(self._reducers):
            reducer.reduce_together(op, [each.messages[number] for each in packings])
        return [each.unpack() for each in packings]

    def reduce_to_lent(self, given: Sequence[_Contribution]) -> list[Array]:
        """Return the results once, in memory that the next ones overwrite."""
        if not self.reduction.keeps_dtypes:
            return self.reduce(given)[0]
        # Made once: `use` must not keep it, because the next call writes to it.
        if not self._lent:
            self._lent = [np.empty(*each) for each in self.reduction.plan.results]
        self._reduce_arrays([arrays for _, arrays, _, _ in given], self._lent)
        return list[Array](self._lent)

    def _reduce_singles(self, given: Sequence[_Contribution]) -> list[list[Array]]:
        """Do `reduce` with one array of each replica, whose result has its dtype."""
        arrays: list[np.ndarray] = [arrays[0] for _, arrays, _, _ in given]
        first, pool = arrays[0], self._channel.pool
        results = [
            pool.take(first.shape, first.dtype) if out is None else out[0] for _, _, out, _ in given
        ]
        total = results[0]
        # The memory of replicas may overlap, such as one array for all.
        # Otherwise writing the first result would change an array that is still to be read.
        if any(out is not None for _, _, out, _ in given) and not are_apart(arrays, results):
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
        """Write the reduction of the arrays that replicas have given, as they are in memory."""
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

    def _packed(self, given: _Contribution) -> Packing:
        # Not to `out`, which may be memory that another replica reads.
        joint, arrays, _, use = given
        return joint.reduction.pack(joint._channel, arrays, None, lends=use is not None)

    def or_leave(
        self, reduce: Callable[[Sequence[_Contribution]], _R], given: Sequence[_Contribution]
    ) -> _R:
        """Return what `reduce` returns; if it fails, the other ranks learn that no data comes."""
        try:
            return reduce(given)
        except BaseException as error:
            self._channel.leave_data(error)
            raise


def _reduce_each(given: Sequence[_Contribution]) -> Sequence[list[Array]]:
    """Reduce what replicas have given, for each. **Collective** over ranks."""
    joint = given[0][0]
    return joint.or_leave(joint.reduce, given)


def _reduce_and_use(given: Sequence[_Contribution]) -> Sequence[list[Array]]:
    """Have the first replica's `use` called with the results. **Collective** over ranks."""
    joint, _, _, use = given[0]
    assert use is not None
    use(joint.or_leave(joint.reduce_to_lent, given))
    return [[]] * len(given)


def joint_reduction(
    call: Call, reduction: Reduction, new_call: Callable[[], Call]
) -> JointReduction | None:
    """Return what repeats `reduction` for the replicas of a rank, if these do all of it."""
    reducers = [each for each in reduction.reducers if isinstance(each, ReplicaReducer)]
    if len(reducers) < len(reduction.reducers) or not reducers:
        return None
    return JointReduction(call, reduction, reducers, new_call)


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
