"""NCCL reducer of device arrays, where each rank has its own GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpistrat.arrays import Array, Device, address_of, on_device_of
from mpistrat.comm.ops import MOVES_AS, divide
from mpistrat.comm.packing import Message
from mpistrat.cuda import Stream, nccl_library
from mpistrat.options import ReduceOp

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["Link", "NcclLink", "NcclReducer"]

_NUMBERS = ("i1", "u1", "i4", "u4", "i8", "u8", "f4", "f8")
_TRIED_LENGTH = 1000


class Link(Protocol):
    """Reduces real numbers between devices. **Collective**, in one order on all ranks."""

    # The functions returned are called once; then the device, not the host, waits for the end.

    size: int

    def all_reduce(self, op: ReduceOp, source: Array, target: Array) -> Callable[[], object]:
        """Begin to write the reduction of `source` to `target`, which may be the same array."""

    def reduce(self, op: ReduceOp, source: Array, target: Array, root: int) -> Callable[[], object]:
        """Begin to do so on `root` alone."""


class NcclLink:
    """A communicator of NCCL, and the stream on which it works."""

    @classmethod
    def connect(cls, comm: MPI.Intracomm, device: Device) -> NcclLink | str:
        """Return a link between the devices of all ranks, or why there is none. **Collective**."""
        # Nothing is raised, because the other ranks wait. NCCL itself would wait forever where two
        # ranks share a GPU: the caller has excluded that.
        own = _attempt(lambda: nccl_library().get_unique_id() if comm.rank == 0 else None)
        unique = comm.bcast(own)
        if isinstance(unique, str):
            return f"rank 0: {unique}"
        link = _attempt(lambda: cls._try(device, unique, comm.size, comm.rank))
        failures = comm.allgather(link if isinstance(link, str) else None)
        for rank, failure in enumerate(failures):
            if failure is not None:
                return f"rank {rank}: {failure}"
        connected: NcclLink = link
        return connected

    @classmethod
    def _try(cls, device: Device, unique: tuple[int, ...], size: int, rank: int) -> NcclLink:
        """Return a link that has been tried. **Collective**."""
        xp = device.namespace()
        link = cls(device, nccl_library().NcclCommunicator(size, unique, rank), size)
        numbers = xp.full(_TRIED_LENGTH, rank + 1, dtype=np.int32)
        link.all_reduce(ReduceOp.SUM, numbers, numbers)()
        if not bool((numbers == size * (size + 1) // 2).all()):
            raise RuntimeError("NCCL has returned wrong numbers")
        return link

    def __init__(self, device: Device, communicator: Any, size: int) -> None:
        self.size = size
        self._device = device
        self._communicator = communicator
        self._library = nccl_library()
        with device.current():
            self._stream = Stream.new()
        self._under_way: list[tuple[Any, Array, Array]] = []

    def all_reduce(self, op: ReduceOp, source: Array, target: Array) -> Callable[[], object]:
        """Begin to reduce `source` into `target`. **Collective**."""
        return self._queue(self._communicator.allReduce, op, source, target)

    def reduce(self, op: ReduceOp, source: Array, target: Array, root: int) -> Callable[[], object]:
        """Begin to reduce `source` into `target` on `root`. **Collective**."""
        return self._queue(self._communicator.reduce, op, source, target, root)

    def _queue(
        self, function: Any, op: ReduceOp, source: Array, target: Array, *root: int
    ) -> Callable[[], object]:
        library, stream = self._library, self._stream
        dtype = getattr(library, f"NCCL_{source.dtype.name.upper()}")
        with self._device.current():
            stream.wait_event(Stream.current().record())
            function(
                *(address_of(source), address_of(target), source.size, dtype),
                *(getattr(library, f"NCCL_{op.name}"), *root, stream.pointer),
            )
            done = stream.record()
        # CuPy would use the memory again at once, where the user has dropped the handle.
        self._under_way = [entry for entry in self._under_way if not entry[0].done]
        self._under_way.append((done, source, target))

        def end() -> None:
            with self._device.current():
                Stream.current().wait_event(done)

        return end


class NcclReducer:
    """Reduces messages by NCCL, without a wait on the host."""

    @staticmethod
    def knows(op: ReduceOp, dtype: np.dtype) -> bool:
        """Return whether NCCL can reduce what travels as `dtype` by `op`."""
        if dtype.kind == "c":  # added part by part
            return dtype.itemsize <= 16 and MOVES_AS[op] is ReduceOp.SUM
        return f"{dtype.kind}{dtype.itemsize}" in _NUMBERS

    def __init__(self, link: Link) -> None:
        self._link = link

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Reduce the array of `message`. **Collective**."""
        self.start_all_reduce(op, message)()

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Begin to reduce the array of `message`. **Collective**, without waiting."""
        source, target = message.sources[0], message.targets[0]
        wait = self._link.all_reduce(MOVES_AS[op], _as_real(source), _as_real(target))
        return lambda: self._finish(wait, op, target)

    def reduce(self, op: ReduceOp, message: Message, root: int) -> None:
        """Reduce the array of `message` to `root`. **Collective**."""
        source, target = message.sources[0], message.targets[0]
        wait = self._link.reduce(MOVES_AS[op], _as_real(source), _as_real(target), root)
        self._finish(wait, op, target)

    def _finish(self, wait: Callable[[], object], op: ReduceOp, target: Array) -> None:
        wait()
        if op is ReduceOp.MEAN:
            with on_device_of(target):
                divide(_as_real(target), self._link.size)


def _as_real(array: Array) -> Array:
    """Return the numbers of `array` as a 1-d view, complex ones as two."""
    flat = array.reshape(-1)
    return flat.view(np.dtype(f"f{flat.itemsize // 2}")) if flat.dtype.kind == "c" else flat


def _attempt(function: Callable[[], Any]) -> Any:
    """Return the value of `function`, or the text of its exception."""
    try:
        return function()
    except Exception as error:  # the others wait for an answer, whatever happens here
        return f"{type(error).__name__}: {error}"
