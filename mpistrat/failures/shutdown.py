"""Shutdown: the last rounds of a rank, and one traceback for the whole job.

A rank that returns from the program, or ends with an exception, takes part in one last round of
each channel and votes that it has ended. So ranks that wait in a collective learn at once that it
is gone. When all ranks have ended, one of the failed ranks prints its traceback. If a rank has
failed and the others are busy, it ends the job after a grace period.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

from mpistrat.agreement.channel import Channel
from mpistrat.agreement.ledger import Status
from mpistrat.errors import CollectiveError, LaunchError
from mpistrat.failures import logs, losses
from mpistrat.failures.logs import print_line
from mpistrat.failures.losses import note_exit_code
from mpistrat.failures.process_state import process
from mpistrat.failures.report import describe_failure, format_failure, print_failures
from mpistrat.settings import settings_at_the_end
from mpistrat.system import exit_hooks
from mpistrat.system.callsite import failure_site
from mpistrat.system.text import rank_list, text_of

_logger = logging.getLogger("mpistrat")

_POLL_S = 0.0005
_TURN_S = 1.0
_MAX_TURNS = 3
_SHORT_TURN_S = 0.3
_SOON_S = 1.0
_REPORT_S = 1.0
_ASK_S = 0.3
"""How long before its limit a rank asks rank 0, which usually answers at once."""
_ALONE_S = 60.0
"""How long a rank that never had a strategy waits for others that may still create one."""
_PARTING_S = 1.0
"""The same for a rank that had strategies with some of the ranks."""
_NEWS_S = 0.2
"""Time for the monitors to report a dead rank."""
_PRINT_S = 0.3
"""Time for a launcher to read the last lines, which it may drop if a rank aborts."""


def install(
    open_last_channel: Callable[[float, bool], Channel | None], abort: Callable[[int], None]
) -> None:
    """Make sure that other ranks learn when this one ends, even before there is a strategy."""
    # `open_last_channel` takes a limit in seconds and whether this rank has failed. It opens a
    # channel of all ranks, for a rank that ends before it has one. `abort` ends the job if the
    # other ranks do not come.
    process.open_last_channel, process.abort = open_last_channel, abort
    exit_hooks.report_by(_report)
    exit_hooks.at(exit_hooks.Phase.LAST_ROUND, _at_exit)


def register_channel(channel: Channel, is_over: Callable[[], bool], world_size: int) -> None:
    """Let this process take part in the last rounds of `channel` when it ends."""
    if not process.channels:
        process.is_over, process.world_size = is_over, world_size
        note_exit_code(only_if_tolerant=True)
    process.channels.append(channel)


def _at_exit() -> None:
    if process.can_communicate():
        place = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "the interpreter"
        is_alone = not process.channels
        if is_alone:
            _open_last_channel(_ALONE_S)
        if process.channels:
            _end("ended (left the program)", place, {}, None)
            process.channels = []  # all ranks of these channels have ended
        # Ranks outside of these channels may still create their first strategy on all ranks, and
        # would wait for this one.
        if not is_alone and _open_last_channel(_PARTING_S):
            _end("ended (left the program)", place, {}, None)
    logs.close()


def _open_last_channel(limit_s: float) -> bool:
    """Report the end to ranks that create their first strategy and wait for this rank."""
    # If the others do not come, they are ending too, or use strategies on only some ranks.
    if process.open_last_channel is None or process.is_over() or process.lost:
        return False
    return process.open_last_channel(limit_s, False) is not None


def _report(failure: exit_hooks.Failure) -> bool:
    """Let one rank report a failure for all, and return whether one does."""
    if isinstance(failure.error, LaunchError) and not process.channels:
        # Either each rank has this error independently, or all have it together. Wait for the rank
        # that reports it, because many launchers end all ranks when one has failed.
        if failure.error._is_reported_elsewhere:
            time.sleep(_PRINT_S)
        else:
            exit_hooks.show(failure, format_failure(*failure))
        return True
    if not process.channels and process.can_communicate() and process.open_last_channel is not None:
        try:
            process.open_last_channel(_grace_s(), True)
        except CollectiveError:
            exit_hooks.show(failure, format_failure(*failure))
            sys.stderr.flush()
            time.sleep(_PRINT_S)
            process.abort(1)
    if not process.channels or not process.can_communicate():
        if not getattr(failure.error, "_is_reported_elsewhere", False):
            exit_hooks.show(failure, format_failure(*failure))
        return True
    # An abort ends the process without flushing, which would lose the output before the traceback.
    sys.stdout.flush()
    site = failure_site(failure.trace)
    closed = [channel.closed for channel in process.channels]
    facts, text = describe_failure(*failure, site, closed)
    _end(f"ended with {failure.kind.__name__}", site, facts, text)
    return True


def _end(what: str, site: str, facts: dict[str, Any], text: str | None) -> None:
    with exit_hooks.Interruption() as interruption:
        _end_on_channels(what, site, facts, text, interruption)


def _end_on_channels(
    what: str,
    site: str,
    facts: dict[str, Any],
    text: str | None,
    interruption: exit_hooks.Interruption,
) -> None:
    # Set this first: from now on the monitor answers that this rank has left the program.
    process.has_left = True
    losses.leave_replaced()
    # Flush before the others learn that this rank has ended, so that rank 0 has all lines.
    logs.flush()
    # The largest channel reports, because the user knows its rank numbers.
    channels = sorted(process.channels, key=lambda channel: -channel.size)
    # One open round makes all channels stuck: see `_LastRound`.
    stuck = next((channel for channel in channels if channel.stuck_at is not None), None)
    last_rounds = []
    for channel in channels:
        cause = bool(facts.get("cause"))
        report = channel.report(what, site, ended=True, cause=cause) | facts
        last_rounds.append(_LastRound(channel, report, stuck is not None))
    size = process.world_size - len(process.lost)
    among = channels[0].flight.channel if channels[0].size < size else ""
    limit_s = _grace_s() + _extra_s(channels[0], stuck)
    try:
        ends_alone = not _others_end(last_rounds, text is not None, limit_s, interruption)
    except BaseException as error:  # raised by a signal handler, which interrupts the last round
        print_line(f"{type(error).__name__} while waiting for other ranks to end: {text_of(error)}")
        ends_alone = True
    logs.close()
    if ends_alone:
        exit_hooks.finish_work()
        if any(channel.is_reported for channel in channels):
            # The rank that reported it ends the job, once the others have written their records.
            time.sleep(_REPORT_S)
        else:
            _print_failures(last_rounds[0], text, among)
            if text is None and not last_rounds[0].has_explained:
                _explain_abort(channels)
            _report_abort(channels)
            time.sleep(_PRINT_S)
        last_rounds[0].channel.transport.abort(1)
    has_printed = _print_failures(last_rounds[0], text, among)
    if has_printed and among:
        exit_hooks.finish_work()
        process.abort(1)  # ranks outside of its channels would never learn of it
    for channel in channels:
        if not channel.pending:
            channel.transport.drain()
    # Do this last: from here on, the rank that watches this process ignores a broken connection.
    if process.monitor is not None:
        process.monitor.announce_exit()


def _others_end(
    last_rounds: Sequence[_LastRound],
    has_failed: bool,
    limit_s: float,
    interruption: exit_hooks.Interruption,
) -> bool:
    """Wait for the others, and return whether all have ended in time."""
    # There is a limit only if this rank has failed, is stuck or was interrupted, or if others wait
    # for it to create a new communicator. It does not apply while rank 0 is finishing a file.
    since = time.monotonic()
    look_at_s = since + _look_s()
    is_hurried = is_idle = False
    # Build a list, because every last round has to be polled, not only the first unfinished one.
    while [each for each in last_rounds if not each.is_done()]:
        if interruption.is_asked and not is_hurried:
            # The other ranks have been interrupted too, and will end soon or never.
            is_hurried, since = True, time.monotonic()
        # The others may be in `Shrink()`, which waits for this rank while this rank waits for them.
        if not is_hurried and any(losses.is_given_up(each.channel) for each in last_rounds):
            is_hurried, since = True, time.monotonic()
        may_abort = has_failed or is_hurried or any(each.is_stuck for each in last_rounds)
        if any(each.channel.is_reported for each in last_rounds):
            return False
        if may_abort and not is_idle and time.monotonic() - since > limit_s - _ASK_S:
            is_idle = not any(_is_root_at_work(each.channel) for each in last_rounds)
            if not is_idle:
                # Ask rank 0 again in about a second. Waiting for a full limit would delay the end
                # of the job for too long after rank 0 has finished.
                since = time.monotonic() - limit_s + _TURN_S
        if is_idle and time.monotonic() - since > limit_s:
            return False
        if time.monotonic() > look_at_s:
            look_at_s = time.monotonic() + _look_s()
            if last_rounds[0].waits_in_vain():
                return False
        time.sleep(_POLL_S)
    return True


class _LastRound:
    """Last rounds of this rank on one channel."""

    # `is_stuck` means that a round that timed out or was interrupted is still open, on any channel
    # of this process, or that a killed rank will never reach it. Such a round cannot be left, so
    # other ranks cannot learn of the end over MPI. If ranks that are stuck in different channels
    # continued, they would block each other.

    def __init__(self, channel: Channel, report: dict[str, Any], is_stuck: bool) -> None:
        self.channel = channel
        self.reports: dict[int, dict[str, Any]] = {channel.rank: report}
        """`Channel.report` of each rank that is known to have ended."""
        self.is_stuck = is_stuck
        self._report = report
        self._is_done = False
        self._is_begun = False
        self._has_outlived = False
        """Whether a rank has ended before this rank knew that it had reached the last round."""
        self._exchange: Callable[[], list[Any] | None] | None = None
        """Polls for the reports of all ranks, after a round in which they differ."""
        self._since_s = time.monotonic()
        self._has_warned = False
        self.has_explained = False
        """Whether this rank has printed why it ends the job."""

    def is_done(self) -> bool:
        """Return whether every rank of the channel is known to have ended."""
        if self._is_done or self.is_stuck or not self._begin():
            return self._is_done
        # Check this before the round, which may never end if a rank is dead.
        if process.outlives_losses and losses.find_lost(self.channel):
            losses.leave_lost(self.channel)
            self._is_done = True
            return True
        if self.channel.departures.lost():
            # A rank was killed, and a launcher that does not end the job would wait forever.
            if self.channel.closed is None:
                self.channel.closed = self.channel.departures.error("the end of the program")
            self.is_stuck = True
            return False
        if self._exchange is None:
            if not self._round_is_done():
                return False
            if self._has_outlived:
                self._is_done = True
                return True
            # All ranks vote the same, so no rank waits for an exchange of reports.
            if self.channel.all_ended_well():
                process.when_all_have_ended()
                self._is_done = True
                return True
            # Ranks in different states make one exchange, as after every mixed round.
            self._exchange = self.channel.start_exchange(self._report)
        reports = self._exchange()
        if reports is None:
            return False
        self._exchange = None
        for rank, report in enumerate(reports):
            if report["ended"]:
                self.reports[rank] = report
        # If not all have ended, some rank has voted for a call. It now knows that this rank has
        # ended, and raises an error. The next round shows whether it has ended too.
        self._is_done = self.channel.all_ended()
        if not self._is_done:
            self._start()
        return self._is_done

    def waits_in_vain(self) -> bool:
        """Return whether stopped or silent ranks have not ended within the time limit."""
        # Ranks in any other state may work without a limit.
        channel, waited_s = self.channel, time.monotonic() - self._since_s
        table = "" if channel.peers is None else channel.peers.describe_lost()
        if channel.peers is None or not table or not channel.peers.is_first_to_end():
            return False
        if not self._has_warned:
            self._has_warned = True
            _logger.warning("The end of the program waits for stopped or silent ranks:\n%s", table)
        if channel.timeout_s is None or waited_s < channel.timeout_s:
            return False
        self.has_explained = True
        print_line(
            f"{rank_list(channel.names([channel.rank]))} left the program and ends the job, as "
            f"others have not ended within the timeout of {channel.timeout_s:g} s:\n{table}"
        )
        return True

    def _round_is_done(self) -> bool:
        """Return whether all ranks have arrived, or have left after a loss."""
        try:
            return self.channel.round_is_done()
        except Exception as error:
            may_be_gone = process.lost or process.outlives_losses
            if not may_be_gone or self.channel.transport.lost_ranks(error) is None:
                raise
            time.sleep(_NEWS_S)
            self._has_outlived = not self.channel.departures.lost()
            return self._has_outlived

    def _begin(self) -> bool:
        """Start the first round as soon as no other thread is in a collective of the channel."""
        if not self._is_begun and self.channel.lock.acquire(blocking=False):
            self._is_begun = True
            # A thread may have left its round open in the meantime.
            self.is_stuck = self.channel.stuck_at is not None
            if not self.is_stuck:
                self._start()
        return self._is_begun and not self.is_stuck

    def _start(self) -> None:
        # The digest says only whether this rank has failed: see `Channel.all_ended_well`.
        self.channel.start_round(Status.END, 1 if "failed" in self._report else 0)


def _print_failures(last_round: _LastRound, text: str | None, among: str) -> bool:
    channel = last_round.channel
    return print_failures(last_round.reports, channel.rank, channel.size, text, among)


def _is_root_at_work(channel: Channel) -> bool:
    """Return whether rank 0 is finishing a file. An abort would lose the file."""
    return channel.peers is not None and channel.peers.is_root_at_work()


def _explain_abort(channels: Sequence[Channel]) -> None:
    """Print why this rank aborts the job although no exception has ended its program."""
    largest = channels[0]
    parted = [each for each in channels if each.stuck_at is not None or each.departures.lost()]
    if not parted and any(losses.is_given_up(each) for each in channels):
        print_line(
            f"{rank_list(largest.names([largest.rank]))} left the program and ends the job: other "
            "ranks have revoked its communicator and do not end, and may wait for it in Shrink()."
        )
    elif not parted and largest.peers is not None:
        _, table = largest.peers.describe("the end of the program")
        print_line(f"interrupted while ranks were still at work:\n{table}")
    for channel in parted:
        if channel.closed is not None:
            who, why = (
                rank_list(channel.names([channel.rank])),
                str(channel.closed).split("\n")[0].rstrip(":"),
            )
            lost = channel.departures.lost().items()
            why += "".join(f" ({rank_list(channel.names([each]))}: {what})" for each, what in lost)
            print_line(
                f"{who} left the program and ends the job, because of an earlier error. {why}"
            )
            return


def _report_abort(channels: Sequence[Channel]) -> None:
    """Report the abort, so that other failed ranks print nothing and end at once."""
    for channel in channels:
        if channel.peers is not None:
            # This is enough time for them to write their flight records.
            channel.peers.report_end_of_job(_REPORT_S)


def _extra_s(largest: Channel, stuck: Channel | None) -> float:
    """Return how much longer than the grace period this rank waits before it aborts the job."""
    # Ranks that are stuck in one round cannot reach each other over MPI. The lowest one aborts the
    # job soon, because they cannot agree any more. The others give it time to do so.
    if stuck is None or stuck.peers is None:
        return _TURN_S * min(largest.rank, _MAX_TURNS)
    if stuck.peers.lowest_waiting() < stuck.rank:
        return _TURN_S
    # Other groups may be stuck at the same time, and each has a lowest rank.
    soon_s = _SOON_S + _SHORT_TURN_S * min(largest.rank, _MAX_TURNS)
    return min(0.0, soon_s - _grace_s())


def _look_s() -> float:
    """Return the interval in seconds at which a rank checks why others do not end."""
    return max(settings_at_the_end().wait_notice_s, _TURN_S)


def _grace_s() -> float:
    return settings_at_the_end().exit_grace_s
