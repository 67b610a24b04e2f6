"""Watchdog: thread that ends the job if a stopped rank holds up data.

Ranks that have agreed wait for each other's data without a limit, inside the MPI library, in shared
memory or on a device. No exception can be raised there, and a long wait can be correct. After the
time limit of an agreement the watchdog asks the other ranks, and ends the job if one is suspended
or does not answer. If a device is waiting, the watchdog aborts the collectives of the device, and
raises the error in the thread of the program that waits for them.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from mpistrat.agreement.channel import Channel
from mpistrat.errors import CollectiveTimeoutError
from mpistrat.failures import logs
from mpistrat.failures.flight_dumps import on_channel_failure
from mpistrat.system.background import raise_in_thread
from mpistrat.system.callsite import site_of_thread

_LONGEST_TICK_S = 5.0
_STANDARD_ERROR = 2
_TICKS = 4
"""Number of checks within the time limit."""


class DeviceWork(Protocol):
    """Collectives that are running on devices."""

    def waits_since(self) -> float | None:
        """Return when the oldest one began, by the monotonic clock; ``None`` if there is none."""

    def abort(self, error: CollectiveTimeoutError) -> None:
        """End all running collectives, with undefined results. Later ones raise `error`."""


@dataclass
class _Watched:
    """Channel, and the time since which it has waited for the same data."""

    channel: Channel
    limit_s: float
    number: int = -1
    since_s: float = 0.0
    device: DeviceWork | None = None

    def look(self) -> None:
        """End the job if this rank has waited for the same data for longer than the limit."""
        number, now = self.channel.ledger.sequence, time.monotonic()
        if self.device is not None and self._device_waits():
            error = _error_if_stopped(self.channel, self.limit_s, self._device_waits)
            if error is not None:
                _abort(self.channel, self.device, error, self.limit_s)
                self.device = None
        if not self.channel.is_moving_data():
            self.number = -1
        # This is a new collective, so the others have arrived since. Only a wait within a single
        # collective counts.
        elif self.number != number:
            self.number, self.since_s = number, now
        elif now - self.since_s > self.limit_s:
            error = _error_if_stopped(self.channel, self.limit_s, self.channel.is_moving_data)
            if error is not None:
                _end(error)

    def _device_waits(self) -> bool:
        """Return whether the device has waited for other devices for longer than the limit."""
        since_s = None if self.device is None else self.device.waits_since()
        return since_s is not None and time.monotonic() - since_s > self.limit_s


class _Watchdog:
    """State of the watchdog thread, which watches all channels of this process."""

    def __init__(self) -> None:
        self.watched: list[_Watched] = []
        self.is_running = False


_watchdog = _Watchdog()


def start_watchdog(channel: Channel) -> None:
    """Watch the data of `channel`, if the channel has a limit and can ask the other ranks."""
    if channel.peers is None or channel.timeout_s is None:
        return
    _watchdog.watched.append(_Watched(channel, channel.timeout_s))
    if not _watchdog.is_running:
        _watchdog.is_running = True
        threading.Thread(target=_watch, name="mpistrat-watchdog", daemon=True).start()


def watch_device(channel: Channel, device: DeviceWork) -> None:
    """Watch also the collectives between the devices of `channel`."""
    for each in _watchdog.watched:
        if each.channel is channel:
            each.device = device


def stop_watchdog(channel: Channel) -> None:
    """Stop watching the data of `channel`."""
    # Create a new list, because the thread may be looping over the old one.
    _watchdog.watched = [each for each in _watchdog.watched if each.channel is not channel]


def _watch() -> None:
    while True:
        ticks_s = [each.limit_s / _TICKS for each in _watchdog.watched]
        time.sleep(min([_LONGEST_TICK_S, *ticks_s]))
        for each in _watchdog.watched:
            each.look()


def _error_if_stopped(
    channel: Channel, limit_s: float, waits: Callable[[], bool]
) -> CollectiveTimeoutError | None:
    """Return the error if the data will never arrive, or ``None`` if it may."""
    if channel.peers is None:
        return None
    table = channel.peers.describe_lost()
    if not table:
        return None
    channel.peers.wait_for_work()  # rank 0 may be finishing a file
    # Asking takes seconds, and the data may have arrived in the meantime.
    if not waits():
        return None
    site = site_of_thread(channel.thread)
    error = CollectiveTimeoutError(
        f"The data awaited at {site} did not come in {limit_s:g} s:\n{table}"
    )
    on_channel_failure(error)
    return error


def _abort(
    channel: Channel, device: DeviceWork, error: CollectiveTimeoutError, limit_s: float
) -> None:
    """Raise `error` in the thread that waits for `device`, or end this process at the limit."""
    # The wait must not end before the exception is pending, because its result is wrong.
    is_raised = raise_in_thread(channel.thread, error)
    # CuPy holds the interpreter's lock while it aborts NCCL, and NCCL may then wait for ranks that
    # are gone. Only a timer in C can end the process in this case; it prints the stacks first.
    faulthandler.dump_traceback_later(limit_s, exit=True, file=_STANDARD_ERROR)
    device.abort(error)
    faulthandler.cancel_dump_traceback_later()
    if not is_raised.wait(limit_s):
        _end(error)


def _end(error: CollectiveTimeoutError) -> None:
    """End this process, which cannot raise `error`."""
    logs.print_last(f"CollectiveTimeoutError: {error}")
    # The thread of the program is inside MPI or a loop in C, where no exception can be raised.
    # `sys.exit` would end only this thread.
    os._exit(1)
