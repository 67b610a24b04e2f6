"""The last rounds of one channel, until every rank has ended."""

from __future__ import annotations

from typing import Any

from mpistrat.epochs.channel import Channel, Status

__all__ = ["Parting"]


class Parting:
    """The end of this rank on one channel.

    Parameters
    ----------
    channel : Channel
    report : dict
        What this rank says of its end (`Channel.report`), with ``failed`` if it died of an
        exception.
    is_stuck : bool
        Whether a round that timed out or was interrupted is still open, on any channel of this
        process. It cannot be left, so the others cannot be told; and ranks that are stuck in
        different channels would block each other if they went on.

    Attributes
    ----------
    is_stuck : bool
    reports : dict
        The reports of the ranks that are known to have ended.
    """

    def __init__(self, channel: Channel, report: dict[str, Any], is_stuck: bool) -> None:
        self.channel = channel
        self.reports: dict[int, dict[str, Any]] = {channel.rank: report}
        self.is_stuck = is_stuck
        self._report = report
        self._is_done = False
        self._is_begun = False

    def is_done(self) -> bool:
        """Return whether every rank of the channel has ended, as far as known now. Local."""
        if self._is_done or self.is_stuck or not self._begin():
            return self._is_done
        if not self.channel.round_is_done():
            return False
        if self.channel.all_ended_well():
            self._is_done = True
            return True
        # Whoever finds the ranks in different states makes one exchange, as everywhere.
        for rank, report in enumerate(self.channel.exchange(self._report)):
            if report["ended"]:
                self.reports[rank] = report
        self._is_done = self.channel.all_ended()
        if not self._is_done:
            self._start()
        return self._is_done

    def _begin(self) -> bool:
        """Start the first round, once no other thread is in a collective of the channel."""
        if not self._is_begun and self.channel.lock.acquire(blocking=False):
            self._is_begun = True
            # A thread that comes to its end in a round that has failed leaves it open.
            self.is_stuck = self.channel.stuck_at is not None
            if not self.is_stuck:
                self._start()
        return self._is_begun and not self.is_stuck

    def _start(self) -> None:
        self.channel.start_round(Status.END, 1 if "failed" in self._report else 0)
