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

from mpistrat.mpi.survival import revoked_on_loss

if TYPE_CHECKING:
    from mpi4py import MPI

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
    made = MemoryFile.offer(num_bytes, is_sparse) if comm.rank == 0 else None
    place: Place | None = comm.bcast(made and made.place)
    file = None if place is None else map_file(place, num_bytes)
    is_shared = all_of(comm, file is not None)
    if made is not None:
        # Only now: /proc/PID/fd/N exists only as long as this rank has the file open, and by now
        # every other rank has opened it or has failed to.
        made.close()
    return file if is_shared else None  # on all ranks, or on none


def all_of(comm: MPI.Comm, is_true: bool) -> bool:
    """Return whether something is true on all ranks of `comm`. **Collective**."""
    from mpi4py import MPI

    found = np.array([is_true], np.uint8)
    comm.Allreduce(MPI.IN_PLACE, found, MPI.MIN)
    return bool(found[0])


class NodeFile:
    """Zeros that processes of a node share, with a lock; memory is taken where it is written to."""

    def __init__(self, memory: np.ndarray, handle: int | None, token: bytes) -> None:
        self.memory = memory
        self.token = token
        """Tells files apart."""
        self._handle = handle
        if handle is not None:
            # Only the lock needs the handle: a mapping stays valid when it is closed (mmap(2)).
            weakref.finalize(self, os.close, handle)

    @classmethod
    def of_process(cls, num_bytes: int) -> NodeFile:
        """Return memory of this process alone."""
        token, size = os.urandom(_TOKEN_BYTES), max(num_bytes, 1)
        with contextlib.suppress(OSError, AttributeError):
            made = MemoryFile.new(num_bytes)
            try:
                file = map_file(made.place, num_bytes)
            finally:
                made.close()
            if file is not None:
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
            with revoked_on_loss(node):
                tokens = node.allgather(known)
            # Every rank of the node has the tokens of all, so all return here, or none.
            if known is not None and tokens.count(known) == len(tokens):
                return None
            with revoked_on_loss(node):
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


Place = tuple[str, bytes]
"""The path of a file, and the token behind its memory. Another rank may see another /proc, as in a
container: the token proves that it is the same file there."""


class MemoryFile:
    """The file behind the memory, open as long as other ranks may map it."""

    def __init__(self, handle: int, token: bytes) -> None:
        self._handle = handle
        self.place: Place = (f"/proc/{os.getpid()}/fd/{handle}", token)

    @classmethod
    def new(cls, num_bytes: int) -> MemoryFile:
        """Return a file of `num_bytes` zeros and a token."""
        made = cls(os.memfd_create("mpistrat"), os.urandom(_TOKEN_BYTES))
        # The token lies behind the memory, where no rank writes. Pages of a hole read as zeros.
        os.truncate(made._handle, num_bytes + _TOKEN_BYTES)
        os.pwrite(made._handle, made.place[1], num_bytes)
        return made

    @classmethod
    def offer(cls, num_bytes: int, is_sparse: bool = False) -> MemoryFile | None:
        """Return a new file, ``None`` where the node cannot give its memory."""
        with contextlib.suppress(OSError, AttributeError, KeyError):  # Linux has memfd_create
            # Else a rank would be killed where it writes to what is not there.
            if is_sparse or num_bytes <= _free_bytes():
                return cls.new(num_bytes)
        return None

    def close(self) -> None:
        """Keep those from mapping the file who have not yet."""
        os.close(self._handle)


def map_file(place: Place, num_bytes: int) -> NodeFile | None:
    """Return the memory of the file at `place`, ``None`` if there is none, or another."""
    path, token = place
    try:
        # Opened again, so that each process has its own lock on it.
        handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        length = num_bytes + len(token)
        if os.fstat(handle).st_size == length and os.pread(handle, len(token), num_bytes) == token:
            memory = np.frombuffer(mmap.mmap(handle, length), np.uint8)[:num_bytes]
            return NodeFile(memory, handle, token)
    except (OSError, ValueError):
        pass
    except BaseException:
        os.close(handle)
        raise
    os.close(handle)
    return None
