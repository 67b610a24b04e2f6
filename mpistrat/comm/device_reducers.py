"""Device reducers: NCCL, CUDA-aware MPI, or staged through host memory."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mpistrat.arrays import Array, Device, address_of, is_on_host, on_device_of
from mpistrat.comm.ops import MOVES_AS, divide
from mpistrat.comm.packing import Message
from mpistrat.comm.pool import Pool
from mpistrat.comm.reducers import MpiReducer
from mpistrat.comm.transport import Reducer, Transport
from mpistrat.cuda_api import Stream, nccl_library, pinned_empty
from mpistrat.errors import CollectiveTimeoutError
from mpistrat.options import ReduceOp
from mpistrat.sharding import cut

if TYPE_CHECKING:
    from mpi4py import MPI

_NUM_BUFFERS = 3
_MAX_PART_BYTES = 4 * 2**20
_MIN_PART_BYTES = 2**18
"""For fewer bytes, beginning a copy costs more than the copy."""
_NUMBERS = ("i1", "u1", "i4", "u4", "i8", "u8", "f4", "f8")
_TRIED_LENGTH = 1000
_CONNECT_LIMIT_S = 120.0


class Link(Protocol):
    """Reduces real numbers between devices. **Collective**, in one order on all ranks."""

    # Each returned function is called once; then the device waits for the end, not the host.

    size: int

    def waits_since(self) -> float | None:
        """Return when the oldest unfinished reduction began, by the monotonic clock."""

    def abort(self, error: CollectiveTimeoutError) -> None:
        """End all reductions, with undefined results; later ones raise `error`."""

    def all_reduce(self, op: ReduceOp, source: Array, target: Array) -> Callable[[], object]:
        """Begin to write the reduction of `source` to `target`, which may be the same array."""

    def reduce(self, op: ReduceOp, source: Array, target: Array, root: int) -> Callable[[], object]:
        """Begin to do so, but only on `root`."""


class NcclLink:
    """A communicator of NCCL, and the stream on which it works."""

    @classmethod
    def connect(cls, comm: MPI.Intracomm, device: Device) -> NcclLink | str:
        """Return a link between the devices of all ranks, or why there is none. **Collective**."""
        # Nothing is raised, because the other ranks wait. If two ranks share a GPU, NCCL would wait
        # forever: the caller has excluded that.
        own = _attempt(lambda: nccl_library().get_unique_id() if comm.rank == 0 else None)
        unique = comm.bcast(own)
        if isinstance(unique, str):
            return f"rank 0: {unique}"
        # ncclCommInitRank waits for all ranks: no rank may enter it unless all can.
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
        """Return a link that has been tested. **Collective**."""
        xp = device.namespace()
        link = cls(device, nccl_library().NcclCommunicator(size, unique, rank), size)
        numbers = xp.full(_TRIED_LENGTH, rank + 1, dtype=np.int32)
        # Tested once with numbers whose sum is known: NCCL may connect and then hang or return
        # wrong sums.
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
        """Return when the oldest unfinished reduction began. Called by any thread."""
        # `_queue` replaces the list and never shortens it in place, so any thread may read it.
        for done, began_s, *_ in list(self._under_way):
            if not done.done:
                return began_s
        return None

    def abort(self, error: CollectiveTimeoutError) -> None:
        """End all reductions, with undefined results; later ones raise `error`."""
        # Called by a watching thread, not by the program's thread.
        # Set before the abort: waits that the abort ends then raise, and do not return wrong
        # numbers.
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
        # Otherwise CuPy would reuse the memory at once if the user has dropped the handle.
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
    """Reduces messages by NCCL; the host does not wait."""

    @staticmethod
    def knows(op: ReduceOp, dtype: np.dtype) -> bool:
        """Return whether NCCL can reduce `dtype` in messages by `op`."""
        if dtype.kind == "c":  # its parts are added separately
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
    """Return the numbers of `array` as a 1-d view, each complex number as two real ones."""
    flat = array.reshape(-1)
    return flat.view(np.dtype(f"f{flat.itemsize // 2}")) if flat.dtype.kind == "c" else flat


def _first_failure(failures: Sequence[str | None]) -> str:
    """Return which rank has failed first and why, from the text of each; empty if none has."""
    named = (f"rank {rank}: {text}" for rank, text in enumerate(failures) if text is not None)
    return next(named, "")


def _within(limit_s: float, function: Callable[[], Any]) -> Any:
    """Return the result of `_attempt`, or an error message if it takes longer than the limit."""
    # NCCL waits forever if a different rank fails inside. The thread is then left behind.
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(_attempt(function)), daemon=True)
    thread.start()
    thread.join(limit_s)
    return found[0] if found else f"NCCL did not connect the ranks within {limit_s:g} s"


def _attempt(function: Callable[[], Any]) -> Any:
    """Return the value of `function`, or the message of its exception."""
    try:
        return function()
    except Exception as error:  # the other ranks wait for an answer, whatever happens
        return f"{type(error).__name__}: {error}"


class _Event(Protocol):
    """The end of a copy."""

    def synchronize(self) -> object:
        """Wait until the copy has ended."""


class _Copier(Protocol):
    """Copies between the host and a device, in parallel with the program's work there."""

    def buffer(self, size: int, dtype: np.dtype) -> np.ndarray:
        """Return a 1-d host array with undefined content, from which copies are fast."""

    def begin(self) -> None:
        """Let each later `fetch` wait for the program's work that is queued on the device."""
        # A `put` always follows a `fetch` that has waited, so it need not wait itself.

    def fetch(self, target: np.ndarray, source: Array, after: _Event | None = None) -> _Event:
        """Begin to copy `source` from the device to the host, after the `put` called `after`."""

    def put(self, target: Array, source: np.ndarray) -> _Event:
        """Begin to copy `source`, part of a `buffer`, to `target` on the device."""

    def end(self) -> None:
        """Let the program's later work on the device wait for all that was `put`."""


