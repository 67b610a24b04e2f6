"""Files that appear complete or not at all, and go without a wait."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

__all__ = ["remove_file", "replace_file", "write_atomically"]


def write_atomically(path: str | os.PathLike[str], text: str | Iterable[str]) -> None:
    """Write `text` to `path`: under a temporary name first, then to disk, then renamed.

    An iterable is written piece by piece, so that a long text is never in memory whole.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def replace_file(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    """Rename `source` to `target`, which may be there.

    The space of a large file that was there is given back to the system in a thread.
    """
    with _freed_in_a_thread(target):
        os.replace(source, target)


def remove_file(path: str | os.PathLike[str]) -> None:
    """Remove a file, whose space is given back to the system in a thread."""
    with _freed_in_a_thread(path):
        os.unlink(path)


@contextlib.contextmanager
def _freed_in_a_thread(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep the file `path` open while its name goes: only the last close frees its space."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:  # it is not there, or may not be read: then there is nothing to gain
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
