"""Transport protocol, which moves arrays between ranks; and a transport of one rank."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from mpistrat.comm.packing import Message
from mpistrat.comm.pool import Pool
from mpistrat.options import ReduceOp
from mpistrat.settings import settings_at_the_end


class Reducer(Protocol):
    """Reduces messages of equal dtype and lengths on all ranks. All methods are **Collective**."""

    # MEAN divides by the number of ranks.

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Write the reductions to the targets of `message`, on every rank."""

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Begin `all_reduce`, and return the local function that ends it, to be called once."""

    def reduce(self, op: ReduceOp, message: Message, root: int) -> None:
        """Write the reductions to the targets on `root`; elsewhere the targets are undefined."""


class Occupancy:
    """Reentrant context manager for waits for data: true while any thread is inside."""

    # Inside, no error can be raised: `failures` checks this before it ends the process.

    __slots__ = ("_calls", "on_exit")

    def __init__(self) -> None:
        # A list, because threads enter and exit at the same time: a counter could lose one of them.
        self._calls: list[None] = []
        self.on_exit: Callable[[BaseException | None], object] | None = None
        """Called with the error at the end of a wait, to raise one that the program understands."""

    def __enter__(self) -> None:
        self._calls.append(None)

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # First, because `on_exit` may raise, and this thread would then count as inside forever.
        self._calls.pop()
        if self.on_exit is not None:
            self.on_exit(error)

    def __bool__(self) -> bool:
        return bool(self._calls)


class Round(Protocol):
    """A reusable MAX reduction of a few integers, started by each rank and then polled."""

    send: np.ndarray
    """The values of this rank, uint64; they must be filled before `start`."""
    receive: np.ndarray
    """The largest of each value over all ranks, valid once `done` has returned True."""

    @property
    def start(self) -> Callable[[], object]:
        """Contributes `send`."""

    @property
    def done(self) -> Callable[[], bool]:
        """Returns whether every rank has started this round."""

    @property
    def withdraw(self) -> Callable[[], object]:
        """Withdraws the contribution of `start`, if that is possible: this rank gives up."""

    @property
    def meet(self) -> Callable[[int, int], int]:
        """Contributes two numbers and their complements, and polls for some 100 us."""
        # Returns 0 if ranks are missing, 2 if all have contributed the same, else 1.

    def rest(self, waited_s: float) -> None:
        """Leave the core to others for a moment, in a wait that has lasted `waited_s`."""

    @property
    def expect(self) -> Callable[[int, int], bool]:
        """Announces that this rank reaches collective N, and returns whether all others do.

        Takes the nanoseconds that it may wait for them, and N.
        """


class Piggyback(Round, Protocol):
    """A round with space for a few numbers, so that a small reduction needs no extra message."""

    room: int
    """How many bytes can be sent with a round."""
    is_shared: bool
    """Whether the round is in memory that the ranks share, else over MPI."""
    parameters: dict[str, int]
    """Parameters, by name, with which compiled code runs a round, or finds its data."""

    def attach(self, source: np.ndarray) -> None:
        """Send `source` with the next round."""

    def result(self, op: ReduceOp, dtype: np.dtype) -> Callable[[np.ndarray], object]:
        """Return a function that writes the reduction of the last round's numbers to an array."""

    def brought(self) -> Sequence[memoryview]:
        """Return, by rank, the bytes sent with the last round; they are valid until the next."""


class NodeReducer(Reducer, Protocol):
    """Reduces messages of the dtypes and ops that it knows, in memory that ranks share."""

    min_bytes: int
    """MPI reduces smaller messages faster."""
    keeps_order: bool
    """Whether the operands of all ranks are combined in the tree of `comm.ops.combine`."""

    def knows(self, op: ReduceOp, dtype: np.dtype) -> bool:
        """Return whether it can reduce `dtype` by `op`, MEAN included."""

    def attach(self, message: Message) -> None:
        """Do the part of `all_reduce` that needs no agreement of the ranks yet."""
        # If they agree, the same message must be reduced next; else `detach` must withdraw it
        # before this rank agrees on anything else.

    def detach(self) -> None:
        """Withdraw the message that was attached last, if it was not reduced."""

    def parameters(self, op: ReduceOp, dtype: np.dtype, num_bytes: int) -> dict[str, int]:
        """Return the parameters, by name, with which compiled code reduces an array, if it can."""
        # `check` is called after its waits, and `withdraw` if the ranks do not agree.

    def ready(self, op: ReduceOp, dtype: np.dtype) -> Callable[[np.ndarray], object] | None:
        """Return a function that reduces a slice over nodes in place, ``None`` with one node."""

    def check(self) -> None:
        """Raise if a wait of compiled code has ended because ranks leave."""

    def withdraw(self) -> None:
        """Withdraw data that compiled code has contributed and not reduced."""

    def drain(self) -> None:
        """Wait for every reduction that was started."""

    def revoke(self) -> None:
        """Let every rank leave its waits in the communicator, if there is one."""

    def close(self) -> None:
        """End its thread, and free its communicator, if it has them."""


