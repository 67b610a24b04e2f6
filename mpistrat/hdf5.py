"""The door to HDF5: the only module that imports h5py, and only when it is first needed."""

from __future__ import annotations

import contextlib
import errno
import glob
import importlib
import os
import re
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

__all__ = ["create_atomically", "h5py", "open_for_reading", "remove_leftovers"]

TEMPORARY_SUFFIX = ".partial"
"""Ending of files that are being written. Never ``.h5``, so that no pattern picks them up."""


def h5py() -> Any:
    """Return the h5py module, with the filters of hdf5plugin registered. Local."""
    importlib.import_module("hdf5plugin")
    return importlib.import_module("h5py")


def open_for_reading(path: str | os.PathLike[str], error: type[Exception]) -> Any:
    """Return an open ``h5py.File`` of `path`. Local.

    Raises
    ------
    error
        If the file is missing, is not HDF5, is truncated, or cannot be opened.
    """
    path = Path(path)
    if os.path.isdir(path):
        raise error(f"{path} is a folder, but an HDF5 file was expected.")
    if not os.path.exists(path):
        raise error(f"There is no file {path}. Check the path; it is relative to {Path.cwd()}.")
    if not os.path.isfile(path):  # opening a pipe would wait for its other end
        raise error(f"{path} is a device or a pipe, but an HDF5 file was expected.")
    try:
        return h5py().File(path, "r")
    except PermissionError:
        raise error(f"The file {path} cannot be read: permission denied.") from None
    except OSError as reason:
        text = str(reason)
        if "file signature not found" in text:
            raise error(f"{path} is not an HDF5 file ({path.stat().st_size} bytes).") from None
        if "truncated" in text:
            raise error(
                f"{path} is truncated: its end is missing. Copy or write it again."
            ) from None
        raise error(f"{path} cannot be opened as an HDF5 file: {text}.") from reason


@contextlib.contextmanager
def create_atomically(path: str | os.PathLike[str]) -> Iterator[Any]:
    """Open a new ``h5py.File`` that appears under `path` once it is complete and on disk.

    The file is written under a temporary name in the same folder, flushed to disk, renamed
    over `path`, and the folder is flushed too. After an exception `path` is as it was. Where
    `path` is a symbolic link, the file takes the place that it points to. Local.

    Raises
    ------
    OSError, RuntimeError
        If the folder or the file cannot be written: h5py raises either. Also if `path` is a
        folder, a device or a pipe.
    """
    path = Path(os.path.realpath(path) if os.path.islink(path) else path)
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        what = "a folder" if path.is_dir() else "a device or a pipe"
        raise OSError(errno.EEXIST, f"is {what}, but a file is to be written", str(path))
    handle, temporary = tempfile.mkstemp(
        dir=path.parent, prefix=f".{_beginning(path.name)}.{_writer()}.", suffix=TEMPORARY_SUFFIX
    )
    try:
        os.fchmod(handle, 0o666 & ~_umask())
        file = h5py().File(temporary, "w", libver=("v110", "v110"))
        try:
            yield file
        except BaseException:
            with contextlib.suppress(OSError, RuntimeError):  # what a full disk makes of a close
                file.close()
            raise
        file.close()
        os.fsync(handle)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise
    finally:
        os.close(handle)
    _fsync_folder(path.parent)


def remove_leftovers(folder: str | os.PathLike[str], prefix: str = "") -> list[Path]:
    """Remove the temporary files of writers that are dead, and return their paths. Local.

    A writer of another host counts as dead once its file has not changed for an hour.

    Parameters
    ----------
    folder : path
        May be missing.
    prefix : str
        Beginning of the final names to look for.
    """
    pattern = re.compile(
        rf"\.{re.escape(prefix)}.*\.(?P<host>[^.]*)\.(?P<pid>\d+)\.\w+{re.escape(TEMPORARY_SUFFIX)}"
    )
    removed = []
    for path in sorted(Path(folder).glob(f".{glob.escape(prefix)}*{TEMPORARY_SUFFIX}")):
        match = pattern.fullmatch(path.name)
        if match is None:
            continue
        with contextlib.suppress(OSError):
            if match["host"] == _host():
                dead = not _is_alive(int(match["pid"]))
            else:
                dead = time.time() - path.stat().st_mtime > _SILENCE_S
            if dead:
                path.unlink()
                removed.append(path)
    return removed


_SILENCE_S = 3600.0
"""After so many seconds without a write, the writer on another host has died."""


def _host() -> str:
    return re.sub(r"[^A-Za-z0-9_-]", "_", socket.gethostname())


def _beginning(name: str) -> str:
    """Return so much of a file's name that temporary names stay below the limit of 255 bytes."""
    return os.fsencode(name)[:80].decode(errors="ignore")


def _writer() -> str:
    return f"{_host()}.{os.getpid()}"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _umask() -> int:
    umask = os.umask(0)
    os.umask(umask)
    return umask


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
