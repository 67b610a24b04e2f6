"""Atomic files: complete or absent, removed without a wait, and their temporary names."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path


def write_atomically(
    path: str | os.PathLike[str], content: str | Iterable[str | bytes | memoryview]
) -> None:
    """Write a text, or pieces of text or bytes, to `path`: complete, or not at all."""
    import tempfile  # not with the package: what it loads takes longer than to write a file

    target = Path(path)
    # An unpredictable name: in a folder that others may write to, a link could lie in wait.
    handle, name = tempfile.mkstemp(".tmp", f".{target.name}.", target.parent)
    temporary = Path(name)
    try:
        with open(handle, "wb") as file:
            # mkstemp creates files that only their owner may read. This gives them the usual
            # permissions.
            os.fchmod(file.fileno(), 0o666 & ~umask())
            for piece in [content] if isinstance(content, str) else content:
                file.write(piece.encode() if isinstance(piece, str) else piece)
            file.flush()
            # Before the rename: otherwise a crash of the machine may leave the new name with no
            # content.
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def umask() -> int:
    """Return the permissions that new files do not get, which mkstemp does not ask for."""
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
    """Keep the file `path` open while its name is removed: the last close frees its space."""
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
        except RuntimeError:  # there are too many, or the interpreter ends
            os.close(handle)


_SUFFIX = ".partial"
"""Ending of files that are being written. Never ``.h5``, so that no pattern picks them up."""

_SILENCE_S = 3600.0
"""After this many seconds without a write, the writer on another host has died."""


def this_writer() -> str:
    """Return what stands for this process in the names and texts of temporary files."""
    return f"{_host()}.{os.getpid()}"


def affixes(path: Path) -> tuple[str, str]:
    """Return the start and the end of temporary names for a file that becomes `path`."""
    return f".{_beginning(path.name)}.{this_writer()}.", _SUFFIX


def _is_dead(writer: str, path: Path) -> bool:
    """Return whether the process that `this_writer` named, which wrote `path`, has ended."""
    host, _, pid = writer.rpartition(".")
    if not host or not pid.isdecimal():
        return False
    if host == _host():
        return not _is_alive(int(pid))
    # Processes of a different host cannot be asked, so only the age of the file counts.
    return time.time() - path.stat().st_mtime > _SILENCE_S


def _beginning(name: str) -> str:
    """Return the beginning of a file's name: temporary names must stay below 255 bytes."""
    return os.fsencode(name)[:80].decode(errors="ignore")


def hidden_beside(path: Path, what: str) -> Path:
    """Return the path of a small file beside `path`, which no pattern picks up."""
    return path.with_name(f".{_beginning(path.name)}.{what}{_SUFFIX}")


@contextlib.contextmanager
def claimed(path: Path, limit_s: float) -> Iterator[None]:
    """Keep other processes out that claim `path` too, which takes none of them longer."""
    claim, end_s = hidden_beside(path, "commit"), time.monotonic() + limit_s
    while True:
        try:
            # Only one process can create the name (open(2), O_EXCL).
            handle = os.open(claim, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            if time.monotonic() > end_s or _is_abandoned(claim):  # who had it was killed
                claim.unlink(missing_ok=True)
                end_s = time.monotonic() + limit_s  # another may take it before this one
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
    except OSError:  # it is gone, or of another user
        return False


def remove_leftovers(folder: str | os.PathLike[str], prefix: str = "") -> list[Path]:
    """Remove the temporary files of writers that are dead, and return their paths."""
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