class RowReducer(Protocol):
    """Reduces the arrays of all replicas of a rank. All methods are **Collective** over ranks."""

    def reduce_rows(
        self, op: ReduceOp, rows: Sequence[Sequence[np.ndarray]], targets: Sequence[np.ndarray]
    ) -> None:
        """Reduce `rows`, one per replica of this rank, to `targets`."""
        # Each row is like the sources of a `Message`. At least one of its arrays is not empty.

    def reduce_messages(self, op: ReduceOp, messages: Sequence[Message]) -> object:
        """Reduce messages, one per replica of this rank, to the targets of each."""


class Transport(Protocol):
    """A group of ranks between which data is moved."""

    # Every method except `round`, `send`, `receive` and `abort` is collective: unless noted
    # otherwise, all ranks call it with buffers of the same dtype and length. The methods check
    # nothing, because `agreement` has checked that all ranks make the same call.

    rank: int
    size: int
    library: str
    """Name and version of the MPI library, ``"none"`` without MPI."""
    world_ranks: Sequence[int]
    """The ranks in COMM_WORLD, empty without MPI."""
    world_size: int
    """The number of ranks in COMM_WORLD, 0 without MPI."""
    pool: Pool
    """Memory for results."""
    occupancy: Occupancy
    """Whether this rank is inside a wait for the data of other ranks."""
    has_fast_paths: bool
    """Whether calls may reuse the results of earlier checks; the same on all ranks."""

    @property
    def node(self) -> NodeReducer | None:
        """The reducer in the memory that ranks of a node share, if there is one."""

    @property
    def piggyback(self) -> Piggyback | None:
        """The round that `round` has returned last, if it has space for numbers."""

    def all_reduce(self, op: ReduceOp, source: np.ndarray, target: np.ndarray) -> None:
        """Reduce `source` over ranks, except by MEAN, to `target`, which may be the same array."""

    def ready(self, op: ReduceOp, dtype: np.dtype) -> Callable[[np.ndarray, np.ndarray], object]:
        """Return a function `(source, target)` that does `all_reduce` by `op` on host arrays."""

    def start_all_reduce(
        self, op: ReduceOp, source: np.ndarray, target: np.ndarray
    ) -> Callable[[], object]:
        """Begin `all_reduce`, and return the function that waits for its end."""

    def drain(self) -> None:
        """Wait for every reduction that was started."""

    def reduce(self, op: ReduceOp, buffer: np.ndarray, root: int) -> None:
        """Replace `buffer` on `root` by its reduction over ranks."""

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        """Replace `buffer` on every rank by the buffer of `root`."""

    def broadcast_each(self, buffers: Sequence[np.ndarray], roots: Sequence[int]) -> None:
        """Replace each of `buffers` on every rank by its root's buffer, all at the same time."""

    def all_gather(
        self, part: np.ndarray, counts: Sequence[int], out: np.ndarray | None = None
    ) -> np.ndarray:
        """Return the 1-d parts of all ranks, of `counts` elements each, one behind the other."""
        # In `out` if it is passed, here and in `all_to_all`; it shares no memory with `part`.

    def start_all_gather(
        self, part: np.ndarray, counts: Sequence[int]
    ) -> Callable[[], np.ndarray | None]:
        """Begin to gather short parts; the returned function returns ``None`` until all arrive."""

    def gather(self, part: np.ndarray, counts: Sequence[int], root: int) -> np.ndarray | None:
        """Do `all_gather` on only `root`; return ``None`` on the other ranks."""

    def all_to_all(
        self,
        buffer: np.ndarray,
        counts: Sequence[int],
        incoming: Sequence[int],
        out: np.ndarray | None = None,
        is_even: bool = False,
    ) -> np.ndarray:
        """Send each rank its part of `buffer`, and return the parts sent to this one."""
        # Rank r gets ``counts[r]`` elements and sends ``incoming[r]``. All arrays are 1-d and in
        # rank order. With `is_even` all these numbers are equal, on all ranks.

    def send(self, buffer: np.ndarray, rank: int) -> None:
        """Send `buffer` to `rank`, which calls `receive`."""

    def receive(self, buffer: np.ndarray, rank: int) -> None:
        """Overwrite `buffer` with the data that `rank` sends."""

    def round(self, num_values: int) -> Round:
        """Return a new round of `num_values` integers, without waiting."""

    def wait_busily(self, is_busy: bool) -> None:
        """Set whether waits keep the core, or leave it to other threads of this rank."""

    def lost_ranks(self, error: BaseException | None) -> list[int] | None:
        """Return the ranks that are known to be dead, if that caused `error`, else ``None``.

        If a rank is known to be dead, a wait that has ended without an error has failed too.
        """

    def leave_waits(self) -> None:
        """Let waits for data in shared memory end with an error, from any thread."""

    def revoke(self) -> None:
        """Let every rank leave its waits for data with an error, because one rank is dead."""

    def close(self) -> None:
        """Free the resources of MPI and of the system; no operation may be pending."""

    def abort(self, exit_code: int) -> None:
        """End every process of the job."""


