"""Persistent reductions: checked, planned and formatted once, started often.

A training loop repeats a few reductions, in which only the numbers change. MPI's persistent
collectives have the same idea (MPI 4.1, section 6.13).
"""

from __future__ import annotations

import enum
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np

from mpistrat.agreement.call import Call
from mpistrat.agreement.channel import Channel
from mpistrat.agreement.ledger import Signature
from mpistrat.arrays import Array
from mpistrat.comm.device_reducers import DeviceCapabilities
from mpistrat.comm.ops import compiled_function
from mpistrat.comm.pack_plan import plan_reduction
from mpistrat.comm.packing import (
    Packing,
    ReusedDevicePacking,
    ReusedPacking,
    describe_on_device,
    pack,
)
from mpistrat.comm.pool import Pool
from mpistrat.comm.reducers import MpiReducer
from mpistrat.comm.selection import check_plan, choose_reducer, is_shareable
from mpistrat.comm.transport import Piggyback
from mpistrat.native import native_library
from mpistrat.options import CommunicationOptions, ReduceOp
from mpistrat.system.callsite import Place

_logger = logging.getLogger("mpistrat")


class Route(enum.IntEnum):
    """How the numbers of a repeated reduction are moved; as in ``native/fast_reduction.c``."""

    BY_PYTHON = 0
    """By `Reduction.start` and `Reduction.finish`."""
    BY_MPI = 1
    """By one call of MPI, from array to array."""
    IN_ROUND = 2
    """In shared memory, all of them in the round of the agreement."""
    IN_BLOCKS = 3
    """In shared memory, block by block."""
    IN_SLICES = 4
    """In the shared memory of each node, in one block whose slices MPI reduces over nodes."""
    GATHERED = 5
    """By MPI, all of them in the round of the agreement."""
    IN_ROWS = 6
    """By `reduce_rows`, together with the rows of this rank's other replicas."""


class FastPath(NamedTuple):
    """How compiled code reduces one array."""

    route: Route = Route.BY_PYTHON
    move: Callable[..., object] | None = None
    """Function that it calls to move numbers by MPI."""
    numbers: Mapping[str, int] = MappingProxyType({})
    """Addresses and sizes, by their names in ``native/fast_reduction.c``."""


class _Exchange:
    """Numbers as they are sent, and the array for the reduction; `unpack` returns the results."""

    # With `is_direct` MPI moves them in a separate call, otherwise they are sent with the
    # agreement.

    def __init__(
        self,
        source: np.ndarray,
        target: np.ndarray,
        unpack: Callable[[], list[Array]] | None = None,
        is_direct: bool = False,
    ) -> None:
        self.source, self.target, self.unpack, self.is_direct = source, target, unpack, is_direct


Use = Callable[[list[Array]], object]
"""Called once on this rank with the results."""


class Row:
    """The arrays of one replica, on a rank with several, and the arrays for the results."""

    __slots__ = ("arrays", "lends", "out", "place", "reduction", "results", "use")

    def __init__(
        self,
        reduction: Reduction,
        arrays: Sequence[Array],
        out: Sequence[np.ndarray] | None = None,
        lends: bool = False,
        use: Use | None = None,
        place: Place = None,
    ) -> None:
        # `place` is the line of the user's code, if it is known.
        self.reduction, self.arrays, self.out = reduction, arrays, out
        self.lends, self.use, self.place = lends, use, place
        self.results: list[Array] | None = None
        """The results of this replica, once they exist; empty if `use` has received them."""


Begun = _Exchange | Packing | Row
"""A reduction that waits for the other ranks."""


