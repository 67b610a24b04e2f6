"""Atomic files, which are complete or absent; their temporary names; removal without waiting."""

from __future__ import annotations

import contextlib
import ctypes
import glob
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any


def write_atomically(
    path: str | os.PathLike[str], content: str | Iterable[str | bytes | memoryview]
) -> None:
    """Write a string, or pieces of text or bytes, to `path`: completely, or not at all."""
    import tempfile  # imported only here, because its imports take longer than writing a file

    target = Path(path)
    # mkstemp chooses an unpredictable name. In a folder to which others may write, somebody could
    # have put a link under a known name.
    handle, name = tempfile.mkstemp(".tmp", f".{target.name}.", target.parent)
    temporary = Path(name)
    try:
        with open(handle, "wb") as file:
            # mkstemp creates files that only their owner may read. Set the usual permissions.
            os.fchmod(file.fileno(), 0o666 & ~umask())
            for piece in [content] if isinstance(content, str) else content:
                file.write(piece.encode() if isinstance(piece, str) else piece)
            file.flush()
            # Flush to disk before the rename. Otherwise a crash of the machine may leave an empty
            # file under the new name.
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


_SYNC_FILE_RANGE_WRITE = 2


def begin_to_flush(handle: int, offset: int, num_bytes: int) -> None:
    """Let the disk work from now on; otherwise it would begin at the fsync at the end."""
    # Errors are not reported here: the fsync reports them.
    if _sync_file_range() is not None:
        _sync_file_range()(handle, offset, num_bytes, _SYNC_FILE_RANGE_WRITE)


@cache
def _sync_file_range() -> Any:
    """Return the function of Linux, ``None`` if the C library has none."""
    function = getattr(ctypes.CDLL(None), "sync_file_range", None)
    if function is not None:
        function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


def umask() -> int:
    """Return the umask: the permissions that new files do not get. mkstemp ignores it."""
    text = Path("/proc/self/status").read_text()
    return int(text.partition("\nUmask:")[2].split()[0], 8)


def replace_file(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename `source` to `target`, and free the space of an old `target` in a thread."""
    with _freed_in_a_thread(target):
        os.replace(source, target)


def remove_file(path: str | os.PathLike[str]) -> None:
    """Remove a file, and free its space in a thread."""
    with _freed_in_a_thread(path):
        os.unlink(path)


@contextlib.contextmanager
def _freed_in_a_thread(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep the file `path` open while its name is removed, and close it in a thread."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # it is absent or unreadable: there is nothing to gain
        yield
        return
    try:
        yield
    finally:
        # The last close frees the blocks, which can take long for a large file.
        thread = threading.Thread(target=os.close, args=(handle,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are too many threads, or the interpreter ends
            os.close(handle)


_SUFFIX = ".partial"
"""Suffix of files that are being written. It is not ``.h5``, so that no pattern matches them."""

_SILENCE_S = 3600.0
"""After this many seconds without a write, a writer on another host counts as dead."""


def this_writer() -> str:
    """Return the name of this process for the names and contents of temporary files."""
    return f"{_host()}.{os.getpid()}"


def affixes(path: Path) -> tuple[str, str]:
    """Return prefix and suffix of temporary names for a file that becomes `path`."""
    return f".{_beginning(path.name)}.{this_writer()}.", _SUFFIX


def _is_dead(writer: str, path: Path) -> bool:
    """Return whether `writer`, the process that wrote `path`, has ended."""
    host, _, pid = writer.rpartition(".")
    if not host or not pid.isdecimal():
        return False
    if host == _host():
        return not _is_alive(int(pid))
    # This process cannot ask about processes of a different host, so only the age of the file
    # counts.
    return time.time() - path.stat().st_mtime > _SILENCE_S


def _beginning(name: str) -> str:
    """Return the beginning of a file name, because temporary names must stay below 255 bytes."""
    return os.fsencode(name)[:80].decode(errors="ignore")


def hidden_beside(path: Path, what: str) -> Path:
    """Return the path of a small file next to `path`, which no pattern matches."""
    return path.with_name(f".{_beginning(path.name)}.{what}{_SUFFIX}")


@contextlib.contextmanager
def claimed(path: Path, limit_s: float) -> Iterator[None]:
    """Lock `path` against other processes that claim it. Take over a claim after `limit_s`."""
    claim, end_s = hidden_beside(path, "commit"), time.monotonic() + limit_s
    while True:
        try:
            # Only one process can create the name (open(2), O_EXCL).
            handle = os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            if time.monotonic() > end_s or _is_abandoned(claim):  # its owner was killed
                claim.unlink(missing_ok=True)
                end_s = time.monotonic() + limit_s  # a different process may claim it first
            time.sleep(0.005)
        else:
            break
    try:
        with contextlib.suppress(OSError), open(handle, "w") as file:  # the disk may be full
            file.write(this_writer())
        yield
    finally:
        claim.unlink(missing_ok=True)


def _is_abandoned(claim: Path) -> bool:
    try:
        return _is_dead(claim.read_text(), claim)
    except OSError:  # it is gone, or belongs to another user
        return False


def remove_leftovers(folder: str | os.PathLike[str], prefix: str = "") -> list[Path]:
    """Remove the temporary files of dead writers, and return their paths."""
    start, end = rf"\.{re.escape(prefix)}.*", re.escape(_SUFFIX)
    written = re.compile(rf"{start}\.(?P<writer>[^.]*\.\d+)\.\w+{end}")
    claim = re.compile(rf"{start}\.commit{end}")
    removed = []
    for path in sorted(Path(folder).glob(f".{glob.escape(prefix)}*{_SUFFIX}")):
        match = written.fullmatch(path.name)
        with contextlib.suppress(OSError):
            if match is not None:
                writer = match["writer"]
            elif claim.fullmatch(path.name):
                writer = path.read_text()
            else:
                continue
            if _is_dead(writer, path):
                path.unlink()
                removed.append(path)
    return removed


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())


def _is_alive(pid: int) -> bool:
    try:
        # Signal 0 checks whether the process exists, and sends nothing (kill(2)).
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
