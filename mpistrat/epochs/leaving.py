"""What else is done when a rank leaves: before the farewell, after it, and when it fails.

`farewell` stands between: a rank that has said it may be ended by the others at any time, and
one that is past it knows that all others have said theirs.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from types import TracebackType
from typing import Any

from mpistrat.epochs.callsite import ends_program

__all__ = ["Leaving", "finish_work", "is_at_work", "prepare", "watch_leaving"]

_logger = logging.getLogger("mpistrat")


class Leaving:
    """Somebody who has work to do when this rank leaves. All methods are **Local**."""

    def failed(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        """Act on an uncaught exception, of which the others do not know yet."""

    def before_farewell(self) -> None:
        """Act on the end of the program."""

    def after_farewell(self) -> None:
        """Act once all ranks have ended, as far as this one knows."""

    def before_abort(self) -> None:
        """Finish what must not be lost, because this rank is about to end the job for all."""

    def is_at_work(self) -> bool:
        """Return whether something must not be lost that is not finished. From any thread."""
        return False


class _Process:
    def __init__(self) -> None:
        self.pid = os.getpid()
        self.watchers: list[Leaving] = []
        self.is_prepared = False
        self.previous_hook: Any = None


_process = _Process()


def prepare() -> None:
    """Be there after the farewell. Local; to be called before the first channel is opened."""
    # Functions are called in reverse order of their registration.
    if not _process.is_prepared:
        _process.is_prepared = True
        atexit.register(_for_each, "after_farewell")


def watch_leaving(watcher: Leaving) -> None:
    """Have the methods of `watcher` called when this rank leaves. Local."""
    if not _process.watchers:
        atexit.register(_for_each, "before_farewell")
        _process.previous_hook = sys.excepthook
        sys.excepthook = _on_uncaught
    _process.watchers.append(watcher)


def finish_work() -> None:
    """Have all that must not be lost finished before this rank ends the job. Local."""
    try:
        _for_each("before_abort")
    except Exception as failure:
        _logger.warning("%s while leaving: %s", type(failure).__name__, failure)


def is_at_work() -> bool:
    """Return whether this process has something to finish before it may be ended. Local."""
    return any(watcher.is_at_work() for watcher in list(_process.watchers))


def _on_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    try:
        if ends_program(trace):
            _for_each("failed", kind, error, trace)
    except Exception as failure:
        # The others have to hear of the error all the same.
        _logger.warning("%s while leaving: %s", type(failure).__name__, failure)
    _process.previous_hook(kind, error, trace)


def _for_each(name: str, *arguments: Any) -> None:
    if os.getpid() == _process.pid:  # a fork has nothing to say
        for watcher in _process.watchers:
            getattr(watcher, name)(*arguments)
