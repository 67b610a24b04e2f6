"""NCCL reducer of device arrays, where each rank has its own GPU."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpistrat.arrays import Array, Device, address_of, on_device_of
from mpistrat.comm.ops import MOVES_AS, divide
from mpistrat.comm.packing import Message
from mpistrat.cuda_api import Stream, nccl_library
from mpistrat.errors import CollectiveTimeoutError
from mpistrat.options import ReduceOp

if TYPE_CHECKING:
    from mpi4py import MPI

_NUMBERS = ("i1", "u1", "i4", "u4", "i8", "u8", "f4", "f8")
_TRIED_LENGTH = 1000
_CONNECT_LIMIT_S = 120.0


class Link(Protocol):
    """Reduces real numbers between devices. **Collective**, in one order on all ranks."""

    # The functions returned are called once; then the device, not the host, waits for the end.

    size: int

    def waits_since(self) -> float | None:
        """Return when the oldest reduction that has not ended was begun, by the monotonic clock."""

    def abort(self, error: CollectiveTimeoutError) -> None:
        """End all reductions, with anything as result; those that follow raise `error`."""

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
        # ncclCommInitRank waits for all ranks: none may enter it unless all can.
        unready = _attempt(lambda: cls._prepare(device))
        why_not = _first_failure(comm.allgather(unready))
        if why_not:
            return why_not
        link = _within(_CONNECT_LIMIT_S, lambda: cls._try(device, unique, comm.size, comm.rank))
        why_not = _first_failure(comm.allgather(link if isinstance(link, str) else None))
        if why_not:
            return why_not
        connected: NcclLink = link
        return connected

    @staticmethod
    def _prepare(device: Device) -> None:
        nccl_library()
        device.namespace()

    @classmethod
    def _try(cls, device: Device, unique: tuple[int, ...], size: int, rank: int) -> NcclLink:
        """Return a link that has been tried. **Collective**."""
        xp = device.namespace()
        link = cls(device, nccl_library().NcclCommunicator(size, unique, rank), size)
        numbers = xp.full(_TRIED_LENGTH, rank + 1, dtype=np.int32)
        # Tried once with numbers whose sum is known: NCCL may connect and then hang or return wrong
        # sums.
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
        self._under_way: list[tuple[Any, float, Array, Array]] = []
        self._failure: CollectiveTimeoutError | None = None

    def waits_since(self) -> float | None:
        """Return when the oldest reduction that has not ended was begun. Called by any thread."""
        # `_queue` replaces the list and never shortens it in place, so any thread may read it.
        for done, began_s, *_ in list(self._under_way):
            if not done.done:
                return began_s
        return None

    def abort(self, error: CollectiveTimeoutError) -> None:
        """End all reductions, with anything as result; those that follow raise `error`."""
        # Called by a thread that is not the program's.
        # Before the abort: waits that it ends then raise, and do not return the wrong numbers.
        self._failure = error
        with self._device.current():
            self._communicator.abort()

    def all_reduce(self, op: ReduceOp, source: Array, target: Array) -> Callable[[], object]:
        """Begin to reduce `source` into `target`. **Collective**."""
        return self._queue(self._communicator.allReduce, op, source, target)

    def reduce(self, op: ReduceOp, source: Array, target: Array, root: int) -> Callable[[], object]:
        """Begin to reduce `source` into `target` on `root`. **Collective**."""
        return self._queue(self._communicator.reduce, op, source, target, root)

    def _queue(
        self, function: Any, op: ReduceOp, source: Array, target: Array, *root: int
    ) -> Callable[[], object]:
        self._check()
        library, stream = self._library, self._stream
        dtype = getattr(library, f"NCCL_{source.dtype.name.upper()}")
        with self._device.current():
            # NCCL works on its own stream, which must not start before the program's kernels have
            # written `source`.
            stream.wait_event(Stream.current().record())
            function(
                *(address_of(source), address_of(target), source.size, dtype),
                *(getattr(library, f"NCCL_{op.name}"), *root, stream.pointer),
            )
            done = stream.record()
        # CuPy would use the memory again at once, where the user has dropped the handle.
        self._under_way = [entry for entry in self._under_way if not entry[0].done]
        self._under_way.append((done, time.monotonic(), source, target))

        def end() -> None:
            self._check()
            with self._device.current():
                Stream.current().wait_event(done)

        return end

    def _check(self) -> None:
        if self._failure is not None:
            raise self._failure


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


def _first_failure(failures: Sequence[str | None]) -> str:
    """Return who has failed first and why, of the text of each rank; empty if none has."""
    named = (f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None)
    return next(named, "")


def _within(limit_s: float, function: Callable[[], Any]) -> Any:
    """Return what `_attempt` does, or a text where it takes longer than the limit."""
    # NCCL waits forever if another rank fails inside. The thread stays behind then.
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(_attempt(function)), daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else f"NCCL did not connect the ranks within {limit_s:g} s"


def _attempt(function: Callable[[], Any]) -> Any:
    """Return the value of `function`, or the text of its exception."""
    try:
        return function()
    except Exception as error:  # the others wait for an answer, whatever happens here
        return f"{type(error).__name__}: {error}"
