"""Call site: the place in the user's code where a call was made."""

from __future__ import annotations

import enum
import os
import sys
import traceback
from types import FrameType, TracebackType

__all__ = [
    "UNKNOWN_PLACE",
    "CodeOwner",
    "call_site",
    "code_owners",
    "failure_site",
    "site_of",
]

UNKNOWN_PLACE = "unknown place"

_PACKAGE = os.path.abspath(sys.modules[__name__.partition(".")[0]].__path__[0]) + os.sep
_TESTING = _PACKAGE + "testing" + os.sep


class CodeOwner(enum.Enum):
    """Whose code a file contains."""

    USER = "the program"
    INSTALLED = "Python or an installed package"
    PACKAGE = "this package, `testing` excepted"
    HELPER = "code between this package and what it calls, such as contextlib"


class _CodeOwners(dict[str, CodeOwner]):
    """Whose code is in each file, by its name in code objects."""

    # A dict, as it is fast: each collective looks up about ten files. A program has few.

    def __missing__(self, filename: str) -> CodeOwner:
        owner = self[filename] = _owner_of(filename)
        return owner


code_owners = _CodeOwners()


def _owner_of(filename: str) -> CodeOwner:
    if filename.startswith(_PACKAGE) and not filename.startswith(_TESTING):
        return CodeOwner.PACKAGE
    if filename.startswith("<frozen") or os.path.basename(filename) == "contextlib.py":
        return CodeOwner.HELPER
    is_installed = (
        "site-packages" in filename
        or "dist-packages" in filename
        or filename.startswith((os.path.dirname(os.__file__), "<"))
    )
    return CodeOwner.INSTALLED if is_installed else CodeOwner.USER


def call_site() -> str:
    """Return ``file.py:LINE`` of the innermost frame of user code."""
    return site_of(sys._getframe(1))


def site_of(frame: FrameType | None) -> str:
    """Return `call_site` as seen from `frame`, from any thread."""
    # Frames of Python and installed packages count only where no other file outside this package
    # is on the stack.
    installed = None
    while frame is not None:
        owner = code_owners[frame.f_code.co_filename]
        if owner in (CodeOwner.USER, CodeOwner.INSTALLED):
            place = f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"
            if owner is CodeOwner.USER:
                return place
            installed = installed or place
        frame = frame.f_back
    return installed or UNKNOWN_PLACE


def failure_site(trace: TracebackType | None) -> str:
    """Return ``file.py:LINE`` of the innermost frame of user code in a traceback."""
    # Library code that the user called (NumPy, the standard library) is skipped where a frame of
    # the user's files is known.
    frames = traceback.extract_tb(trace)
    for owner in (CodeOwner.USER, CodeOwner.INSTALLED):
        for frame in reversed(frames):
            if code_owners[frame.filename] is owner:
                return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return UNKNOWN_PLACE
