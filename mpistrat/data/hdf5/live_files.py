"""Live files: one handle in this process of each file that is being written (SWMR)."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import Any

from mpistrat import hdf5
from mpistrat.errors import DataError

# HDF5 gives wrong rows where a file that grows is open twice and one handle looks at it again. So
# all readers share one, which nothing refreshes: it is closed when the last of them is, and the
# next one finds what was written since.
_lock = threading.Lock()
_handles: dict[str, tuple[Any, int]] = {}
"""Open files and how many use them, by path."""


def open_file(path: str, is_live: bool) -> Any:
    """Return an open file, for a live one that of others; `close_file` takes it back."""
    if not is_live:
        return hdf5.open_for_reading(path, DataError)
    key = os.path.realpath(path)
    with _lock:
        file, num_users = _handles.get(key, (None, 0))
        if file is None:
            file = hdf5.open_for_reading(path, DataError, swmr=True)
        _handles[key] = file, num_users + 1
    return file


def close_file(path: str, file: Any, is_live: bool) -> None:
    """Close a file that `open_file` has returned, a live one after its last use."""
    if is_live:
        key = os.path.realpath(path)
        with _lock:
            num_users = _handles[key][1] - 1
            if num_users:
                _handles[key] = file, num_users
                return
            del _handles[key]
    file.close()


@contextlib.contextmanager
def opened_for_reading(path: str, is_live: bool) -> Iterator[Any]:
    """Open a file within the ``with`` block."""
    file = open_file(path, is_live)
    try:
        yield file
    finally:
        close_file(path, file, is_live)
