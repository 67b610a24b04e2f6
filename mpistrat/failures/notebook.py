"""Notebook cells: one that fails under IPython is reported to the ranks that wait for this one.

In a script an uncaught exception ends the rank, and the others learn of it by its last round. In a
notebook (ipyparallel) the kernel catches the exception of a cell, and the process waits for the
next one: ranks that are in a collective of the failed cell would wait for their time limit. So a
rank whose cell has failed reports it again and again until its next cell begins. Ranks that do not
wait ignore it, because a mistake in a cell of one rank alone, such as a plot, concerns nobody else.
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from mpistrat.agreement.departures import Departure, Failure
from mpistrat.failures.peers import MonitorClient
from mpistrat.failures.process_state import process
from mpistrat.system.callsite import failure_site

__all__ = ["watch_cells"]

_FIRST_S = 1.0
_LONGEST_S = 30.0
"""How often the failure of a cell is reported, at the beginning and later."""
_EVERY_COLLECTIVE = 2**62
"""As a number of failures: no rank waits for this one with more."""


class _Cells:
    """The cells of this process, of which the last one may have failed."""

    def __init__(self) -> None:
        self._shell: Any = None
        self._reports: threading.Thread | None = None
        self._has_next = threading.Event()

    def watch(self, shell: Any) -> None:
        """Have the `shell` of IPython call this object before and after each cell."""
        if shell is not self._shell:
            self._shell = shell
            shell.events.register("pre_run_cell", self.begin)
            shell.events.register("post_run_cell", self.end)

    def begin(self, info: object) -> None:
        """Take back, before a cell, what was reported of the one before."""
        if self._reports is not None:
            self._has_next.set()
            self._reports.join()
            self._reports = None
            # The thread has ended, so that this is the last that the other ranks hear.
            _report(0, "")

    def end(self, result: Any) -> None:
        """Report a cell that has failed until the next one begins."""
        error = result.error_in_exec
        if error is None or self._reports is not None or not process.can_communicate():
            return
        what = f"{type(error).__name__} at {failure_site(error.__traceback__)} has ended its cell"
        if not isinstance(error, Exception):
            _report_interrupted()
        self._has_next.clear()
        self._reports = threading.Thread(target=self._report_often, args=(what,), daemon=True)
        self._reports.start()

    def _report_often(self, what: str) -> None:
        interval_s = _FIRST_S
        while not self._has_next.wait(interval_s) and process.can_communicate():
            _report(_EVERY_COLLECTIVE, what)
            interval_s = min(2 * interval_s, _LONGEST_S)


_cells = _Cells()


def watch_cells() -> None:
    """Report cells that fail from now on, where IPython runs this program."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    if shell is not None:
        _cells.watch(shell)


def _report_interrupted() -> None:
    """Report the channels that an interrupted cell has left, which the end of a script does."""
    for channel in tuple(process.channels):
        if channel.peers is not None and channel.stuck_at is not None:
            channel.peers.report_departure(Departure("left", f"its cell: {channel.closed}"))


def _report(failures: int, what: str) -> None:
    for channel in tuple(process.channels):
        if isinstance(channel.peers, MonitorClient) and channel.closed is None:
            failure = Failure(channel.ledger.sequence, failures, what)
            channel.peers.notify_all("failed", sender=channel.rank, failure=failure, cell=what)
