"""Memory that the ranks of a node share: an anonymous file that nothing leaves behind."""

from __future__ import annotations

import contextlib
import mmap
import os
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["share_memory_file"]

_TOKEN_BYTES = 16


def share_memory_file(comm: MPI.Comm, num_bytes: int) -> np.ndarray | None:
    """Return zeros that all ranks of `comm`, on one node, map, if they can. **Collective**.

    Each page lies near the core that writes to it first. The system takes all back when the last
    process unmaps it, also one that is killed.
    """
    made = None
    if comm.rank == 0:
        with contextlib.suppress(OSError, AttributeError, KeyError):  # Linux has memfd_create
            if num_bytes <= _free_bytes():  # else a rank would be killed where it writes to it
                made = _MemoryFile.new(max(num_bytes, _TOKEN_BYTES))
    # Another rank may see another /proc, as in a container: the token proves the file.
    place: tuple[str, bytes] | None = comm.bcast(made and (made.path, made.token))
    memory = None
    if place is not None:
        with contextlib.suppress(OSError, ValueError):
            memory = _mapped(*place, max(num_bytes, _TOKEN_BYTES))
    seen = comm.allgather(memory is not None)
    if made is not None:
        made.close()
    if memory is None or not all(seen):  # on all ranks, or on none
        return None
    memory[:_TOKEN_BYTES] = 0
    comm.Barrier()
    return memory[:num_bytes]


def _free_bytes() -> int:
    """Return how much memory the node can still give, as Linux estimates it."""
    with open("/proc/meminfo") as file:
        fields = dict(line.split(":") for line in file)
    return sum(int(fields[name].split()[0]) for name in ("MemAvailable", "SwapFree")) * 1024


class _MemoryFile:
    """The file behind the memory, open as long as other ranks may map it."""

    def __init__(self, handle: int, token: bytes) -> None:
        self._handle = handle
        self.path = f"/proc/{os.getpid()}/fd/{handle}"
        self.token = token

    @classmethod
    def new(cls, num_bytes: int) -> _MemoryFile:
        made = cls(os.memfd_create("mpistrat"), os.urandom(_TOKEN_BYTES))
        os.truncate(made._handle, num_bytes)
        os.pwrite(made._handle, made.token, 0)
        return made

    def close(self) -> None:
        os.close(self._handle)


def _mapped(path: str, token: bytes, num_bytes: int) -> np.ndarray | None:
    """Return the memory behind `path`, ``None`` if that is another file here."""
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(handle).st_size != num_bytes or os.pread(handle, len(token), 0) != token:
            return None
        return np.frombuffer(mmap.mmap(handle, num_bytes), np.uint8)
    finally:
        os.close(handle)
