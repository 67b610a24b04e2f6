"""Groups: channels of some ranks of another channel, each with its own sequence."""

from __future__ import annotations

from collections.abc import Sequence

from mpistrat.agreement.channel import Channel
from mpistrat.agreement.ledger import Ledger
from mpistrat.comm.transport import Transport
from mpistrat.errors import CollectiveError


class GroupChannel(Channel):
    """The channel of some `ranks` of `parent`, whose counters it shares.

    If the agreement ends on one of these channels, it ends on all channels that belong together, so
    that no rank waits in one group for ranks that have failed in a different one.
    """

    def __init__(
        self,
        transport: Transport,
        timeout_s: float | None,
        parent: Channel,
        ranks: Sequence[int],
    ) -> None:
        super().__init__(transport, timeout_s)
        self.parent = parent
        self.ranks = self.departures.ranks = ranks
        self.num_ranks_of_all = parent.size
        self.ledger = _GroupLedger(parent.ledger)
        self.checks = parent.checks

    def note_end(self, owner: int) -> None:
        """Close the channels that belong together, if the agreement ended in a call of `owner`."""
        super().note_end(owner)
        if isinstance(self.closed, CollectiveError):
            for channel in (self.parent, *self.parent.groups.values()):
                channel.close_beside(self.closed)


class _GroupLedger(Ledger):
    """Counters of a group: its own collectives, and the other counters of the `parent`."""

    def __init__(self, parent: Ledger) -> None:
        # Not the constructor of the dataclass: it would set all fields, and most of them are
        # properties here.
        self._parent = parent
        self.sequence = 0
        self._mixed = ((), 0)

    @property
    def batches(self) -> int:  # type: ignore[override]
        """64 bits that represent the batches passed to `Strategy.run`."""
        return self._parent.batches

    @property
    def batch(self) -> tuple[int, int] | None:  # type: ignore[override]
        """The last batch: its epoch, and its number in that epoch."""
        return self._parent.batch

    @property
    def runs(self) -> int:  # type: ignore[override]
        """Number of calls of `Strategy.run` that have begun."""
        return self._parent.runs

    @property
    def merge_calls(self) -> int:  # type: ignore[override]
        """Number of calls of `ReplicaContext.merge_call` that have begun."""
        return self._parent.merge_calls

    @property
    def updates(self) -> int:  # type: ignore[override]
        """Number of calls of `StrategyExtended.update` that have begun."""
        return self._parent.updates

    @property
    def failures(self) -> int:  # type: ignore[override]
        """Number of functions passed to those three that raised."""
        return self._parent.failures

    @property
    def last_failure(self) -> str:  # type: ignore[override]
        """The error of the last such function, and where it was raised."""
        return self._parent.last_failure
