"""Call sites: places in the user's code."""

from __future__ import annotations

import enum
import gc
import os
import sys
import threading
import traceback
from types import CodeType, FrameType, TracebackType

UNKNOWN_PLACE = "unknown place"

# From the file, because a rank under `mpistrat watch` loads this module without the package.
_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TESTING = _PACKAGE + "testing" + os.sep
_BESIDE = "mpistrat_torch_autoload.py"
"""The module that is installed next to the package."""


class CodeOwner(enum.Enum):
    """Owner of the code in a file."""

    USER = "the program"
    INSTALLED = "Python or an installed package"
    PACKAGE = "this package, `testing` excepted"
    HELPER = "code between this package and what it calls, such as contextlib"


class _CodeOwners(dict[str, CodeOwner]):
    """Owner of the code in each file, by the file name in code objects."""

    # It is a dict, which is fast, because each collective looks up about ten files. A program has
    # few files, so it stays small.

    def __missing__(self, filename: str) -> CodeOwner:
        owner = self[filename] = _owner_of(filename)
        return owner


code_owners = _CodeOwners()


def _owner_of(filename: str) -> CodeOwner:
    if filename.startswith(_PACKAGE) and not filename.startswith(_TESTING):
        return CodeOwner.PACKAGE
    name = os.path.basename(filename)
    if name == _BESIDE:
        return CodeOwner.PACKAGE
    if filename.startswith("<frozen") or name == "contextlib.py":
        return CodeOwner.HELPER
    # Cython names source files by their path in its project, which an installed package lacks.
    is_of_cython = filename.endswith((".pyx", ".pxd", ".pxi")) and not os.path.exists(filename)
    is_installed = (
        is_of_cython
        or "site-packages" in filename
        or "dist-packages" in filename
        or filename.startswith((os.path.dirname(os.__file__), "<"))
    )
    return CodeOwner.INSTALLED if is_installed else CodeOwner.USER


Place = tuple[CodeType, int] | None
"""Code object and offset of an instruction in it, which is cheap to store and formatted later."""


issuers: dict[int, Place] = {}
"""For threads that work for a call made on a different thread: the place of that call."""


class on_behalf_of:  # noqa: N801  used as a function
    """Context manager in which `call_site` and `users_place` return `place` on this thread."""

    __slots__ = ("_before", "_place", "_thread")

    def __init__(self, place: Place) -> None:
        self._place = place

    def __enter__(self) -> None:
        self._thread = threading.get_ident()
        self._before = issuers.get(self._thread)
        issuers[self._thread] = self._place

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del issuers[self._thread]
        else:
            issuers[self._thread] = self._before


# Looked up once, because each collective compares them.
_USER, _INSTALLED = CodeOwner.USER, CodeOwner.INSTALLED


def users_place(frame: FrameType | None) -> Place:
    """Return the place in the user's code that `call_site` finds from `frame`."""
    if issuers and (place := issuers.get(threading.get_ident())) is not None:
        return place
    installed = None
    while frame is not None:
        code = frame.f_code
        owner = code_owners[code.co_filename]
        if owner is _USER:
            # Return an offset, because computing a line number takes longer and only messages need
            # it.
            return code, frame.f_lasti
        if owner is _INSTALLED and installed is None:
            installed = code, frame.f_lasti
        frame = frame.f_back
    return installed


def format_place(place: Place) -> str:
    """Return ``file.py:LINE`` of a place."""
    if place is None:
        return UNKNOWN_PLACE
    code, offset = place
    lines = (line for start, end, line in code.co_lines() if start <= offset < end and line)
    return f"{os.path.basename(code.co_filename)}:{next(lines, code.co_firstlineno)}"


def call_site() -> str:
    """Return ``file.py:LINE`` of the innermost frame of user code."""
    if issuers and (place := issuers.get(threading.get_ident())) is not None:
        return format_place(place)
    return site_of(sys._getframe(1))


def users_stacklevel() -> int:
    """Return the `stacklevel` at which a warning of the caller points to the user's code."""
    frame, level = sys._getframe(1), 1
    while code_owners[frame.f_code.co_filename] is not _USER:
        if frame.f_back is None:
            return 1
        frame, level = frame.f_back, level + 1
    return level


def frames_of_threads() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by thread; for this thread the caller's frame."""
    # Python 3.10 and 3.11 lock the list of threads here. A garbage collection in this time may run
    # code that waits for a thread that waits for the lock (python/cpython#106883).
    was_on = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames() | {threading.get_ident(): sys._getframe(1)}
    finally:
        if was_on:
            gc.enable()


def frame_of_thread(thread: int) -> FrameType | None:
    """Return the innermost frame of a thread, or of the main thread if it runs no user code."""
    frames = frames_of_threads()
    own, main = frames.get(thread), frames.get(threading.main_thread().ident or 0)
    place = users_place(own)
    is_users = place is not None and code_owners[place[0].co_filename] is CodeOwner.USER
    return own if is_users or main is None else main


def site_of_thread(thread: int) -> str:
    """Return `call_site` for a thread, from the frame that `frame_of_thread` returns."""
    place = issuers.get(thread)
    return site_of(frame_of_thread(thread)) if place is None else format_place(place)


def site_of(frame: FrameType | None) -> str:
    """Return `call_site` for `frame`. May be called from any thread."""
    # Frames of Python and installed packages count only if the stack has no file of the user.
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
    # Skip library code that the user called (NumPy, the standard library) if the traceback has a
    # frame of the user's files.
    frames = traceback.extract_tb(trace)
    for owner in (CodeOwner.USER, CodeOwner.INSTALLED):
        for frame in reversed(frames):
            if code_owners[frame.filename] is owner:
                return f"{os.path.basename(frame.filename)}:{frame.lineno}"
    return UNKNOWN_PLACE
