"""Lock of a path against a second writer. The kernel releases it when the process ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from pathlib import Path

from mpistrat.system.files import hidden_beside, this_writer


class WriterLock:
    """The right to write `path`, held by a hidden file beside it."""

    def __init__(self, path: Path) -> None:
        self._lock = hidden_beside(path, "writer")
        while True:
            self._handle = os.open(self._lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as reason:
                owner = os.pread(self._handle, 1000, 0).decode(errors="replace") or "unknown"
                os.close(self._handle)
                if reason.errno not in (errno.EAGAIN, errno.EACCES):
                    raise
                host, _, process = owner.rpartition(".")
                raise OSError(
                    errno.EAGAIN,
                    f"is being written by process {process} on host {host}: one HDF5Writer per "
                    "file. Close that one first, or end its process",
                    str(path),
                ) from None
            # Its owner may have removed the file between the two calls above.
            if self._is_there():
                break
            os.close(self._handle)
        os.ftruncate(self._handle, 0)
        os.pwrite(self._handle, this_writer().encode(), 0)

    def _is_there(self) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.stat(self._lock), os.fstat(self._handle))
        return False

    def release(self) -> None:
        """Remove the hidden file, and let a different process write."""
        # Removed while the lock is held. Later, the name could belong to the file of the next
        # writer.
        self._lock.unlink(missing_ok=True)
        os.close(self._handle)
