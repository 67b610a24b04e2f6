"""How a rank leaves: told to the others, with one traceback for the whole job.

A rank that returns from the program or dies of an exception takes part in one last round of
each channel, as ended. Ranks that wait in a collective learn at once that it will not come.
When all ranks have ended, one of those that failed prints its traceback. A rank that failed
and finds the others busy elsewhere ends the job after a while.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType, TracebackType
from typing import Any

from mpistrat.agreement.channel import Channel, Status
from mpistrat.errors import EpochTimeoutError
from mpistrat.failures import logs
from mpistrat.failures.logs import print_line
from mpistrat.failures.process_state import own
from mpistrat.failures.report import describe_failure, print_failures
from mpistrat.settings import settings_at_the_end
from mpistrat.system import exit_hooks
from mpistrat.system.callsite import failure_site
from mpistrat.system.text import rank_list, text_of

__all__ = ["Interruption", "Parting", "install", "watch"]


class Interruption:
    """Context manager in which SIGINT raises nothing, but is noted."""

    def __init__(self) -> None:
        self.is_asked = False
        """Whether SIGINT has come."""
        self._previous: Any = None

    def __enter__(self) -> Interruption:
        # Only the main thread may change handlers, and only there they run.
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):  # not where the program ignores it
                self._previous = previous
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.is_asked = True


class Parting:
    """The end of this rank on one channel."""

    def __init__(self, channel: Channel, report: dict[str, Any], is_stuck: bool) -> None:
        self.channel = channel
        self.reports: dict[int, dict[str, Any]] = {channel.rank: report}
        """The reports of the ranks that are known to have ended."""
        self.is_stuck = is_stuck
        self._report = report
        self._is_done = False
        self._is_begun = False

    def is_done(self) -> bool:
        """Return whether every rank of the channel has ended, as far as known now."""
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


_POLL_S = 0.0005
_TURN_S = 1.0
_SHORT_TURN_S = 0.3
_SOON_S = 1.0
_TELL_S = 1.0
_ASK_S = 0.3
"""How long before its patience ends a rank asks rank 0, which mostly answers at once."""
_PRINT_S = 0.3
"""What a launcher may need to take up the last lines: it may drop them where a rank aborts."""
_MAX_TURNS = 3


def install(open_channel: Callable[[float], Channel | None], abort: Callable[[int], None]) -> None:
    """Have uncaught exceptions end the whole job, also before there is a strategy."""
    own.open_channel, own.abort = open_channel, abort
    exit_hooks.report_by(_report)


def watch(channel: Channel, is_over: Callable[[], bool], world_size: int) -> None:
    """Have this process say farewell on `channel` when it ends."""
    if not own.channels:
        exit_hooks.at(exit_hooks.Phase.LAST_ROUND, _at_exit)
        own.is_over, own.world_size = is_over, world_size
    own.channels.append(channel)


def _at_exit() -> None:
    if own.can_speak():
        place = os.path.basename(sys.argv[0]) if sys.argv and sys.argv[0] else "the interpreter"
        _leave("ended (left the program)", place, {}, None)
    logs.close()


def _report(failure: exit_hooks.Failure) -> bool:
    """Have one rank tell of what ended this one and others, and return whether it does."""
    if not own.channels and own.can_speak() and own.open_channel is not None:
        try:
            own.open_channel(_grace_s())
        except EpochTimeoutError:
            exit_hooks.show(failure)
            sys.stderr.flush()
            time.sleep(_PRINT_S)
            own.abort(1)
    if not own.channels or not own.can_speak():
        return getattr(failure.error, "_is_reported_elsewhere", False)
    sys.stdout.flush()
    site = failure_site(failure.trace)
    facts, text = describe_failure(*failure, site)
    _leave(f"ended with {failure.kind.__name__}", site, facts, text)
    return True


def _grace_s() -> float:
    return settings_at_the_end().exit_grace_s


def _leave(what: str, site: str, facts: dict[str, Any], text: str | None) -> None:
    with Interruption() as interruption:
        _part(what, site, facts, text, interruption)


def _part(
    what: str, site: str, facts: dict[str, Any], text: str | None, interruption: Interruption
) -> None:
    own.has_left = True
    # Before the others hear that this rank has ended, so that rank 0 has all lines at the end.
    logs.hand_over()
    # The largest group speaks: its rank numbers are those that the user knows.
    channels = sorted(own.channels, key=lambda channel: -channel.size)
    stuck = next((channel for channel in channels if channel.stuck_at is not None), None)
    partings = []
    for channel in channels:
        cause = bool(facts.get("cause"))
        report = channel.report(what, site, ended=True, cause=cause) | facts
        partings.append(Parting(channel, report, stuck is not None))
    among = channels[0].flight.channel if channels[0].size < own.world_size else ""
    limit_s = _grace_s() + _extra_s(channels[0], stuck)
    try:
        ends_alone = not _others_end(partings, text is not None, limit_s, interruption)
    except BaseException as error:  # of a signal's handler: the farewell cannot go on
        print_line(f"{type(error).__name__} while waiting for other ranks to end: {text_of(error)}")
        ends_alone = True
    logs.close()
    if ends_alone:
        exit_hooks.finish_work()
        if any(channel.is_reported for channel in channels):
            # Whoever told it ends the job for all, once the others have left their records.
            time.sleep(_TELL_S)
        else:
            _print_failures(partings[0], text, among)
            if text is None:
                _explain_the_end(channels)
            _tell_the_others(channels)
        partings[0].channel.transport.abort(1)
    has_printed = _print_failures(partings[0], text, among)
    if has_printed and among:
        exit_hooks.finish_work()
        own.abort(1)  # ranks of no channel of this one would go on, and never hear of it
    for channel in channels:
        if not channel.pending:
            channel.transport.drain()
    if own.monitor is not None:
        own.monitor.say_goodbye()


def _others_end(
    partings: Sequence[Parting], has_failed: bool, limit_s: float, interruption: Interruption
) -> bool:
    """Wait for the others, and return whether all have ended in time.

    Only a rank that has failed, is stuck or interrupted limits its patience, and not while rank 0
    is at work on what must not be lost.
    """
    since = time.monotonic()
    is_hurried = is_idle = False
    # A list, because every parting has to be polled, not only the first that is not done.
    while [parting for parting in partings if not parting.is_done()]:
        if interruption.is_asked and not is_hurried:
            # The others have been interrupted too, and come now or never.
            is_hurried, since = True, time.monotonic()
        may_abort = has_failed or is_hurried or any(each.is_stuck for each in partings)
        if any(each.channel.is_reported for each in partings):
            return False
        if may_abort and not is_idle and time.monotonic() - since > limit_s - _ASK_S:
            is_idle = not any(_is_root_at_work(each.channel) for each in partings)
            if not is_idle:
                since = time.monotonic() - limit_s + _TURN_S
        if is_idle and time.monotonic() - since > limit_s:
            return False
        time.sleep(_POLL_S)
    return True


def _print_failures(parting: Parting, text: str | None, among: str) -> bool:
    channel = parting.channel
    return print_failures(parting.reports, channel.rank, channel.size, text, among)


def _is_root_at_work(channel: Channel) -> bool:
    """Return whether to end the job now would lose what rank 0 is about to finish."""
    return channel.peers is not None and channel.peers.is_root_at_work()


def _explain_the_end(channels: Sequence[Channel]) -> None:
    """Say why this rank ends the job, though it has caught all errors."""
    largest = channels[0]
    if all(channel.stuck_at is None for channel in channels) and largest.peers is not None:
        _, table = largest.peers.describe("the end of the program")
        print_line(f"interrupted while ranks were still at work:\n{table}")
    for channel in channels:
        if channel.stuck_at is not None and channel.closed is not None:
            who, why = rank_list([channel.rank]), str(channel.closed).split("\n")[0].rstrip(":")
            print_line(f"{who} left the program and ends the job, as the ranks have parted. {why}")
            return


def _tell_the_others(channels: Sequence[Channel]) -> None:
    """Let ranks that fail with this one be quiet, and end at once."""
    for channel in channels:
        if channel.peers is not None:
            # Time enough for them to leave their flight records.
            channel.peers.tell_end_of_job(_TELL_S)


def _extra_s(largest: Channel, stuck: Channel | None) -> float:
    """Return how much longer than the grace this rank waits before it ends the job.

    Ranks that are stuck in one round cannot hear of each other over MPI. The lowest ends the job
    for all, soon: nobody can be told any more. The others wait whether it does.
    """
    if stuck is None or stuck.peers is None:
        return _TURN_S * min(largest.rank, _MAX_TURNS)
    if stuck.peers.lowest_here() < stuck.rank:
        return _TURN_S
    # Other groups may be stuck at the same time, each with a lowest rank of its own.
    soon_s = _SOON_S + _SHORT_TURN_S * min(largest.rank, _MAX_TURNS)
    return min(0.0, soon_s - _grace_s())
