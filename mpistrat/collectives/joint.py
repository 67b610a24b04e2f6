"""Joint reductions: replicas of one rank meet once, to agree and to reduce.

A replica that shares its rank brings its arrays along with its vote. Once the ranks agree, what
follows is done at once for all replicas of the rank, in one thread, before any of them goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from mpistrat.agreement.call import Call
from mpistrat.agreement.ledger import Outcome
from mpistrat.agreement.replica_channel import Done, ReplicaChannel
from mpistrat.arrays import Array
from mpistrat.collectives.aliasing import are_apart
from mpistrat.collectives.prepared import PreparedReduction
from mpistrat.collectives.repeated import is_as_usual
from mpistrat.comm.packing import Packing

_ALL_CALL = Outcome.ALL_CALL
"""Module names are found faster than members of their classes, at each collective."""

Use = Callable[[list[Array]], object]
"""What is done once on this rank with the results."""


_Brought = tuple["JointReduction", Sequence[Array], "Sequence[np.ndarray] | None", "Use | None"]
"""What one replica brings: its arrays, where the results go, and their use."""


class JointReduction:
    """A prepared reduction that the replicas of a rank repeat together."""

    def __init__(
        self, call: Call, reduction: PreparedReduction, new_call: Callable[[], Call]
    ) -> None:
        # `new_call` returns a call like `call`.
        assert isinstance(call.channel, ReplicaChannel)
        self._channel, self._new_call = call.channel, new_call
        self._kind, self._timeout_s = call.kind, call.timeout_s
        self.reduction = reduction
        self._reducers = reduction.of_replicas
        self._lent: list[np.ndarray] = []

    def all_reduce(self, array: np.ndarray, out: np.ndarray | None = None) -> Array | None:
        """Return `array` reduced over replicas: see `RepeatedReduction.all_reduce`."""
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
            if not channel.checks or not is_as_usual(channel):
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
            call = self._new_call()
            entry = channel.flight.begin(channel.ledger, signature, "", None)
            call.resume(entry, is_moving=False)
            call.__exit__(type(error), error, error.__traceback__)
            raise
        channel.inside = None
        lock.release()
        if channel.overlap is not None:
            call = self._new_call()
            call.resume(channel.flight.begin(channel.ledger, signature, "", None), is_moving=False)
            call.end_overlap(None)
        return results

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

    def leave_data(self, error: BaseException) -> None:
        """Report that this rank brings no more of the data that the others wait for."""
        self._channel.leave_data(error)


def _reduce_each(brought: Sequence[_Brought]) -> Sequence[list[Array]]:
    """Reduce what replicas have brought, for each. **Collective** over ranks."""
    joint = brought[0][0]
    try:
        return joint.reduce(brought)
    except BaseException as error:
        joint.leave_data(error)
        raise


def _reduce_and_use(brought: Sequence[_Brought]) -> Sequence[list[Array]]:
    """Have the first replica's `use` called with the results. **Collective** over ranks."""
    joint, _, _, use = brought[0]
    assert use is not None
    try:
        results = joint.reduce_to_lent(brought)
    except BaseException as error:
        joint.leave_data(error)
        raise
    use(results)
    return [[]] * len(brought)
