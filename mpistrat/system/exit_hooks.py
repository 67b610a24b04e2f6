"""Exit hooks: actions that this process runs at its end, in ordered phases.

All code that runs at the end registers here with `at`: this module has the only `sys.excepthook`
and the only `atexit` function of the package. After an uncaught exception, FAILED runs first, and
then the report of `report_by`. Every end runs the phases from BEFORE_LAST_ROUND on. Once a rank has
reported its end, the others may end it at any time. After its last round it knows that all others
have ended.
"""

from __future__ import annotations

import atexit
import contextlib
import enum
import io
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any, NamedTuple

_logger = logging.getLogger("mpistrat")


class Phase(enum.Enum):
    """Phases of the end, in this order. Actions of the same phase are independent."""

    FAILED = "an uncaught exception has ended the program, and no other rank knows it yet"
    BEFORE_LAST_ROUND = "the program is over, and the others may end this process once they know"
    LAST_ROUND = "the others learn of the end, and this rank waits for them"
    AFTER_LAST_ROUND = "all ranks have ended, as far as this one knows"
    BEFORE_ABORT = "in place of the last two: this rank aborts the job, and must lose nothing"


_AT_EXIT = (Phase.BEFORE_LAST_ROUND, Phase.LAST_ROUND, Phase.AFTER_LAST_ROUND)


class Failure(NamedTuple):
    """An uncaught exception, with the arguments of `sys.excepthook`."""

    kind: type[BaseException]
    error: BaseException
    trace: TracebackType | None


class Interruption:
    """Context manager in which SIGINT is recorded and raises nothing."""

    def __init__(self) -> None:
        self.is_asked = False
        """Whether SIGINT has arrived."""
        self._previous: Any = None

    def __enter__(self) -> Interruption:
        # Only the main thread may change handlers, and only it runs them.
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if callable(previous):  # otherwise the program ignores SIGINT
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


class _Hooks:
    def __init__(self) -> None:
        self.actions: dict[Phase, list[Callable[..., object]]] = {phase: [] for phase in Phase}
        self.holds: list[Callable[[], bool]] = []
        self.report: Callable[[Failure], bool] = lambda failure: False
        self.previous_hook: Any = None
        self.is_registered = False
        os.register_at_fork(after_in_child=self.clear)

    def clear(self) -> None:
        """Remove all actions, because a fork is not a rank."""
        self.actions = {phase: [] for phase in Phase}
        self.holds = []

    def run(self, phase: Phase, *arguments: object) -> None:
        """Run all actions of `phase`, even if some fail."""
        # Iterate over a copy, because an action may register further ones.
        for action in tuple(self.actions[phase]):
            try:
                action(*arguments)
            except BaseException as failure:  # the other actions must run anyway
                _logger.warning("%s while leaving: %s", type(failure).__name__, failure)


_hooks = _Hooks()


def at(phase: Phase, action: Callable[..., object]) -> None:
    """Register `action` for `phase`. It gets the `Failure` in `FAILED`, otherwise no argument."""
    if not _hooks.is_registered:
        _hooks.is_registered = True
        atexit.register(_at_exit)
    _hooks.actions[phase].append(action)


def hold_while(is_at_work: Callable[[], bool]) -> None:
    """Keep other ranks from ending this process while `is_at_work` returns true.

    `is_at_work` is called from any thread.
    """
    _hooks.holds.append(is_at_work)


def is_at_work() -> bool:
    """Return whether this process must finish some work before other ranks may end it."""
    return any(holds() for holds in list(_hooks.holds))


def finish_work() -> None:
    """Finish all work that must not be lost, before this rank aborts the job."""
    _hooks.run(Phase.BEFORE_ABORT)


def report_by(report: Callable[[Failure], bool]) -> None:
    """Let `report` print uncaught exceptions. If it returns False, Python prints them."""
    _hooks.report = report
    if _hooks.previous_hook is None:
        _hooks.previous_hook = sys.excepthook
        # `show` calls the previous hook, which may belong to a debugger or a test runner.
        sys.excepthook = _on_uncaught


def show(failure: Failure, text: str | None = None) -> None:
    """Print `failure` by the previous `sys.excepthook`; print `text` if that is Python's own."""
    if text is None or _hooks.previous_hook is not sys.__excepthook__:
        _hooks.previous_hook(*failure)
    else:
        print(text, end="", file=sys.stderr, flush=True)


def _on_uncaught(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    failure = Failure(kind, error, trace)
    # A second Ctrl-C must not raise in here, because Python would print two more tracebacks.
    with Interruption(), _visible_errors():
        if _ends_program(trace):
            _hooks.run(Phase.FAILED, failure)
            if _hooks.report(failure):
                return
        show(failure)


@contextlib.contextmanager
def _visible_errors() -> Iterator[None]:
    """Let `sys.stderr` write to the terminal, even if a hook around this one collects its text."""
    # Torch's hook prints the collected text later, when this rank may already have ended.
    collected = sys.stderr
    if isinstance(collected, io.StringIO) and sys.__stderr__ is not None:
        sys.stderr = sys.__stderr__
    try:
        yield
    finally:
        sys.stderr = collected


def _ends_program(trace: TracebackType | None) -> bool:
    """Return whether an exception with this `trace` has ended the program."""
    # Extension modules also call `sys.excepthook` for errors that they cannot raise, for example
    # when they free memory, and the program continues. A program that does not compile has no
    # trace.
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    return not frames or any(
        frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
        for frame in frames
    )


def _at_exit() -> None:
    for phase in _AT_EXIT:
        _hooks.run(phase)
