"""Exit code of this process, where it ends itself: the end of MPI may wait for a dead rank.

Python does not tell anybody the code with which it is about to exit. So this module notes the codes
that the program asks for, and where the program has stopped.
"""

from __future__ import annotations

import builtins
import dis
import logging
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

from mpistrat.mpi.survival import finalize_within, why_not_tolerant
from mpistrat.native import native_library
from mpistrat.system import exit_hooks

_END_S = 5.0
"""For MPI to end, which waits for the other ranks."""
_FINALIZE_S = 1.0
"""The same where ranks are lost, for which it may wait."""

_OUTERMOST = ("<module>", "_run_module_as_main")
"""The outermost code of a program: of a file or of `-c`, and of `-m`."""

_INTERRUPTED = 130
"""The exit code of a program that Ctrl-C has ended, as shells give it."""


class _ExitCode:
    """What is known of the exit code so far."""

    def __init__(self) -> None:
        self.asked: int | None = None
        """What `sys.exit` or `exit` was called with last, whether that was caught or not."""
        self.failed: int | None = None
        """The code of an uncaught exception."""
        self.frame: FrameType | None = None
        """The outermost frame of the program, which stays where the program has stopped."""

    def note_exits(self, leave: Callable[..., Any]) -> Callable[..., Any]:
        """Return `leave`, such as `sys.exit`, as a function that notes its code."""

        def noted(status: Any = None, /) -> Any:
            # The system keeps the low 8 bits of a number. Python prints anything else but None, and
            # exits with 1.
            is_number = isinstance(status, int)
            self.asked = int(status) & 0xFF if is_number else int(status is not None)
            return leave(status)

        noted.__name__, noted.__doc__ = getattr(leave, "__name__", "exit"), leave.__doc__
        return noted

    def note_failure(self, failure: exit_hooks.Failure) -> None:
        """Note an uncaught exception."""
        self.failed = _INTERRUPTED if issubclass(failure.kind, KeyboardInterrupt) else 1

    def code(self) -> int | None:
        """Return the exit code of the program, which is over, or ``None`` if it is unknown."""
        if self.failed is not None:
            return self.failed
        if self.frame is not None and _has_returned(self.frame):
            return 0  # an exit that was asked for before was caught
        return self.asked  # nothing is asked for by `raise SystemExit(3)`


_known = _ExitCode()
_is_noting = _is_kept = False


def note_exit_code(only_if_tolerant: bool = False) -> None:
    """Note from now on the code that the program gives; if asked, only where ranks may be lost."""
    global _is_noting
    if _is_noting or (only_if_tolerant and why_not_tolerant()):
        return
    _is_noting = True
    sys.exit = _known.note_exits(sys.exit)
    for name in ("exit", "quit"):  # which `site` makes
        leave = getattr(builtins, name, None)
        if leave is not None:
            setattr(builtins, name, _known.note_exits(leave))
    exit_hooks.at(exit_hooks.Phase.FAILED, _known.note_failure)
    frame = sys._current_frames().get(threading.main_thread().ident or 0)
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    if frame is not None and frame.f_code.co_name in _OUTERMOST:
        _known.frame = frame  # else the program is over already, and this is one of its exit hooks


def _has_returned(frame: FrameType) -> bool:
    """Return whether the code of a frame has come to its end, and was not left by an exception."""
    # A frame that an exception has left has stopped at an instruction other than a return.
    last = frame.f_lasti
    return last >= 0 and dis.opname[frame.f_code.co_code[last]].startswith("RETURN_")


def end_without_mpi() -> None:
    """Have this process end with the code that the program gives, and not wait for MPI then."""
    global _is_kept
    note_exit_code()
    if not _is_kept:
        _is_kept = True
        exit_hooks.at(exit_hooks.Phase.AFTER_LAST_ROUND, _end)


def bound_end_of_mpi() -> None:
    """Have this process end itself if MPI does not end within some seconds. At the end only."""
    # A rank that is killed in MPI_Finalize of Open MPI may keep the others there forever.
    code, library = _known.code(), native_library()
    if library is not None:
        library.end_within(int(_END_S * 1000), 1 if code is None else code)


def _end() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    code, library = _known.code(), native_library()
    # Only Python knows the code, and before it would end MPI it looks whether that has been done.
    is_left = code is None and library is not None and finalize_within(_FINALIZE_S)
    if not (is_left and library.leave_at_exit()):
        os._exit(1 if code is None else code)
