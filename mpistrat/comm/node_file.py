"""Memory that the ranks of a node share: an anonymous file that nothing leaves behind."""

from __future__ import annotations

import contextlib
import fcntl
import mmap
import os
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["NodeFile", "share_memory_file"]

_TOKEN_BYTES = 16


def share_memory_file(comm: MPI.Comm, num_bytes: int) -> np.ndarray | None:
    """Return zeros that all ranks of `comm`, on one node, map, if they can. **Collective**.

    Each page lies near the core that writes to it first. The system takes all back when the last
    process unmaps it, also one that is killed.
    """
    file = _share(comm, num_bytes, is_sparse=False)
    return None if file is None else file.memory


def _share(comm: MPI.Comm, num_bytes: int, is_sparse: bool) -> NodeFile | None:
    """Return a file that all ranks of `comm` map, if they can. **Collective**."""
    made = None
    size = max(num_bytes, _TOKEN_BYTES)
    if comm.rank == 0:
        with contextlib.suppress(OSError, AttributeError, KeyError):  # Linux has memfd_create
            # Else a rank would be killed where it writes to what is not there.
            if is_sparse or num_bytes <= _free_bytes():
                made = _MemoryFile.new(size)
    # Another rank may see another /proc, as in a container: the token proves the file.
    place: tuple[str, bytes] | None = comm.bcast(made and (made.path, made.token))
    file = None
    if place is not None:
        with contextlib.suppress(OSError, ValueError):
            file = _mapped(*place, size)
    seen = comm.allgather(file is not None)
    if made is not None:
        made.close()
    if file is None or not all(seen):  # on all ranks, or on none
        return None
    file.memory[:_TOKEN_BYTES] = 0
    comm.Barrier()
    file.memory = file.memory[:num_bytes]
    return file


class NodeFile:
    """Zeros that processes of a node share, with a lock; memory is taken where it is written to."""

    def __init__(self, memory: np.ndarray, handle: int | None, token: bytes) -> None:
        self.memory = memory
        self.token = token
        """Tells files apart."""
        self._handle = handle
        if handle is not None:
            weakref.finalize(self, os.close, handle)

    @classmethod
    def of_process(cls, num_bytes: int) -> NodeFile:
        """Return memory of this process alone."""
        token, size = os.urandom(_TOKEN_BYTES), max(num_bytes, 1)
        with contextlib.suppress(OSError, AttributeError):
            made = _MemoryFile.new(max(num_bytes, _TOKEN_BYTES))
            try:
                file = _mapped(made.path, made.token, max(num_bytes, _TOKEN_BYTES))
            finally:
                made.close()
            if file is not None:
                file.memory[:_TOKEN_BYTES] = 0
                return file
        return cls(np.frombuffer(mmap.mmap(-1, size), np.uint8), None, token)

    @classmethod
    def of_node(cls, comm: MPI.Comm, num_bytes: int, known: bytes | None) -> NodeFile | None:
        """Return memory of the ranks of each node of `comm`. **Collective**.

        ``None`` where they share that of the token `known` already, or cannot share any.
        """
        from mpi4py import MPI

        node = comm.Split_type(MPI.COMM_TYPE_SHARED)
        try:
            tokens = node.allgather(known)
            if known is not None and tokens.count(known) == len(tokens):
                return None
            return _share(node, num_bytes, is_sparse=True)
        finally:
            node.Free()

    @contextlib.contextmanager
    def lock(self) -> Iterator[None]:
        """Keep other processes out; the system unlocks it for a process that is killed."""
        if self._handle is None:
            yield
            return
        fcntl.flock(self._handle, fcntl.LOCK_EX)
        try:
            yield
        finally:
            fcntl.flock(self._handle, fcntl.LOCK_UN)


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


def _mapped(path: str, token: bytes, num_bytes: int) -> NodeFile | None:
    """Return the memory behind `path`, ``None`` if that is another file here."""
    # Opened again, so that each process has its own lock on it.
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        if os.fstat(handle).st_size != num_bytes or os.pread(handle, len(token), 0) != token:
            os.close(handle)
            return None
        memory = np.frombuffer(mmap.mmap(handle, num_bytes), np.uint8)
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(handle)
        raise
    return NodeFile(memory, handle, token)
