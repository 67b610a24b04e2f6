"""The transport over MPI, on host memory.

This module starts MPI when it is imported, so only an MPI strategy imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from mpi4py import MPI

from mpistrat.options import ReduceOp

__all__ = ["MpiTransport"]

_OPS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.PROD: MPI.PROD,
}


class _PersistentRound:
    """A round over a persistent collective (MPI 4.1, section 6.13), set up once."""

    def __init__(self, comm: MPI.Intracomm, num_words: int) -> None:
        self.send = np.zeros(num_words, np.uint64)
        self.receive = np.zeros(num_words, np.uint64)
        self._request = comm.Allreduce_init(self.send, self.receive, MPI.MAX)
        self.start = self._request.Start
        self.done = self._request.Test


class _NonblockingRound:
    """The same for libraries older than MPI 4.0."""

    def __init__(self, comm: MPI.Intracomm, num_words: int) -> None:
        self.send = np.zeros(num_words, np.uint64)
        self.receive = np.zeros(num_words, np.uint64)
        self._comm = comm
        self._request = MPI.REQUEST_NULL

    def start(self) -> None:
        self._request = self._comm.Iallreduce(self.send, self.receive, MPI.MAX)

    def done(self) -> bool:
        return self._request.Test()


class MpiTransport:
    """The ranks of an MPI communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Used for our own messages alone: the caller passes a private duplicate.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self._under_way: list[tuple[MPI.Request, np.ndarray]] = []
        self.rank = comm.rank
        self.size = comm.size

    def all_reduce(self, op: ReduceOp, buffer: np.ndarray) -> None:
        """Reduce `buffer` in place. **Collective**."""
        self.comm.Allreduce(MPI.IN_PLACE, buffer, _OPS[op])

    def start_all_reduce(self, op: ReduceOp, buffer: np.ndarray) -> Callable[[], object]:
        """Begin to reduce `buffer` in place; the function returned waits for the end."""
        # MPI writes to the buffer until the end, also where the user has dropped the handle.
        self._under_way = [entry for entry in self._under_way if not entry[0].Test()]
        request = self.comm.Iallreduce(MPI.IN_PLACE, buffer, _OPS[op])
        self._under_way.append((request, buffer))
        return request.Wait

    def drain(self) -> None:
        """Wait for every reduction that is under way. **Collective**."""
        for request, _ in self._under_way:
            request.Wait()
        self._under_way.clear()

    def reduce(self, op: ReduceOp, buffer: np.ndarray, root: int) -> None:
        """Reduce `buffer` in place on `root`. **Collective**."""
        if self.rank == root:
            self.comm.Reduce(MPI.IN_PLACE, buffer, _OPS[op], root)
        else:
            self.comm.Reduce(buffer, None, _OPS[op], root)

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        """Overwrite `buffer` with that of `root`. **Collective**."""
        self.comm.Bcast([_as_bytes(buffer), MPI.BYTE], root)

    def all_gather(self, part: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        """Return the parts of all ranks, one behind the other. **Collective**."""
        gathered = np.empty(sum(counts), part.dtype)
        self.comm.Allgatherv([_as_bytes(part), MPI.BYTE], _as_parts(gathered, counts))
        return gathered

    def gather(self, part: np.ndarray, counts: Sequence[int], root: int) -> np.ndarray | None:
        """Return the parts of all ranks on `root`, one behind the other. **Collective**."""
        send = [_as_bytes(part), MPI.BYTE]
        if self.rank != root:
            self.comm.Gatherv(send, None, root)
            return None
        gathered = np.empty(sum(counts), part.dtype)
        self.comm.Gatherv(send, _as_parts(gathered, counts), root)
        return gathered

    def all_to_all(self, buffer: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        """Send each rank its part of `buffer`, and return what comes. **Collective**."""
        received = np.empty(self.size * counts[self.rank], buffer.dtype)
        self.comm.Alltoallv(
            _as_parts(buffer, counts), _as_parts(received, [counts[self.rank]] * self.size)
        )
        return received

    def round(self, num_words: int) -> _PersistentRound | _NonblockingRound:
        """Return a new round. **Collective**, without waiting."""
        try:
            return _PersistentRound(self.comm, num_words)
        except NotImplementedError:
            return _NonblockingRound(self.comm, num_words)

    def abort(self, exit_code: int) -> None:
        """End every process of the job. Local."""
        self.comm.Abort(exit_code)


def _as_bytes(buffer: np.ndarray) -> np.ndarray:
    return buffer.reshape(-1).view(np.uint8)


def _as_parts(buffer: np.ndarray, counts: Sequence[int]) -> list[object]:
    """Return `buffer` as mpi4py takes it for parts of `counts` elements."""
    num_bytes = [count * buffer.itemsize for count in counts]
    return [_as_bytes(buffer), num_bytes, [0, *accumulate(num_bytes)][:-1], MPI.BYTE]