_MASK = 2**64 - 1


def copied(array: np.ndarray, out: np.ndarray | None) -> np.ndarray:
    """Return a copy of `array`, in `out` if it is passed."""
    if out is None:
        return np.array(array)
    np.copyto(out, array)
    return out


class SoloRound:
    """A round of one rank."""

    def __init__(self, num_values: int) -> None:
        # One array for both: with one rank, the largest values are its own.
        self.send = self.receive = np.zeros(num_values, np.uint64)
        self.start: Callable[[], object] = bool
        self.done: Callable[[], bool] = lambda: True
        self.withdraw: Callable[[], object] = bool

    def rest(self, waited_s: float) -> None:
        """Do nothing: no rank waits."""

    def expect(self, limit_ns: int, number: int) -> bool:
        """Return True: no other rank is missing."""
        return True

    def meet(self, first: int, second: int) -> int:
        """Contribute two numbers, which are equal on all ranks, because there is one."""
        self.send[:] = first, _MASK - first, second, _MASK - second
        return 2


class SoloTransport:
    """One rank without MPI."""

    rank = 0
    size = 1
    library = "none"
    world_ranks: Sequence[int] = ()
    world_size = 0
    node: NodeReducer | None = None
    piggyback: Piggyback | None = None

    def __init__(self) -> None:
        self.has_fast_paths = settings_at_the_end().fast_paths
        self.pool = Pool(recycles=self.has_fast_paths)
        self.occupancy = Occupancy()

    def all_reduce(self, op: ReduceOp, source: np.ndarray, target: np.ndarray) -> None:
        """Copy `source` to `target`."""
        if target is not source:
            np.copyto(target, source)

    def ready(self, op: ReduceOp, dtype: np.dtype) -> Callable[[np.ndarray, np.ndarray], object]:
        """Return a function that copies a source to a target."""
        return functools.partial(self.all_reduce, op)

    def start_all_reduce(
        self, op: ReduceOp, source: np.ndarray, target: np.ndarray
    ) -> Callable[[], object]:
        """Copy `source` to `target`."""
        self.all_reduce(op, source, target)
        return bool

    def drain(self) -> None:
        """Do nothing: no reduction is pending."""

    def reduce(self, op: ReduceOp, buffer: np.ndarray, root: int) -> None:
        """Leave `buffer` unchanged."""

    def broadcast(self, buffer: np.ndarray, root: int) -> None:
        """Leave `buffer` unchanged."""

    def broadcast_each(self, buffers: Sequence[np.ndarray], roots: Sequence[int]) -> None:
        """Leave `buffers` unchanged."""

    def all_gather(
        self, part: np.ndarray, counts: Sequence[int], out: np.ndarray | None = None
    ) -> np.ndarray:
        """Return a copy of `part`."""
        return copied(part, out)

    def start_all_gather(
        self, part: np.ndarray, counts: Sequence[int]
    ) -> Callable[[], np.ndarray | None]:
        """Return a function that returns a copy of `part`."""
        return lambda: np.array(part)

    def gather(self, part: np.ndarray, counts: Sequence[int], root: int) -> np.ndarray | None:
        """Return a copy of `part`."""
        return np.array(part)

    def all_to_all(
        self,
        buffer: np.ndarray,
        counts: Sequence[int],
        incoming: Sequence[int],
        out: np.ndarray | None = None,
        is_even: bool = False,
    ) -> np.ndarray:
        """Return a copy of `buffer`."""
        return copied(buffer, out)

    def send(self, buffer: np.ndarray, rank: int) -> None:
        """Raise: there is no other rank."""
        raise AssertionError("a world of one rank has nobody to send to")

    def receive(self, buffer: np.ndarray, rank: int) -> None:
        """Raise: there is no other rank."""
        raise AssertionError("a world of one rank has nobody to receive from")

    def round(self, num_values: int) -> SoloRound:
        """Return a round that is complete at once."""
        return SoloRound(num_values)

    def wait_busily(self, is_busy: bool) -> None:
        """Do nothing: there are no waits for ranks."""

    def lost_ranks(self, error: BaseException | None) -> None:
        """Return ``None``: there is no other rank."""

    def leave_waits(self) -> None:
        """Do nothing: no rank waits."""

    def revoke(self) -> None:
        """Do nothing: no rank waits."""

    def close(self) -> None:
        """Do nothing: there is nothing to free."""

    def abort(self, exit_code: int) -> None:
        """End this process."""
        os._exit(exit_code)
