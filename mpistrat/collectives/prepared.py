"""Persistent reductions: checked, planned and formatted once, started often.

A training loop repeats a few reductions, of which only the numbers change. MPI has the same idea
in its persistent collectives (MPI 4.1, section 6.13).
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence

import numpy as np

from mpistrat.agreement.call import Call
from mpistrat.agreement.ledger import Signature
from mpistrat.arrays import Array
from mpistrat.comm.device_reducers import DeviceCapabilities
from mpistrat.comm.pack_plan import plan_reduction
from mpistrat.comm.packing import Message, pack
from mpistrat.comm.selection import check_plan, choose_reducer, is_shareable
from mpistrat.comm.transport import NodeReducer, Piggyback
from mpistrat.native import native_library
from mpistrat.options import CommunicationOptions, ReduceOp

__all__ = ["PreparedReduction", "dtype_name"]

_logger = logging.getLogger("mpistrat")


class PreparedReduction:
    """A reduction of arrays of given dtypes and shapes, whose arguments have been checked."""

    # Its methods are collective. Each takes the call that it happens in, and arrays of these dtypes
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
        # `described` is what `Collectives.describe` returns for `arrays`.
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
        # Kept, because the cache of `CollectiveCall.prepare` knows options by their identity.
        self.options = options
        self._op, self._plan, self._described = op, plan, described
        self._library = native_library()
        transport = call.channel.transport
        # What chooses a reducer does not change while a channel lives, and is equal on all ranks.
        self._reducers = [
            choose_reducer(
                *(transport, options, op, each.dtype, each.num_bytes),
                capabilities if each.on_device else None,
            )
            for each in plan.packs
        ]
        shares = bool(plan.packs) and is_shareable(options, op, plan.packs[0])
        node = transport.node
        # Only the first message can be begun before the ranks agree: memory has room for one.
        self._node = node if shares and self._reducers[0][0] is node else None
        self._piggyback: Piggyback | None = None
        self._joined: np.ndarray | None = None
        if shares and transport.piggyback is not None:
            self._use_piggyback(transport.piggyback)

    def _use_piggyback(self, piggyback: Piggyback) -> None:
        """Have the arrays travel with the agreement itself, where there is room for all."""
        first, *others = self._plan.packs
        if others or first.num_bytes > piggyback.room:
            return
        self._piggyback = piggyback
        self._write_result = piggyback.result(self._op, first.dtype)
        joins = first.small and not first.large and first.is_uncast and not first.is_reordered
        if joins and self._plan.is_plain:
            # One buffer for all calls: the lock of the channel lets one in at a time.
            self._joined = np.empty(first.small_size, first.wire)

    def fits(self, arrays: list[Array]) -> bool:
        """Return whether `arrays` are plain ones that this was prepared for."""
        known = self._described
        return known is not None and bool(self._library.describe(arrays) == known)

    def all_reduce(self, call: Call, arrays: Sequence[Array]) -> list[Array]:
        """Return each array reduced over ranks."""
        channel = call.channel
        # Without checks there is no agreement that anything could travel with.
        if self._piggyback is not None and channel.checks:
            return self._reduce_with_agreement(call, self._piggyback, arrays)
        packing = pack(self._plan, arrays, channel.pool)
        if self._node is not None and channel.checks:
            self._agree_attached(call, self._node, packing.messages[0])
        else:
            call.agree_on(self.signature)
        for (reducer, why), message in zip(self._reducers, packing.messages, strict=True):
            self._note(call, message.num_bytes, message.dtype, type(reducer).__name__, why)
            reducer.all_reduce(self._op, message)
            call.show_received(message.targets)
        call.is_moving = False
        return packing.unpack()

    def all_reduce_in_place(self, call: Call, arrays: Sequence[np.ndarray]) -> None:
        """Overwrite each array with its reduction over ranks."""
        plan, channel = self._plan, call.channel
        is_direct = plan.is_single and plan.is_plain
        if is_direct and self._piggyback is not None and channel.checks:
            self._exchange(call, self._piggyback, arrays[0], arrays[0])
        elif is_direct and self._piggyback is None:
            message = Message(arrays, arrays, channel.pool)
            if self._node is not None and channel.checks:
                self._agree_attached(call, self._node, message)
            else:
                call.agree_on(self.signature)
            reducer, why = self._reducers[0]
            self._note(call, message.num_bytes, message.dtype, type(reducer).__name__, why)
            reducer.all_reduce(self._op, message)
            call.is_moving = False
            call.show_received(arrays)
        else:
            for array, result in zip(arrays, self.all_reduce(call, arrays), strict=True):
                np.copyto(array, result)

    def _reduce_with_agreement(
        self, call: Call, piggyback: Piggyback, arrays: Sequence[Array]
    ) -> list[Array]:
        # The first two ways are short cuts through `pack`, for what is reduced most often.
        if self._plan.is_single and self._plan.is_plain:
            target = np.empty(arrays[0].shape, arrays[0].dtype)
            self._exchange(call, piggyback, arrays[0], target)
            return [target]
        joined = self._joined
        if joined is not None:
            self._library.join(arrays, joined)
            self._exchange(call, piggyback, joined, joined)
            results: list[Array] = self._library.split(joined, arrays)
            return results
        packing = pack(self._plan, arrays, call.channel.pool)
        source, target, split = packing.messages[0].whole()
        self._exchange(call, piggyback, source, target)
        split()
        return packing.unpack()

    def _exchange(
        self, call: Call, piggyback: Piggyback, source: np.ndarray, target: np.ndarray
    ) -> None:
        """Have `source` travel with the agreement, and write what comes to `target`."""
        piggyback.attach(source)
        call.agree_on(self.signature)
        call.is_moving = False  # the data has come with the agreement
        self._note(call, source.nbytes, source.dtype, "Piggyback", "travels with the agreement")
        self._write_result(target)
        call.show_received([target])

    def _agree_attached(self, call: Call, node: NodeReducer, message: Message) -> None:
        """Agree with `message` begun as far as no other rank is needed, which saves a wait."""
        try:
            node.attach(message)
            call.agree_on(self.signature)
        except BaseException:
            # The channel may stay open, as after an interruption that came before the round.
            node.detach()
            raise

    def start_all_reduce(self, call: Call, arrays: Sequence[Array]) -> Callable[[], list[Array]]:
        """Begin `all_reduce`, and return the function that ends it."""
        channel = call.channel
        # Copied, because the program may write to its arrays before the end. Not to shared memory,
        # because the process may fork before it.
        packing = pack(self._plan, arrays, channel.private_pool, copy=True)
        call.agree_on(self.signature)
        ends = []
        for (reducer, why), message in zip(self._reducers, packing.messages, strict=True):
            self._note(call, message.num_bytes, message.dtype, type(reducer).__name__, why)
            ends.append(reducer.start_all_reduce(self._op, message))
        call.is_moving = False

        def end() -> list[Array]:
            for end_one, message in zip(ends, packing.messages, strict=True):
                end_one()
                call.show_received(message.targets)
            return packing.unpack()

        return end

    def reduce(self, call: Call, arrays: Sequence[Array], root: int) -> list[Array] | None:
        """Return each array reduced over ranks on `root`, ``None`` on the other ranks."""
        packing = pack(self._plan, arrays, call.channel.pool)
        call.agree_on(self.signature)
        for (reducer, why), message in zip(self._reducers, packing.messages, strict=True):
            self._note(call, message.num_bytes, message.dtype, type(reducer).__name__, why)
            reducer.reduce(self._op, message, root)
        call.is_moving = False
        if call.channel.rank != root:
            return None
        for message in packing.messages:
            call.show_received(message.targets)
        return packing.unpack()

    def _note(
        self, call: Call, num_bytes: int, dtype: np.dtype, implementation: str, why: str
    ) -> None:
        """Show in the timeline and the log what moves numbers of `dtype`."""
        if call.recorder is None and not _logger.isEnabledFor(logging.DEBUG):
            return
        call.note_moved(num_bytes, implementation)
        call.moved["why"] = why
        size, where = num_bytes // dtype.itemsize, type(call.channel.transport).__name__
        _logger.debug(
            "%s: %d x %s by %s over %s (%s)", call.kind, size, dtype, implementation, where, why
        )


@functools.lru_cache
def dtype_name(dtype: np.dtype) -> str:
    """Return the name of `dtype` in which the ranks compare it: without the byte order."""
    return str(dtype.newbyteorder("="))


def _format_places(on_device: tuple[bool, ...]) -> str | tuple[()]:
    """Return which arrays are in device memory, as the ranks agree on it."""
    if not on_device:
        return ()
    numbers = [number for number, each in enumerate(on_device) if each]
    which = "" if all(on_device) else f" (arrays {', '.join(map(str, numbers))})"
    return f"in device memory{which}"


@functools.lru_cache
def _format_options(options: CommunicationOptions) -> str | tuple[()]:
    """Return the options as the ranks agree on them, empty for the defaults."""
    default = CommunicationOptions()
    differing = [
        f"{name}={getattr(options, name)}"
        for name in ("bytes_per_pack", "implementation", "deterministic", "wire_dtype")
        if getattr(options, name) != getattr(default, name)
    ]
    return f"with {', '.join(differing)}" if differing else ()