def part_bytes(num_bytes: int) -> int:
    """Return the size of the parts in which a message of `num_bytes` is reduced."""
    return min(max(num_bytes // 4, _MIN_PART_BYTES), _MAX_PART_BYTES)


def plan_parts(num_elements: int, itemsize: int) -> list[slice]:
    """Divide a message into parts that are copied through the buffers one after the other."""
    return cut(num_elements, part_bytes(num_elements * itemsize) // itemsize)


class StagedReducer:
    """Copies messages to the host in parts, reduces them there, and copies them back."""

    def __init__(self, copier: _Copier, reducer: Reducer) -> None:
        self._copier = copier
        self._reducer = reducer
        self._pool = Pool()

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Reduce the array of `message`. **Collective**."""
        self._in_parts(message, lambda part: self._reducer.all_reduce(op, part))

    def reduce(self, op: ReduceOp, message: Message, root: int) -> None:
        """Reduce the array of `message` to `root`. **Collective**."""
        self._in_parts(message, lambda part: self._reducer.reduce(op, part, root))

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Copy the array of `message` to the host, and begin to reduce it. **Collective**."""
        source, target = message.sources[0].reshape(-1), message.targets[0].reshape(-1)
        if not source.size:
            return bool
        copier = self._copier
        copier.begin()
        host = copier.buffer(source.size, source.dtype)
        # The reduction reads the host copy at once, so the copy must be complete before it begins.
        copier.fetch(host, source).synchronize()
        wait = self._reducer.start_all_reduce(op, Message([host], [host], self._pool))

        def end() -> None:
            wait()
            copier.put(target, host)
            copier.end()

        return end

    def _in_parts(self, message: Message, reduce_part: Callable[[Message], None]) -> None:
        # A pipeline: while one part is reduced on the host, the next parts are fetched and the
        # previous one is copied back. A few buffers are used in turn.
        source, target = message.sources[0].reshape(-1), message.targets[0].reshape(-1)
        parts = plan_parts(source.size, source.itemsize)
        copier = self._copier
        copier.begin()
        lengths = [part.stop - part.start for part in parts[:_NUM_BUFFERS]]
        buffers = [copier.buffer(length, source.dtype) for length in lengths]
        puts: list[_Event] = []

        def fetch(number: int) -> tuple[np.ndarray, _Event]:
            part, round_ = parts[number], len(buffers)
            host = buffers[number % round_][: part.stop - part.start]
            # The last copy that used the buffer may still be reading it.
            after = puts[number - round_] if number >= round_ else None
            return host, copier.fetch(host, source[part], after)

        # One fewer than there are buffers: the last buffer is being copied back, and `fetch` would
        # have to wait for that.
        ahead = len(buffers) - 1
        coming = deque(fetch(number) for number in range(ahead))
        for number, part in enumerate(parts):
            if number + ahead < len(parts):
                coming.append(fetch(number + ahead))
            host, arrival = coming.popleft()
            arrival.synchronize()
            reduce_part(Message([host], [host], self._pool))
            puts.append(copier.put(target[part], host))
        copier.end()


class DirectReducer:
    """Passes device memory itself to the transport, in blocking collectives."""

    # Nonblocking collectives of Open MPI do not accept device memory, so `staged` does those.

    def __init__(self, transport: Transport, staged: Reducer) -> None:
        self._whole = MpiReducer(transport)
        self._staged = staged

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Reduce the array of `message`. **Collective**."""
        with on_device_of(message.targets[0]):
            self._whole.all_reduce(op, message)

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Begin to reduce the array of `message`, on the host. **Collective**."""
        return self._staged.start_all_reduce(op, message)

    def reduce(self, op: ReduceOp, message: Message, root: int) -> None:
        """Reduce the array of `message` to `root`. **Collective**."""
        with on_device_of(message.targets[0]):
            self._whole.reduce(op, message, root)


class DeviceCopier:
    """The `_Copier` of a GPU."""

    def __init__(self, device: Device) -> None:
        self._device = device
        with device.current():
            # Two streams, so that copies in both directions overlap.
            self._fetching, self._putting = Stream.new(), Stream.new()
        self._under_way: list[tuple[Any, np.ndarray]] = []

    def buffer(self, size: int, dtype: np.dtype) -> np.ndarray:
        """Return a 1-d array in page-locked memory."""
        with self._device.current():
            return pinned_empty(size, dtype)

    def begin(self) -> None:
        """Let every later `fetch` wait for the current stream."""
        with self._device.current():
            # The device waits: the host does not wait for the program's kernels here.
            self._fetching.wait_event(Stream.current().record())

    def fetch(self, target: np.ndarray, source: Array, after: Any = None) -> Any:
        """Begin to copy `source` to the host."""
        with self._device.current():
            if after is not None:
                self._fetching.wait_event(after)
            self._fetching.copy(target, source)
            return self._fetching.record()

    def put(self, target: Array, source: np.ndarray) -> Any:
        """Begin to copy `source` to the device."""
        with self._device.current():
            self._putting.copy(target, source)
            done = self._putting.record()
        # The pool of page-locked memory does not know events: memory that is still being read must
        # not be returned to it.
        self._under_way = [each for each in self._under_way if not each[0].done]
        self._under_way.append((done, source))
        return done

    def end(self) -> None:
        """Let the current stream wait for every `put`."""
        with self._device.current():
            Stream.current().wait_event(self._putting.record())


@dataclass(frozen=True)
class DeviceCapabilities:
    """What a strategy may do with device memory; equal on all ranks, except for the objects."""

    device: Device
    """Device on which the replica of this rank computes."""
    copier: _Copier | None = None
    """Copies to the host and back; ``None`` unless every rank computes on a device. Without it,
    device arrays are copied to the host as a whole."""
    why_not_mpi: str = ""
    """Why MPI may not get the device arrays themselves; empty if it may."""
    why_not_nccl: str = "the replica computes on the host"
    """Why NCCL cannot be used; empty if it can."""
    link: Link | None = None
    """The communicator of NCCL, if it can be used."""
    of_ranks: Sequence[Device] = ()
    """The device of each rank, empty if all are like this rank's device."""

    @classmethod
    def solo(cls, device: Device) -> DeviceCapabilities:
        """Return the capabilities in a world of one rank without MPI."""
        if device.kind != "gpu":
            return cls(device)
        return cls(device, DeviceCopier(device), why_not_nccl="there is one rank without MPI")

    @property
    def some_have_devices(self) -> bool:
        """Whether any rank computes on a device, the same on all ranks."""
        return self.copier is not None or bool(self.why_not_mpi)

    def device_of(self, rank: int) -> Device:
        """Return the device on which a rank computes."""
        return self.of_ranks[rank] if self.of_ranks else self.device

    def places(self, arrays: Sequence[Array]) -> tuple[bool, ...]:
        """Return which of `arrays` are in device memory and are sent from there; ``()``: none."""
        # The ranks agree on this, because arrays on devices have different reducers from those on
        # hosts.
        if self.copier is None:
            return ()
        places = tuple([self.is_on_device(array) for array in arrays])
        return places if any(places) else ()

    def is_on_device(self, array: Any) -> bool:
        """Return whether `array` is in the memory of this rank's device."""
        return not is_on_host(array) and bool(array.device.id == self.device.index)
