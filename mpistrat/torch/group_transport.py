"""Transport over a process group of any backend, such as gloo or NCCL: moves bytes by torch.

It needs no MPI. Only datasets and checkpoints use it, which send little.
"""

from __future__ import annotations

import functools
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mpistrat.arrays import pieces
from mpistrat.comm.transport import SoloTransport, copied
from mpistrat.options import ReduceOp

_PIECE_BYTES = 2**28
"""The longest message."""
_POLLS = 50
"""Polls before a waiting rank checks limits."""
_REST_S = 0.0002
_SIGN = np.uint64(1 << 63)
_CPU = torch.device("cpu")

Poll = Callable[[], bool]
"""Returns whether an operation has ended, and raises its error."""


class GroupTransport(SoloTransport):
    """The ranks of a process group, several of them.

    If a rank is missing, operations raise torch's error at the time limit of the group. Memory is
    not shared, and nothing must be freed, so those methods are inherited from the transport of a
    single rank.
    """

    comm = None
    """There is no communicator of MPI."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        # All reductions are then built from `all_to_all` and `all_gather`, in a fixed tree.
        self.has_fast_paths = False
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.world_ranks: Sequence[int] = tuple(dist.get_process_group_ranks(group))
        self.world_size = dist.get_world_size()
        # Weak, so that the program can destroy the group: gloo ends its threads when it is dropped.
        self._given = weakref.ref(group)

    @property
    def _group(self) -> dist.ProcessGroup:
        """The group that moves arrays. **Collective** at the first use."""
        given = self._given()
        if given is None:
            raise RuntimeError("The process group was destroyed.")
        if _CPU in given._device_types or not dist.is_gloo_available():
            return given
        return self._beside

    @functools.cached_property
    def _beside(self) -> dist.ProcessGroup:
        """A group of gloo with the same ranks: NCCL moves only device memory. **Collective**."""
        given: Any = self._given()
        limit = getattr(given._get_backend(given._device_types[0]), "options", None)
        beside: Any = dist.new_group(
            list(self.world_ranks),
            timeout=getattr(limit, "_timeout", None),
            backend="gloo",
            use_local_synchronization=True,  # the other ranks of the job do not make this call
        )
        return beside

    @functools.cached_property
    def _device(self) -> torch.device:
        """The device on which the group moves tensors: with NCCL, the current one."""
        kinds = self._group._device_types
        return _CPU if _CPU in kinds else torch.device(kinds[0].type)

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        """Return the bytes of an array, in the same memory if the device is the host."""
        flat = array.reshape(-1).view(np.uint8)
        # torch warns of memory that may not be written to.
        return torch.from_numpy(flat if flat.flags.writeable else flat.copy()).to(self._device)

    def _store(self, target: np.ndarray, tensor: torch.Tensor) -> None:
        """Write a received tensor to `target`, unless it is the memory of `target`."""
        if tensor.device != _CPU:
            target.reshape(-1).view(np.uint8)[:] = tensor.cpu().numpy()

    def _world_rank(self, rank: int) -> int:
        return self.world_ranks[rank]

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        """Replace `buffer` on every rank by the buffer of `root`. **Collective**."""
        with self.occupancy:
            for piece in pieces(buffer, _PIECE_BYTES):
                tensor = self._tensor(piece)
                dist.broadcast(tensor, self._world_rank(root), self._group)
                if self.rank != root:
                    self._store(piece, tensor)

    def broadcast_each(self, buffers: Sequence[np.ndarray], roots: Sequence[int]) -> None:
        """Replace each of `buffers` on every rank by its root's buffer. **Collective**."""
        for buffer, root in zip(buffers, roots, strict=True):
            self.broadcast(buffer, root)

    def all_gather(
        self, part: np.ndarray, counts: Sequence[int], out: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the 1-d parts of all ranks, one behind the other. **Collective**."""
        gathered = np.empty(sum(counts), part.dtype) if out is None else out
        parts = np.split(gathered.view(np.uint8), np.cumsum(counts)[:-1] * part.itemsize)
        own = part.view(np.uint8)
        window = max(_PIECE_BYTES // self.size, 1)
        with self.occupancy:
            for start in range(0, max(counts) * part.itemsize, window):
                length = min(window, max(counts) * part.itemsize - start)
                poll, received = self._start_gather(own[start : start + length], length)
                _wait(poll)
                for place, row in zip(parts, received, strict=True):
                    goal = place[start : start + length]
                    goal[:] = row.cpu().numpy()[: goal.size]
        return gathered

    def start_all_gather(
        self, part: np.ndarray, counts: Sequence[int]
    ) -> Callable[[], np.ndarray | None]:
        """Begin to gather short parts; the returned function returns ``None`` until all arrive."""
        lengths = [count * part.itemsize for count in counts]
        poll, received = self._start_gather(part.view(np.uint8), max(lengths))

        def gathered() -> np.ndarray | None:
            if not poll():
                return None
            rows = zip(received, lengths, strict=True)
            joined = np.concatenate([row.cpu().numpy()[:length] for row, length in rows])
            return joined.view(part.dtype)

        return gathered

    def _start_gather(self, own: np.ndarray, length: int) -> tuple[Poll, list[torch.Tensor]]:
        """Begin to gather `length` bytes of each rank, of which `own` may have fewer."""
        # gloo gathers only tensors of equal lengths.
        padded = np.zeros(length, np.uint8)
        padded[: own.size] = own
        received = [*self._tensor(np.empty((self.size, length), np.uint8)).view(self.size, length)]
        source = self._tensor(padded)
        if not length:
            return lambda: True, received
        return _polled(dist.all_gather(received, source, self._group, async_op=True)), received

    def gather(self, part: np.ndarray, counts: Sequence[int], root: int) -> np.ndarray | None:
        """Do `all_gather` on only `root`; return ``None`` on the other ranks. **Collective**."""
        if self.rank != root:
            self.send(part, root)
            return None
        gathered = np.empty(sum(counts), part.dtype)
        for rank, place in enumerate(np.split(gathered, np.cumsum(counts)[:-1])):
            if rank == root:
                place[:] = part
            else:
                self.receive(place, rank)
        return gathered

    def all_to_all(
        self,
        buffer: np.ndarray,
        counts: Sequence[int],
        incoming: Sequence[int],
        out: np.ndarray | None = None,
        is_even: bool = False,
    ) -> np.ndarray:
        """Send each rank its part of `buffer`, and return the parts sent to this one."""
        received = np.empty(sum(incoming), buffer.dtype)
        target, itemsize = self._tensor(received), buffer.itemsize
        with self.occupancy:
            dist.all_to_all_single(
                target,
                self._tensor(buffer),
                [count * itemsize for count in incoming],
                [count * itemsize for count in counts],
                self._group,
            )
        self._store(received, target)
        return received if out is None else copied(received, out)

    def send(self, buffer: np.ndarray, rank: int) -> None:
        """Send `buffer` to `rank`, which calls `receive`."""
        with self.occupancy:
            for piece in pieces(buffer, _PIECE_BYTES):
                dist.send(self._tensor(piece), self._world_rank(rank), self._group)

    def receive(self, buffer: np.ndarray, rank: int) -> None:
        """Overwrite `buffer` with the data that `rank` sends."""
        with self.occupancy:
            for piece in pieces(buffer, _PIECE_BYTES):
                tensor = self._tensor(piece)
                dist.recv(tensor, self._world_rank(rank), self._group)
                self._store(piece, tensor)

    def all_reduce(self, op: ReduceOp, source: np.ndarray, target: np.ndarray) -> None:
        """Raise an error, because arrays are reduced without this method."""
        raise AssertionError("arrays are reduced by all_to_all and all_gather")

    def reduce(self, op: ReduceOp, buffer: np.ndarray, root: int) -> None:
        """Raise an error, like `all_reduce`."""
        self.all_reduce(op, buffer, buffer)

    def start_largest(self, values: np.ndarray) -> tuple[Poll, torch.Tensor]:
        """Begin to reduce 64-bit integers by MAX; the result is in the tensor."""
        tensor = torch.from_numpy(values.view(np.int64)).to(self._device)
        work = dist.all_reduce(tensor, dist.ReduceOp.MAX, self._group, async_op=True)
        return _polled(work), tensor

    def round(self, num_values: int) -> Any:
        """Return a new round of `num_values` integers, without waiting."""
        return _GroupRound(self, num_values)


class _GroupRound:
    """A round of agreement over a process group: see `comm.transport.Round`."""

    def __init__(self, transport: GroupTransport, num_values: int) -> None:
        self.send, self.receive = np.zeros((2, num_values), np.uint64)
        self._transport = transport
        self._poll: Poll | None = None
        self._tensor: torch.Tensor

    def start(self) -> None:
        """Contribute `send`."""
        # torch has only signed integers. With the highest bit inverted, they have the same order.
        self._poll, self._tensor = self._transport.start_largest(self.send ^ _SIGN)

    def done(self) -> bool:
        """Return whether every rank has started this round, or raise torch's error."""
        if self._poll is not None:
            if not self._poll():
                return False
            self._poll = None
            self.receive[:] = self._tensor.cpu().numpy().view(np.uint64) ^ _SIGN
        return True

    def withdraw(self) -> None:
        """Do nothing: torch cannot cancel a collective."""

    def meet(self, first: int, second: int) -> int:
        """Contribute two numbers and their complements, and poll for a moment."""
        self.send[:] = first, ~np.uint64(first), second, ~np.uint64(second)
        self.start()
        for _ in range(_POLLS):
            if self.done():
                return 2 if (self.receive == self.send).all() else 1
            time.sleep(0)
        return 0

    def rest(self, waited_s: float) -> None:
        """Leave the core to others for a moment."""
        time.sleep(_REST_S)

    def expect(self, number: int) -> bool:
        """Return False: torch cannot tell before the round."""
        return False


def _polled(work: Any) -> Poll:
    """Return a function that asks for the end of torch's `work`."""

    def poll() -> bool:
        if not work.is_completed():
            return False
        work.wait()  # raises the error of an operation that has failed
        return True

    return poll


def _wait(poll: Poll) -> None:
    while not poll():
        time.sleep(_REST_S)
