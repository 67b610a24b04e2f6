"""MPI transport: collectives of a communicator."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from mpistrat.arrays import pieces, synchronize
from mpistrat.comm.hierarchical import share_memory
from mpistrat.comm.ops import mpi_operator
from mpistrat.comm.pool import Pool
from mpistrat.comm.reducers import MpiReducer
from mpistrat.comm.rounds import GatheredRound, MpiRound, SharedRound, mpi_round
from mpistrat.comm.shared_memory import WaitLeft
from mpistrat.comm.transport import NodeReducer, Occupancy, Piggyback, Round, SoloRound
from mpistrat.mpi.survival import failed_ranks, has_failed, lost_ranks, revoke
from mpistrat.mpi.world import library_version, world_ranks, world_size
from mpistrat.options import ReduceOp

_PART_BYTES = 2**28
"""The longest message, whose count any MPI library can hold."""
_BYTE = np.dtype(np.uint8)


class MpiTransport:
    """The ranks of an MPI communicator."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        # Only mpistrat may send messages here, so the caller passes a private duplicate.
        self.comm = comm
        self._rounds: list[MpiRound] = []
        self._under_way: list[tuple[list[MPI.Request], np.ndarray, np.ndarray]] = []
        self.rank = comm.rank
        self.size = comm.size
        self.library = library_version()
        self.world_ranks: Sequence[int] = world_ranks(comm)
        self.world_size = world_size()
        self.node: NodeReducer | None = None
        self.piggyback: Piggyback | None = None
        self.occupancy = Occupancy()
        self._sharing, self.has_fast_paths = share_memory(comm, MpiReducer(self), self.occupancy)
        self.pool = Pool(recycles=self.has_fast_paths)
        if self._sharing is not None:
            self.node = self._sharing.reducer
            self.pool = Pool(self._sharing.memory.arena if self._sharing.holds_all else None)

    def all_reduce(self, op: ReduceOp, source: np.ndarray, target: np.ndarray) -> None:
        """Reduce `source` into `target`. **Collective**."""
        # MPI does not know CUDA streams. It would read device memory before the kernels that write
        # it have ended.
        synchronize(source)
        operator = mpi_operator(op, target)
        with self.occupancy:
            for part, goal in _pairs(source, target):
                self.comm.Allreduce(part, goal, operator)

    def ready(self, op: ReduceOp, dtype: np.dtype) -> Callable[[np.ndarray, np.ndarray], object]:
        """Return a function `(source, target)` that does `all_reduce` by `op` on host arrays."""
        operator, occupancy = mpi_operator(op, np.empty(0, dtype)), self.occupancy
        all_reduce = self.comm.Allreduce

        def move(source: np.ndarray, target: np.ndarray) -> None:
            # The count of an MPI call is a C int.
            if target.nbytes > _PART_BYTES:
                self.all_reduce(op, source, target)
                return
            with occupancy:
                all_reduce(MPI.IN_PLACE if source is target else source, target, operator)

        return move

    def start_all_reduce(
        self, op: ReduceOp, source: np.ndarray, target: np.ndarray
    ) -> Callable[[], object]:
        """Begin to reduce `source` into `target`; the function returned waits for the end."""
        # MPI writes to the target until the end, even if the user has dropped the handle.
        self._under_way = [each for each in self._under_way if not MPI.Request.Testall(each[0])]
        pairs = _pairs(source, target)
        requests = [
            self.comm.Iallreduce(part, goal, mpi_operator(op, goal)) for part, goal in pairs
        ]
        self._under_way.append((requests, source, target))
        return functools.partial(self._wait, requests)

    def _wait(self, requests: list[MPI.Request]) -> None:
        with self.occupancy:
            MPI.Request.Waitall(requests)

    def drain(self) -> None:
        """Wait for every pending reduction. **Collective**."""
        for requests, *_ in self._under_way:
            self._wait(requests)
        self._under_way.clear()
        if self.node is not None:
            self.node.drain()

    def reduce(self, op: ReduceOp, buffer: np.ndarray, root: int) -> None:
        """Reduce `buffer` in place on `root`. **Collective**."""
        synchronize(buffer)
        with self.occupancy:
            # In place is allowed only on the root; elsewhere the buffer is just a source (MPI 4.1,
            # section 6.9.1).
            for part in in_parts(buffer):
                if self.rank == root:
                    self.comm.Reduce(MPI.IN_PLACE, part, mpi_operator(op, part), root)
                else:
                    self.comm.Reduce(part, None, mpi_operator(op, part), root)

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        """Overwrite `buffer` with the buffer of `root`. **Collective**."""
        with self.occupancy:
            # Sent as bytes, here and below, because MPI has no type for some dtypes of NumPy, such
            # as float16.
            for part in in_parts(buffer):
                self.comm.Bcast([_as_bytes(part), MPI.BYTE], root)

    def broadcast_each(self, buffers: Sequence[np.ndarray], roots: Sequence[int]) -> None:
        """Overwrite each of `buffers` with the buffer of its root. **Collective**."""
        # All are started before the first wait. MPI matches them in the order in which each rank
        # starts them, which is the same on all ranks (MPI 4.1, section 6.12).
        requests = [
            self.comm.Ibcast([_as_bytes(part), MPI.BYTE], root)
            for buffer, root in zip(buffers, roots, strict=True)
            for part in in_parts(buffer)
        ]
        self._wait(requests)

    def all_gather(
        self, part: np.ndarray, counts: Sequence[int], out: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the parts of all ranks, one behind the other. **Collective**."""
        gathered = np.empty(sum(counts), part.dtype) if out is None else out
        with self.occupancy:
            self._collect(self.comm.Allgather, self.comm.Allgatherv, part, counts, gathered)
        return gathered

    def start_all_gather(
        self, part: np.ndarray, counts: Sequence[int]
    ) -> Callable[[], np.ndarray | None]:
        """Begin to gather short parts. **Collective**, with the same `counts` on all ranks."""
        gathered = np.empty(sum(counts), part.dtype)
        goal = _as_parts(gathered, counts)
        # The request of mpi4py keeps both buffers alive.
        request = self.comm.Iallgatherv([_as_bytes(part), MPI.BYTE], goal)
        return lambda: gathered if request.Test() else None

    def gather(self, part: np.ndarray, counts: Sequence[int], root: int) -> np.ndarray | None:
        """Return the parts of all ranks on `root`, one behind the other. **Collective**."""
        gathered = np.empty(sum(counts), part.dtype) if self.rank == root else None
        with self.occupancy:
            even = functools.partial(self.comm.Gather, root=root)
            move = functools.partial(self.comm.Gatherv, root=root)
            self._collect(even, move, part, counts, gathered)
        return gathered

    def _collect(
        self,
        move_even: Callable[[Any, Any], object],
        move: Callable[[Any, Any], object],
        part: np.ndarray,
        counts: Sequence[int],
        gathered: np.ndarray | None,
    ) -> None:
        """Fill `gathered` with the parts of all ranks, by as many calls as necessary."""
        # MPI has faster algorithms for parts of equal length, such as a tree for short ones.
        # `counts` is equal on all ranks, so they all choose the same MPI call.
        if sum(counts) * part.itemsize <= _PART_BYTES:
            if counts.count(counts[0]) == len(counts):
                whole = None if gathered is None else [_as_bytes(gathered), MPI.BYTE]
                move_even([_as_bytes(part), MPI.BYTE], whole)
                return
            goal = None if gathered is None else _as_parts(gathered, counts)
            move([_as_bytes(part), MPI.BYTE], goal)
            return
        for start, lengths in plan_windows(counts, part.itemsize):
            send = [_as_bytes(part[start : start + lengths[self.rank]]), MPI.BYTE]
            if gathered is None:
                move(send, None)
            else:
                # A window holds a slice of each rank's part; in the result, these slices are not
                # contiguous.
                received = np.empty(sum(lengths), part.dtype)
                move(send, _as_parts(received, lengths))
                parts = zip(_split(gathered, counts), _split(received, lengths), strict=True)
                for place, piece in parts:
                    place[start : start + piece.size] = piece

    def all_to_all(
        self,
        buffer: np.ndarray,
        counts: Sequence[int],
        incoming: Sequence[int],
        out: np.ndarray | None = None,
        is_even: bool = False,
    ) -> np.ndarray:
        """Send each rank its part of `buffer`, and return the received parts. **Collective**."""
        received = np.empty(sum(incoming), buffer.dtype) if out is None else out
        # Displacements are C ints as well, so the parts of all ranks together must be shorter than
        # 2 GiB.
        limit = min(_PART_BYTES, (2**31 - 1) // self.size) // max(buffer.itemsize, 1)
        with self.occupancy:
            # Ranks may take different branches here. Both ends of a long part know of it and leave
            # it out of the `Alltoallv` of `_exchange`, so that call matches the one below on ranks
            # with only short parts.
            if max(*counts, *incoming) > limit:
                self._exchange(_split(buffer, counts), _split(received, incoming), limit)
            # A rank cannot decide this by its own counts, which may be even on only this rank:
            # `Alltoall` does not match `Alltoallv`.
            elif is_even:
                goal = [_as_bytes(received), MPI.BYTE]
                self.comm.Alltoall([_as_bytes(buffer), MPI.BYTE], goal)
            else:
                self.comm.Alltoallv(_as_parts(buffer, counts), _as_parts(received, incoming))
        return received

    def _exchange(self, sent: list[np.ndarray], received: list[np.ndarray], limit: int) -> None:
        """Send long parts one by one, since both ranks know of each, and short ones together."""
        requests = []
        # Receives first, so that long parts need no buffer of the library. The parts of one pair of
        # ranks need no tags: they arrive in the order of sending (MPI 4.1, section 3.5).
        for move, parts in ((self.comm.Irecv, received), (self.comm.Isend, sent)):
            for rank, whole in enumerate(parts):
                long = in_parts(whole) if whole.size > limit else []
                requests += [move([_as_bytes(part), MPI.BYTE], rank) for part in long]
        # NumPy cannot concatenate an empty list.
        short = [part for part in sent if part.size <= limit] or [sent[0][:0]]
        counts = [part.size * (part.size <= limit) for part in sent]
        lengths = [part.size * (part.size <= limit) for part in received]
        together = np.empty(sum(lengths), received[0].dtype)
        self.comm.Alltoallv(_as_parts(np.concatenate(short), counts), _as_parts(together, lengths))
        for whole, part in zip(received, _split(together, lengths), strict=True):
            whole[: part.size] = part
        MPI.Request.Waitall(requests)

    def send(self, buffer: np.ndarray, rank: int) -> None:
        """Send `buffer` to `rank`, which calls `receive`."""
        with self.occupancy:
            for part in in_parts(buffer):
                self.comm.Send([_as_bytes(part), MPI.BYTE], rank)

    def receive(self, buffer: np.ndarray, rank: int) -> None:
        """Overwrite `buffer` with the data that `rank` sends."""
        with self.occupancy:
            for part in in_parts(buffer):
                self.comm.Recv([_as_bytes(part), MPI.BYTE], rank)

    def round(self, num_values: int) -> Round:
        """Return a new round. **Collective**, without waiting."""
        if self.size == 1:
            return SoloRound(num_values)
        if self._sharing is not None and self._sharing.holds_all:
            self.piggyback = SharedRound(self._sharing.memory)
            return self.piggyback
        made = mpi_round(self.comm)
        self._rounds.append(made)
        if isinstance(made, GatheredRound) and self.has_fast_paths:
            self.piggyback = made
        return made

    def wait_busily(self, is_busy: bool) -> None:
        """Set whether waits keep the core, or leave it to other threads of this rank."""
        for each in self._rounds:
            each.is_busy = is_busy
        if self._sharing is not None:
            self._sharing.memory.wait_busily(is_busy)

    def lost_ranks(self, error: BaseException | None) -> list[int] | None:
        """Return the ranks that are known to be dead, if that caused `error`, else ``None``."""
        # Open MPI has ended collectives without an error although the data of a dead rank were
        # missing.
        if error is None:
            return failed_ranks(self.comm) if has_failed(self.comm) else None
        if isinstance(error, WaitLeft):
            return failed_ranks(self.comm)
        return lost_ranks(self.comm, error)

    def leave_waits(self) -> None:
        """Let waits for data in shared memory end with an error, from any thread."""
        if self._sharing is not None:
            self._sharing.memory.leave()

    def revoke(self) -> None:
        """Let every rank leave its waits for data with an error, because one rank is dead."""
        self.leave_waits()
        revoke(self.comm)
        if self.node is not None:
            self.node.revoke()

    def close(self) -> None:
        """Free the communicator and everything that belongs to it. **Collective**."""
        # Persistent requests belong to the communicator, and must be freed before it.
        for each in self._rounds:
            each.free()
        if self.node is not None:
            self.node.close()
        self.comm.Free()
        # Results that the program holds keep their memory alive.
        self._sharing = self.node = self.piggyback = None

    def abort(self, exit_code: int) -> None:
        """End every process of the job."""
        self.comm.Abort(exit_code)


def _pairs(source: np.ndarray, target: np.ndarray) -> list[tuple[Any, np.ndarray]]:
    """Return the buffers that MPI takes to reduce `source` into `target`, in parts."""
    parts = in_parts(target)
    # MPI forbids that send and receive buffers overlap. With IN_PLACE both can be one array.
    if source is target:
        return [(MPI.IN_PLACE, part) for part in parts]
    if len(parts) == 1:
        return [(source, target)]
    return list(zip(in_parts(source), parts, strict=True))


def _as_bytes(buffer: np.ndarray) -> np.ndarray:
    is_flat = buffer.ndim == 1 and buffer.dtype == _BYTE
    return buffer if is_flat else buffer.reshape(-1).view(_BYTE)


def _as_parts(buffer: np.ndarray, counts: Sequence[int]) -> list[object]:
    """Return `buffer` in the form in which mpi4py takes parts of `counts` elements."""
    num_bytes = [count * buffer.itemsize for count in counts]
    return [_as_bytes(buffer), num_bytes, [0, *itertools.accumulate(num_bytes)][:-1], MPI.BYTE]


def _split(buffer: np.ndarray, counts: Sequence[int]) -> list[np.ndarray]:
    return np.split(buffer, np.cumsum(counts)[:-1])


def in_parts(buffer: np.ndarray) -> list[np.ndarray]:
    """Return views of `buffer`, in C order, which are equal for arrays of equal dtype and size."""
    return [buffer] if buffer.nbytes <= _PART_BYTES else pieces(buffer, _PART_BYTES)


def plan_windows(counts: Sequence[int], itemsize: int) -> list[tuple[int, list[int]]]:
    """Return, for each message of a gather, where each part starts and the lengths by rank."""
    # It is the same on all ranks, so they make the same number of calls. In later calls, a rank
    # whose part has ended sends nothing.
    length = max(_PART_BYTES // itemsize // len(counts), 1)
    starts = range(0, max(counts), length)
    return [(start, [min(max(each - start, 0), length) for each in counts]) for start in starts]
