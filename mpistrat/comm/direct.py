"""The transport over MPI, on host memory; blocking reductions also on that of devices.

This module starts MPI when it is imported, so only an MPI strategy imports it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from mpi4py import MPI

from mpistrat.arrays import synchronize
from mpistrat.comm.rounds import NonblockingRound, PersistentRound, SharedRound
from mpistrat.comm.sharing import share_memory
from mpistrat.comm.solo import SoloRound
from mpistrat.comm.transport import Carrier, NodeReducer, Round
from mpistrat.comm.whole import WholeReducer
from mpistrat.options import ReduceOp

__all__ = ["MpiTransport"]

_OPS = {
    ReduceOp.SUM: MPI.SUM,
    ReduceOp.MIN: MPI.MIN,
    ReduceOp.MAX: MPI.MAX,
    ReduceOp.PROD: MPI.PROD,
}


class MpiTransport:
    """The ranks of an MPI communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Used for our own messages alone: the caller passes a private duplicate.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self._under_way: list[tuple[MPI.Request, np.ndarray, np.ndarray]] = []
        self.rank = comm.rank
        self.size = comm.size
        self.node: NodeReducer | None = None
        self.carrier: Carrier | None = None
        self._sharing = share_memory(comm, WholeReducer(self))
        if self._sharing is not None:
            self.node = self._sharing.reducer

    def all_reduce(self, op: ReduceOp, source: np.ndarray, target: np.ndarray) -> None:
        """Reduce `source` into `target`. **Collective**."""
        synchronize(source)
        self.comm.Allreduce(_unless_same(source, target), target, _OPS[op])

    def start_all_reduce(
        self, op: ReduceOp, source: np.ndarray, target: np.ndarray
    ) -> Callable[[], object]:
        """Begin to reduce `source` into `target`; the function returned waits for the end."""
        # MPI writes to the target until the end, also where the user has dropped the handle.
        self._under_way = [entry for entry in self._under_way if not entry[0].Test()]
        request = self.comm.Iallreduce(_unless_same(source, target), target, _OPS[op])
        self._under_way.append((request, source, target))
        return request.Wait

    def drain(self) -> None:
        """Wait for every reduction that is under way. **Collective**."""
        for request, *_ in self._under_way:
            request.Wait()
        self._under_way.clear()
        if self.node is not None:
            self.node.drain()

    def reduce(self, op: ReduceOp, buffer: np.ndarray, root: int) -> None:
        """Reduce `buffer` in place on `root`. **Collective**."""
        synchronize(buffer)
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

    def round(self, num_words: int) -> Round:
        """Return a new round. **Collective**, without waiting."""
        if self.size == 1:
            return SoloRound(num_words)
        if self._sharing is not None and self._sharing.holds_all:
            self.carrier = SharedRound(self._sharing.memory)
            return self.carrier
        try:
            return PersistentRound(self.comm, num_words)
        except NotImplementedError:
            return NonblockingRound(self.comm, num_words)

    def abort(self, exit_code: int) -> None:
        """End every process of the job. Local."""
        self.comm.Abort(exit_code)


def _unless_same(source: np.ndarray, target: np.ndarray) -> np.ndarray | object:
    return MPI.IN_PLACE if source is target else source


def _as_bytes(buffer: np.ndarray) -> np.ndarray:
    return buffer.reshape(-1).view(np.uint8)


def _as_parts(buffer: np.ndarray, counts: Sequence[int]) -> list[object]:
    """Return `buffer` as mpi4py takes it for parts of `counts` elements."""
    num_bytes = [count * buffer.itemsize for count in counts]
    return [_as_bytes(buffer), num_bytes, [0, *accumulate(num_bytes)][:-1], MPI.BYTE]
