"""The transport over MPI, on host memory; blocking reductions also on that of devices.

This module starts MPI when it is imported, so only an MPI strategy imports it.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrat.arrays import synchronize
from mpistrat.comm.operators import operator
from mpistrat.comm.parts import in_parts, plan_windows
from mpistrat.comm.pool import Pool
from mpistrat.comm.rounds import NonblockingRound, PersistentRound, SharedRound
from mpistrat.comm.sharing import share_memory
from mpistrat.comm.solo import SoloRound
from mpistrat.comm.transport import Carrier, NodeReducer, Occupancy, Round
from mpistrat.comm.whole import WholeReducer
from mpistrat.options import ReduceOp

__all__ = ["MpiTransport"]


class MpiTransport:
    """The ranks of an MPI communicator.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        Used for our own messages alone: the caller passes a private duplicate.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self._under_way: list[tuple[list[MPI.Request], np.ndarray, np.ndarray]] = []
        self.rank = comm.rank
        self.size = comm.size
        self.node: NodeReducer | None = None
        self.carrier: Carrier | None = None
        self.occupancy = Occupancy()
        self._sharing = share_memory(comm, WholeReducer(self), self.occupancy)
        arena = None
        if self._sharing is not None:
            self.node = self._sharing.reducer
            arena = self._sharing.memory.arena if self._sharing.holds_all else None
        self.pool = Pool(arena)

    def all_reduce(self, op: ReduceOp, source: np.ndarray, target: np.ndarray) -> None:
        """Reduce `source` into `target`. **Collective**."""
        synchronize(source)
        with self.occupancy:
            for part, goal in _pairs(source, target):
                self.comm.Allreduce(part, goal, operator(op, goal))

    def start_all_reduce(
        self, op: ReduceOp, source: np.ndarray, target: np.ndarray
    ) -> Callable[[], object]:
        """Begin to reduce `source` into `target`; the function returned waits for the end."""
        # MPI writes to the target until the end, also where the user has dropped the handle.
        self._under_way = [each for each in self._under_way if not MPI.Request.Testall(each[0])]
        pairs = _pairs(source, target)
        requests = [self.comm.Iallreduce(part, goal, operator(op, goal)) for part, goal in pairs]
        self._under_way.append((requests, source, target))
        return functools.partial(self._wait, requests)

    def _wait(self, requests: list[MPI.Request]) -> None:
        with self.occupancy:
            MPI.Request.Waitall(requests)

    def drain(self) -> None:
        """Wait for every reduction that is under way. **Collective**."""
        for requests, *_ in self._under_way:
            self._wait(requests)
        self._under_way.clear()
        if self.node is not None:
            self.node.drain()

    def reduce(self, op: ReduceOp, buffer: np.ndarray, root: int) -> None:
        """Reduce `buffer` in place on `root`. **Collective**."""
        synchronize(buffer)
        with self.occupancy:
            for part in in_parts(buffer):
                if self.rank == root:
                    self.comm.Reduce(MPI.IN_PLACE, part, operator(op, part), root)
                else:
                    self.comm.Reduce(part, None, operator(op, part), root)

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        """Overwrite `buffer` with that of `root`. **Collective**."""
        with self.occupancy:
            for part in in_parts(buffer):
                self.comm.Bcast([_as_bytes(part), MPI.BYTE], root)

    def broadcast_each(self, buffers: Sequence[np.ndarray], roots: Sequence[int]) -> None:
        """Overwrite each of `buffers` with that of its root. **Collective**."""
        requests = [
            self.comm.Ibcast([_as_bytes(part), MPI.BYTE], root)
            for buffer, root in zip(buffers, roots, strict=True)
            for part in in_parts(buffer)
        ]
        self._wait(requests)

    def all_gather(self, part: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        """Return the parts of all ranks, one behind the other. **Collective**."""
        gathered = np.empty(sum(counts), part.dtype)
        with self.occupancy:
            self._collect(self.comm.Allgatherv, part, counts, gathered)
        return gathered

    def gather(self, part: np.ndarray, counts: Sequence[int], root: int) -> np.ndarray | None:
        """Return the parts of all ranks on `root`, one behind the other. **Collective**."""
        gathered = np.empty(sum(counts), part.dtype) if self.rank == root else None
        with self.occupancy:
            self._collect(functools.partial(self.comm.Gatherv, root=root), part, counts, gathered)
        return gathered

    def _collect(
        self,
        move: Callable[[Any, Any], object],
        part: np.ndarray,
        counts: Sequence[int],
        gathered: np.ndarray | None,
    ) -> None:
        """Fill `gathered` with the parts of all ranks, by as many calls of `move` as it takes."""
        windows = plan_windows(counts, part.itemsize)
        for start, lengths in windows:
            send = [_as_bytes(part[start : start + lengths[self.rank]]), MPI.BYTE]
            if gathered is None:
                move(send, None)
            elif len(windows) == 1:
                move(send, _as_parts(gathered, lengths))
            else:
                received = np.empty(sum(lengths), part.dtype)
                move(send, _as_parts(received, lengths))
                pieces = _split(received, lengths)
                for place, piece in zip(_split(gathered, counts), pieces, strict=True):
                    place[start : start + piece.size] = piece

    def all_to_all(self, buffer: np.ndarray, counts: Sequence[int]) -> np.ndarray:
        """Send each rank its part of `buffer`, and return what comes. **Collective**."""
        received = np.empty(self.size * counts[self.rank], buffer.dtype)
        own_counts = [counts[self.rank]] * self.size
        with self.occupancy:
            self.comm.Alltoallv(_as_parts(buffer, counts), _as_parts(received, own_counts))
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


def _pairs(source: np.ndarray, target: np.ndarray) -> list[tuple[Any, np.ndarray]]:
    """Return what MPI takes to reduce `source` into `target`, in parts."""
    parts = in_parts(target)
    if source is target:
        return [(MPI.IN_PLACE, part) for part in parts]
    return list(zip(in_parts(source), parts, strict=True))


def _as_bytes(buffer: np.ndarray) -> np.ndarray:
    return buffer.reshape(-1).view(np.uint8)


def _as_parts(buffer: np.ndarray, counts: Sequence[int]) -> list[object]:
    """Return `buffer` as mpi4py takes it for parts of `counts` elements."""
    num_bytes = [count * buffer.itemsize for count in counts]
    return [_as_bytes(buffer), num_bytes, [0, *itertools.accumulate(num_bytes)][:-1], MPI.BYTE]


def _split(buffer: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    return np.split(buffer, np.cumsum(counts)[:-1])