class Reduction:
    """A reduction of arrays of given dtypes and shapes, whose arguments have been checked."""

    # Its methods are collective. Each takes the call in which it runs, and arrays of these dtypes
    # and shapes.

    def __init__(
        self,
        call: Call,
        op: ReduceOp,
        arrays: Sequence[Array],
        details: tuple[object, ...],
        wires: Sequence[np.dtype] | None,
        described: bytes | None,
        options: CommunicationOptions,
        capabilities: DeviceCapabilities,
    ) -> None:
        # `described` is the result of `Collectives.describe` for `arrays`.
        is_plain = described is not None
        on_device = () if is_plain else capabilities.places(arrays)
        shapes = [(array.dtype, array.shape) for array in arrays]
        plan = plan_reduction(op, shapes, wires, options, on_device, is_plain)
        check_plan(options, plan)
        self.signature = Signature(
            call.signature(
                op.name,
                tuple((dtype_name(dtype), shape) for dtype, shape in shapes),
                *details,
                () if wires is None else tuple(dtype_name(wire) for wire in wires),
                _format_places(on_device),
                _format_options(options),
            )
        )
        # Kept alive, because the cache of `CollectiveCall.prepare` knows options by their identity.
        self.options = options
        self.op, self.plan, self._described = op, plan, described
        self._device = capabilities.device
        self._on_device = describe_on_device(arrays, self._device) if plan.stays_on_device else None
        self._library = native_library()
        self._transport = transport = call.channel.transport
        # The inputs of the choice do not change during the life of a channel, and are equal on all
        # ranks.
        self._reducers = [
            choose_reducer(
                *(transport, options, op, each.dtype, each.num_bytes),
                capabilities if each.on_device else None,
            )
            for each in plan.packs
        ]
        shares = bool(plan.packs) and is_shareable(options, op, plan.packs[0])
        node = transport.node
        together: object = call.channel.row_reducer
        self.takes_rows = bool(plan.packs) and all(
            reducer is together for reducer, _ in self._reducers
        )
        """Whether the replicas of this rank are reduced together, one row each."""
        # Only the first message can be begun before the ranks agree: the memory has space for one.
        is_first = shares and self._reducers[0][0] is node
        self._node = node if is_first and not call.channel.shares_memory else None
        self._piggyback: Piggyback | None = None
        self._direct = MpiReducer(transport)
        """For one array that MPI reduces in its own memory, without any copy."""
        self.is_one = plan.is_single and plan.is_plain
        """Whether one array is sent from its own memory."""
        self._is_direct = self.is_one and type(self._reducers[0][0]) is MpiReducer
        self._joined: np.ndarray | None = None
        self._reused: ReusedPacking | None = None
        self._reused_on_device: ReusedDevicePacking | None = None
        self.lent: list[np.ndarray] = []
        """Memory for the results of all rows, which the next reduction overwrites."""
        if self.takes_rows and plan.is_unchanged:
            self.lent = [np.empty(*each) for each in plan.results]
        if shares and transport.piggyback is not None:
            self._use_piggyback(transport.piggyback)

    def _use_piggyback(self, piggyback: Piggyback) -> None:
        """Send the arrays with the agreement itself, if there is space for all."""
        first, *others = self.plan.packs
        if others or first.num_bytes > piggyback.room:
            return
        self._piggyback = piggyback
        # Ranks agree on dtypes, shapes and options, so either all of them put the numbers into the
        # round, or none.
        self._write_result = piggyback.result(self.op, first.dtype)
        if first.small and not first.large and self.plan.is_unchanged:
            # One buffer for all calls, because the lock of the channel admits one call at a time.
            self._joined = np.empty(first.small_size, first.wire)

    @property
    def travels_with_agreement(self) -> bool:
        """Whether no data is moved after the ranks agree."""
        return self._piggyback is not None

    @property
    def keeps_dtypes(self) -> bool:
        """Whether the arrays are plain, and the results have their dtypes."""
        return self.plan.is_unchanged

    def fits(self, arrays: list[Array]) -> bool:
        """Return whether `arrays` can be sent unchanged, and this was prepared for such arrays."""
        known = self._described
        if known is not None:
            return bool(self._library.describe(arrays) == known)
        there = self._on_device
        return there is not None and describe_on_device(arrays, self._device) == there

    def all_reduce(
        self,
        call: Call,
        arrays: Sequence[Array],
        out: Sequence[np.ndarray] | None = None,
        lends: bool = False,
    ) -> list[Array]:
        """Return each array reduced over ranks, written to `out` if it is passed."""
        # `out` are plain arrays of the shapes and dtypes of the results. An array of `out` may be
        # the input of the same result; otherwise they share no memory with `arrays`. With `lends`,
        # results may be in memory of this object, until its next reduction.
        channel = call.channel
        try:
            # Before the ranks agree. The last rank to arrive then finds the numbers of all other
            # ranks, and need not wait for them a second time.
            begun = self.start(channel, arrays, out, lends)
            # A timeline shows agreement and data separately, so the row then waits for `finish`.
            if type(begun) is Row and channel.checks and call.recorder is None:
                channel.row = begun
            call.agree_on(self.signature)
        except BaseException:
            # The channel may stay open, for example after an interruption before the round.
            self.withdraw()
            raise
        return self.finish(channel, begun, call)

    def fast_path(self, lends: bool) -> FastPath:
        """Return how compiled code reduces one array, or with `lends` several."""
        plan, transport = self.plan, self._transport
        if self.takes_rows:
            return FastPath(Route.IN_ROWS)
        # Compiled code does not cast or join, and does not accept an empty array: that arrives at
        # no step, so there would be nothing to withdraw after an error.
        is_one = plan.is_single and plan.is_unchanged and not lends
        if not is_one or not plan.packs[0].num_bytes:
            return FastPath()
        pack, node, piggyback = plan.packs[0], transport.node, transport.piggyback
        # Also together with GATHERED: without checks there is no round, and compiled code then uses
        # MPI.
        move = self._direct.ready(self.op, pack.dtype) if self._is_direct else None
        if self._piggyback is not None and not self._piggyback.is_shared:
            function = compiled_function(self.op, pack.dtype)
            assert function is not None
            number, itemsize = function
            divisor = transport.size if self.op is ReduceOp.MEAN else 1
            how = {"function": number, "divisor": divisor, "itemsize": itemsize}
            return FastPath(
                Route.GATHERED,
                move,
                {**self._piggyback.parameters, **how, "owners": transport.size},
            )
        if self._is_direct:
            return FastPath(Route.BY_MPI, move)
        parameters = {} if node is None else node.parameters(self.op, pack.dtype, pack.num_bytes)
        if node is None or not parameters or (self._piggyback is None and self._node is None):
            return FastPath()
        if piggyback is None or not piggyback.is_shared:
            return FastPath(Route.IN_SLICES, node.ready(self.op, pack.dtype), parameters)
        # Only reached if all ranks are on one node: otherwise the round is not in shared memory.
        route = Route.IN_BLOCKS if self._piggyback is None else Route.IN_ROUND
        # The parameters of both routes: without checks there is no round, and compiled code uses
        # IN_BLOCKS in place of IN_ROUND.
        return FastPath(route, None, {**piggyback.parameters, **parameters})

    def check_wait(self) -> None:
        """Raise if a wait for data has ended because ranks leave."""
        if self._node is not None:
            self._node.check()

    def withdraw_brought(self) -> None:
        """Do `withdraw` for data that compiled code has put into shared memory."""
        if self._node is not None:
            self._node.withdraw()

    def start(
        self,
        channel: Channel,
        arrays: Sequence[Array],
        out: Sequence[np.ndarray] | None = None,
        lends: bool = False,
    ) -> Begun:
        """Do the part of `all_reduce` that needs no other rank, which saves a wait."""
        is_checked = channel.checks  # without checks there is no round to send data with
        begun: Begun
        if self.takes_rows:
            return Row(self, arrays, out, lends)
        if self._piggyback is not None and is_checked:
            begun = self._begin_with_agreement(channel, arrays, out, lends)
            self._piggyback.attach(begun.source)
            return begun
        if self._is_direct:
            # Allocated before the agreement, while other ranks may still be computing.
            target = _target(arrays[0], out, channel.pool)
            return _Exchange(arrays[0], target, is_direct=True)
        packing = self.pack(channel.pool, arrays, out, lends)
        if self._node is not None and is_checked:
            self._node.attach(packing.messages[0])
        return packing

    def withdraw(self) -> None:
        """Withdraw the data that `start` has put into shared memory, if any."""
        if self._node is not None:
            self._node.detach()

    def finish(self, channel: Channel, begun: Begun, call: Call | None = None) -> list[Array]:
        """Return the results, once the ranks agree; without a `call`, nothing is recorded."""
        if type(begun) is Row:
            return self._results_of_row(channel, begun, call)
        if type(begun) is _Exchange:
            if call is not None:
                self._note_exchange(call, begun)
            if begun.is_direct:
                self._direct.all_reduce_one(self.op, begun.source, begun.target)
            else:
                self._write_result(begun.target)
            if call is not None:
                call.is_moving = False
                call.show_received([begun.target])
            return [begun.target] if begun.unpack is None else begun.unpack()
        assert not isinstance(begun, _Exchange | Row)
        for (reducer, why), message in zip(self._reducers, begun.messages, strict=True):
            if call is not None:
                self._note(call, message.num_bytes, message.dtype, type(reducer).__name__, why)
            reducer.all_reduce(self.op, message)
            if call is not None:
                call.show_received(message.targets)
        if call is not None:
            call.is_moving = False
        return begun.unpack()

    def _results_of_row(self, channel: Channel, row: Row, call: Call | None) -> list[Array]:
        if row.results is None:  # the vote has not reduced it
            channel.reduce_row(row)
        results = row.results
        assert results is not None
        if call is not None:
            for (reducer, why), each in zip(self._reducers, self.plan.packs, strict=True):
                self._note(call, each.num_bytes, each.wire, type(reducer).__name__, why)
            call.is_moving = False
            call.show_received(results)
        return results

    def _note_exchange(self, call: Call, exchange: _Exchange) -> None:
        source = exchange.source
        name, why = "Piggyback", "travels with the agreement"
        if exchange.is_direct:
            name, why = "MpiReducer", self._reducers[0][1]
        else:
            call.is_moving = False  # the data has arrived with the agreement
        self._note(call, source.nbytes, source.dtype, name, why)

    def _begin_with_agreement(
        self,
        channel: Channel,
        arrays: Sequence[Array],
        out: Sequence[np.ndarray] | None,
        lends: bool,
    ) -> _Exchange:
        # The first two cases avoid `pack`, for the most frequent reductions.
        if self.is_one:
            array = arrays[0]
            return _Exchange(array, _target(array, out, channel.pool))
        joined = self._joined
        if joined is not None and out is None:
            self._library.join(arrays, joined)
            return _Exchange(joined, joined, lambda: self._library.split(joined, arrays))
        packing = self.pack(channel.pool, arrays, out, lends)
        source, target, split = packing.messages[0].whole()

        def unpack() -> list[Array]:
            split()
            return packing.unpack()

        return _Exchange(source, target, unpack)

    def pack(
        self,
        pool: Pool,
        arrays: Sequence[Array],
        out: Sequence[np.ndarray] | None,
        lends: bool,
    ) -> Packing:
        """Return `arrays` in the form in which they are reduced: see `all_reduce`."""
        if lends and self._on_device is not None:
            return self._packed_on_device(pool, arrays)
        if not lends or not self.plan.is_unchanged:
            return pack(self.plan, arrays, pool, out=out)
        if self._reused is None:
            self._reused = ReusedPacking(self.plan, pool)
        self._reused.fill(arrays)
        return self._reused

    def _packed_on_device(self, pool: Pool, arrays: Sequence[Array]) -> Packing:
        reused = self._reused_on_device
        # The memory is ordered with the work of only one stream. On a different stream, a kernel
        # could still read data that this call overwrites.
        if reused is None or not reused.is_of_stream():
            reused = ReusedDevicePacking(self.plan, arrays, self._device, pool)
            self._reused_on_device = reused
        reused.fill(arrays)
        return reused

    def start_all_reduce(self, call: Call, arrays: Sequence[Array]) -> Callable[[], list[Array]]:
        """Begin `all_reduce`, and return the function that ends it."""
        channel = call.channel
        # Copied, because the program may write to its arrays before the end. Not into shared
        # memory, because the process may fork before the end.
        packing = pack(self.plan, arrays, channel.private_pool, copy=True)
        call.agree_on(self.signature)
        ends = []
        for (reducer, why), message in zip(self._reducers, packing.messages, strict=True):
            self._note(call, message.num_bytes, message.dtype, type(reducer).__name__, why)
            # All are begun here, in the same order on all ranks. `end` may be called in any order.
            ends.append(reducer.start_all_reduce(self.op, message))
        call.is_moving = False

        def end() -> list[Array]:
            for end_one, message in zip(ends, packing.messages, strict=True):
                end_one()
                call.show_received(message.targets)
            return packing.unpack()

        return end

    def reduce(self, call: Call, arrays: Sequence[Array], root: int) -> list[Array] | None:
        """Return each array reduced over ranks on `root`, ``None`` on the other ranks."""
        packing = pack(self.plan, arrays, call.channel.pool)
        call.agree_on(self.signature)
        for (reducer, why), message in zip(self._reducers, packing.messages, strict=True):
            self._note(call, message.num_bytes, message.dtype, type(reducer).__name__, why)
            reducer.reduce(self.op, message, root)
        call.is_moving = False
        if call.channel.rank != root:
            return None
        for message in packing.messages:
            call.show_received(message.targets)
        return packing.unpack()

    def _note(
        self, call: Call, num_bytes: int, dtype: np.dtype, implementation: str, why: str
    ) -> None:
        """Show in the timeline and the log which implementation moves numbers of `dtype`."""
        if call.recorder is None and not _logger.isEnabledFor(logging.DEBUG):
            return
        call.note_moved(num_bytes, implementation)
        call.moved["why"] = why
        size, where = num_bytes // dtype.itemsize, type(call.channel.transport).__name__
        _logger.debug(
            "%s: %d x %s by %s over %s (%s)", call.kind, size, dtype, implementation, where, why
        )


def _target(array: np.ndarray, out: Sequence[np.ndarray] | None, pool: Pool) -> np.ndarray:
    return pool.take(array.shape, array.dtype) if out is None else out[0]


@functools.lru_cache
def dtype_name(dtype: np.dtype) -> str:
    """Return the name of `dtype` that the ranks compare: without the byte order."""
    return str(dtype.newbyteorder("="))


def _format_places(on_device: tuple[bool, ...]) -> str | tuple[()]:
    """Return which arrays are in device memory, in the form on which the ranks agree."""
    if not on_device:
        return ()
    numbers = [number for number, each in enumerate(on_device) if each]
    which = "" if all(on_device) else f" (arrays {', '.join(map(str, numbers))})"
    return f"in device memory{which}"


@functools.lru_cache
def _format_options(options: CommunicationOptions) -> str | tuple[()]:
    """Return the options in the form on which the ranks agree, empty for the defaults."""
    default = CommunicationOptions()
    differing = [
        f"{name}={getattr(options, name)}"
        for name in ("bytes_per_pack", "implementation", "deterministic", "wire_dtype")
        if getattr(options, name) != getattr(default, name)
    ]
    return f"with {', '.join(differing)}" if differing else ()
