"""Atomic files: complete or absent, and removed without a wait."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["remove_file", "replace_file", "write_atomically"]


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
            os.fchmod(file.fileno(), 0o666 & ~_umask())
            for piece in [content] if isinstance(content, str) else content:
                file.write(piece.encode() if isinstance(piece, str) else piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _umask() -> int:
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
        thread = threading.Thread(target=os.close, args=(handle,), daemon=True)
        try:
            thread.start()
        except RuntimeError:  # there are too many, or the interpreter ends
            os.close(handle)
