"""Call site: the place in the user's code where a call was made."""

from __future__ import annotations

import os
import sys
import traceback
from types import FrameType, TracebackType

__all__ = [
    "UNKNOWN_PLACE",
    "call_site",
    "ends_program",
    "failure_site",
    "is_inside",
    "is_installed",
    "is_own_code",
    "is_user_code",
    "site_of",
]

UNKNOWN_PLACE = "unknown place"

_PACKAGE = os.path.abspath(sys.modules[__name__.partition(".")[0]].__path__[0]) + os.sep
_TESTING = _PACKAGE + "testing" + os.sep


def is_user_code(filename: str) -> bool:
    """Return whether `filename` is outside this package and the helpers that call it back."""
    if filename.startswith("<frozen"):
        return False
    return not is_inside(filename) and os.path.basename(filename) != "contextlib.py"


def is_inside(filename: str) -> bool:
    """Return whether `filename` is a part of this package, `testing` excepted."""
    return filename.startswith(_PACKAGE) and not filename.startswith(_TESTING)


def call_site() -> str:
    """Return ``file.py:LINE`` of the innermost frame of user code."""
    return site_of(sys._getframe(1))


def site_of(frame: FrameType | None) -> str:
    """Return `call_site` as seen from `frame`, from any thread."""
    # Frames of Python and installed packages count only where no other file outside this package
    # is on the stack.
    installed = None
    while frame is not None:
        filename = frame.f_code.co_filename
        if is_user_code(filename):
            place = f"{os.path.basename(filename)}:{frame.f_lineno}"
            if not is_installed(filename):
                return place
            installed = installed or place
        frame = frame.f_back
    return installed or UNKNOWN_PLACE


def is_own_code(filename: str) -> bool:
    """Return whether `filename` is the user's: no part of this package, Python or packages."""
    return is_user_code(filename) and not is_installed(filename)


def failure_site(trace: TracebackType | None) -> str:
    """Return ``file.py:LINE`` of the innermost frame of user code in a traceback."""
    # Library code that the user called (NumPy, the standard library) is skipped where a frame of
    # the user's files is known.
    frames = [frame for frame in traceback.extract_tb(trace) if is_user_code(frame.filename)]
    own = [frame for frame in frames if not is_installed(frame.filename)]
    for frame in reversed(own or frames):
        return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return UNKNOWN_PLACE


def ends_program(trace: TracebackType | None) -> bool:
    """Return whether an exception with this `trace` has ended the program."""
    # Extension modules report errors that they cannot raise, as where memory is freed, to
    # `sys.excepthook` too, and the program continues. A program that does not compile has no trace.
    frames = [frame for frame, _ in traceback.walk_tb(trace)]
    return not frames or any(
        frame.f_code.co_name == "<module>" and frame.f_globals.get("__name__") == "__main__"
        for frame in frames
    )


def is_installed(filename: str) -> bool:
    """Return whether `filename` belongs to Python or to a package in its folders."""
    return (
        "site-packages" in filename
        or "dist-packages" in filename
        or filename.startswith((os.path.dirname(os.__file__), "<"))
    )
