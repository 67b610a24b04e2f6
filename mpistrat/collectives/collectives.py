"""Collectives: agreed first, then moved. What every layer above communicates through.

The words here are MPI's (rank, size, root). A world of one rank has its transport too, so
nothing above asks for the size.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat.agreement.call import AllOrNone, Call
from mpistrat.agreement.channel import Channel
from mpistrat.agreement.ledger import Signature
from mpistrat.arrays import Array, Device, host_copy, host_view, native
from mpistrat.collectives.prepared import PreparedReduction, dtype_name, prepare
from mpistrat.comm.device_reducers import DeviceCapabilities, solo_capabilities
from mpistrat.comm.pack_plan import check_gatherable, joined
from mpistrat.comm.packing import Message, Packing, Single, describe, pack, placed_like
from mpistrat.comm.selection import check_options, choose_reducer
from mpistrat.comm.transport import Piggyback, Reducer, SoloTransport
from mpistrat.options import CommunicationOptions, ReduceOp
from mpistrat.tracing.spans import active

__all__ = ["CollectiveCall", "Collectives"]

_logger = logging.getLogger("mpistrat")


_MAX_PREPARED = 1024


class CollectiveCall(Call):
    """A collective call and the ways in which it can move arrays.

    Each method agrees before it moves. Arrays may lie on the host or the device; results lie
    where the array of this rank does, and share memory with nothing.
    """

    def __init__(
        self,
        collectives: Collectives,
        kind: str,
        name: str | None,
        options: CommunicationOptions,
    ) -> None:
        timeout_s = getattr(options, "timeout_seconds", None)
        super().__init__(collectives.channel, kind, name, timeout_s, collectives.number)
        self.options = options
        self._collectives = collectives

    def agree(self, *details: object) -> None:
        """Make sure that the options can be honoured, then agree. **Collective**."""
        self._check_options()
        super().agree(*details)

    def _check_options(self) -> None:
        if not isinstance(self.options, CommunicationOptions):
            raise TypeError(
                f"{self.kind}: options must be CommunicationOptions, not {self.options!r}."
            )
        check_options(self.options, self._collectives.capabilities)

    def _agreed_packing(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        *details: object,
        copy: bool = False,
    ) -> Packing | Single:
        prepared = self._prepared(op, arrays, details)
        # A fork may come before the end of what is started: its results are no shared memory.
        pool = self.channel.private_pool if copy else self.channel.pool
        packing = pack(prepared.plan, arrays, pool, prepared.is_plain, copy)
        self.agree_on(prepared.signature)
        return packing

    def _prepared(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        details: tuple[object, ...],
        wires: Sequence[np.dtype] | None = None,
    ) -> PreparedReduction:
        """Return what is equal in all calls like this one, checked the first time."""
        known = self._collectives.prepared
        if type(self.options) is not CommunicationOptions:
            self._check_options()
        kinds: Any = describe(arrays)
        is_plain = kinds is not None
        places: tuple[bool, ...] = ()
        if not is_plain:
            kinds = tuple([(array.dtype, array.shape) for array in arrays])
            places = self._collectives.capabilities.places(arrays)
        travel_as = None if wires is None else tuple(wires)
        key = (self.kind, self.name, op, kinds, details, travel_as, places, id(self.options))
        prepared = known.get(key)
        if prepared is None:
            self._check_options()
            if len(known) >= _MAX_PREPARED:
                known.clear()
            prepared = prepare(
                *(self.signature, op, arrays, details, wires, self.options, places, is_plain)
            )
            known[key] = prepared
        return prepared

    def _reducer(self, op: ReduceOp, message: Message) -> Reducer:
        ways = self._collectives.capabilities if message.on_device else None
        reducer, why = choose_reducer(
            self.channel.transport, self.options, op, message.dtype, message.num_bytes, ways
        )
        self._note(message.size, message.dtype, type(reducer).__name__, why)
        return reducer

    def _note(self, size: int, dtype: np.dtype, way: str, why: str) -> None:
        """Tell the timeline and the log what moves `size` numbers."""
        if active() is None and not _logger.isEnabledFor(logging.DEBUG):
            return
        self._note_moved(size * dtype.itemsize, way)
        self.moved["why"] = why
        where = type(self.channel.transport).__name__
        _logger.debug("%s: %d x %s by %s over %s (%s)", *(self.kind, size, dtype, way, where, why))

    def _note_moved(self, num_bytes: int, implementation: str) -> None:
        if active() is not None:
            self.moved["bytes"] = self.moved.get("bytes", 0) + num_bytes
            self.moved["implementation"] = implementation

    def all_reduce(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        structure: object = (),
        wires: Sequence[np.dtype] | None = None,
    ) -> list[Array]:
        """Reduce each array over ranks, equal to the bit on all of them. **Collective**.

        Dtypes, shapes and the `structure` of the nest that the arrays come from must agree over
        ranks. `wires` are what they travel as, where their own dtypes do not tell.
        """
        prepared = self._prepared(op, arrays, (structure,), wires)
        signature, may_share = prepared.signature, prepared.may_share and self.channel.checks
        piggyback = self.channel.transport.piggyback if may_share else None
        if piggyback is not None and prepared.lone_bytes <= piggyback.room:
            target = np.empty(arrays[0].shape, arrays[0].dtype)
            self._carry(piggyback, op, arrays[0], target, signature)
            return [target]
        packing = pack(prepared.plan, arrays, self.channel.pool, prepared.is_plain)
        messages = packing.messages
        if may_share:
            if piggyback and len(messages) == 1 and messages[0].num_bytes <= piggyback.room:
                source, target, split = messages[0].whole()
                self._carry(piggyback, op, source, target, signature)
                split()
                return packing.unpack()
            self._reduce_on_board(op, messages[0], signature)
            messages = messages[1:]
        else:
            self.agree_on(signature)
        for message in messages:
            self._reducer(op, message).all_reduce(op, message)
            self._received(*message.targets)
        return packing.unpack()

    def _received(self, *arrays: Array) -> None:
        """Show what came from other ranks to a fault that is waiting for it."""
        for array in arrays:
            if self.channel.on_received is not None:
                self.channel.on_received(array)

    def _reduce_on_board(self, op: ReduceOp, message: Message, signature: Signature) -> None:
        """Agree with `message` begun as far as no other rank is needed, which saves a wait."""
        transport = self.channel.transport
        node = transport.node
        reducer, why = choose_reducer(transport, self.options, op, message.dtype, message.num_bytes)
        try:
            if node is not None and reducer is node:
                node.attach(message)
            self.agree_on(signature)
        except BaseException:
            # The channel may stay open, as after an interruption that came before the round.
            if node is not None:
                node.detach()
            raise
        self._note(message.size, message.dtype, type(reducer).__name__, why)
        reducer.all_reduce(op, message)
        self._received(*message.targets)

    def _carry(
        self,
        piggyback: Piggyback,
        op: ReduceOp,
        source: np.ndarray,
        target: np.ndarray,
        signature: Signature,
    ) -> None:
        """Have `source` travel with the agreement itself, and write what comes to `target`."""
        piggyback.attach(source)
        self.agree_on(signature)
        self._note(source.size, source.dtype, "Piggyback", "travels with the agreement")
        piggyback.result(op, target)
        self._received(target)

    def start_all_reduce(
        self, op: ReduceOp, arrays: Sequence[Array], structure: object = ()
    ) -> Callable[[], list[Array]]:
        """Begin `all_reduce`, and return the function that ends it. **Collective**."""
        # The program may write to its arrays before the end.
        packing = self._agreed_packing(op, arrays, structure, copy=True)
        ends = [self._reducer(op, each).start_all_reduce(op, each) for each in packing.messages]

        def end() -> list[Array]:
            for end_one, message in zip(ends, packing.messages, strict=True):
                end_one()
                self._received(*message.targets)
            return packing.unpack()

        return end

    def reduce(
        self, op: ReduceOp, arrays: Sequence[Array], root: int, structure: object = ()
    ) -> list[Array] | None:
        """Reduce each array to `root`; ``None`` on the other ranks. **Collective**."""
        packing = self._agreed_packing(op, arrays, f"to rank {root}", structure)
        for message in packing.messages:
            self._reducer(op, message).reduce(op, message, root)
        if self.channel.rank != root:
            return None
        for message in packing.messages:
            self._received(*message.targets)
        return packing.unpack()

    def all_gather(self, arrays: Sequence[Array], axis: int, structure: object = ()) -> list[Array]:
        """Concatenate each array over ranks, in rank order. **Collective**.

        Parameters
        ----------
        arrays : sequence of arrays
            Dtypes must agree over ranks, and shapes but for their length along `axis`.
        axis : int
            May be negative.
        structure : hashable
            Structure of the nest that the arrays come from, to be agreed too.

        Raises
        ------
        ValueError
            On every rank, if shapes do not fit or `axis` is out of range on any rank. The
            strategy stays usable.
        """
        for array in arrays:
            if array.dtype.hasobject:
                raise TypeError(f"{self.kind}: an array of dtype object cannot be sent.")
        dtypes = tuple(dtype_name(array.dtype) for array in arrays)
        self.agree(f"axis {axis}", dtypes, structure)
        shapes_of_ranks = self.channel.exchange([np.shape(array) for array in arrays])
        for shapes in zip(*shapes_of_ranks, strict=True):
            check_gatherable(self.kind, shapes, axis)
        hosts = [native(np.moveaxis(host_view(array), axis, 0)).reshape(-1) for array in arrays]
        self._note_moved(sum(host.nbytes for host in hosts), "all_gather")
        gathered = [
            self.channel.transport.all_gather(
                host, [int(np.prod(shapes[i])) for shapes in shapes_of_ranks]
            )
            for i, host in enumerate(hosts)
        ]
        self._received(*gathered)
        return [
            placed_like(joined(flat, [shapes[i] for shapes in shapes_of_ranks], axis), arrays[i])
            for i, flat in enumerate(gathered)
        ]

    def broadcast(self, array: Array, *details: object, root: int = 0) -> Array:
        """Return the `array` of `root` on every rank, in memory of its own. **Collective**.

        Shape and dtype must agree over ranks, and `details` too.
        """
        dtype = np.dtype(array.dtype).newbyteorder("=")
        shape = tuple(array.shape)
        self.agree(f"from rank {root}", (dtype_name(dtype), shape), *details)
        is_root = self.channel.rank == root
        buffer = host_copy(array) if is_root else np.empty(shape, dtype)
        self._note_moved(buffer.nbytes, "broadcast")
        self.channel.transport.broadcast(buffer, root)
        self._received(buffer)
        return placed_like(buffer, array)

    def broadcast_each(self, buffers: Sequence[np.ndarray], roots: Sequence[int]) -> None:
        """Overwrite each of `buffers` with that of its root, once agreed. **Collective**."""
        self.channel.transport.broadcast_each(buffers, roots)
        self._received(*buffers)

    def exchange(self, value: Any) -> list[Any]:
        """Return the JSON `value` of every rank, in rank order. **Collective**."""
        self.agree()
        return self.channel.exchange(value)


class Collectives:
    """The collectives of one group of ranks.

    Parameters
    ----------
    channel : Channel
    ways : DeviceCapabilities
        Where the replica of this rank computes, and what can be done with device memory.
    options : CommunicationOptions
        For calls that bring none of their own.

    Attributes
    ----------
    prepared : dict
        What `CollectiveCall` has prepared for its next calls: a training loop repeats a few.
    """

    def __init__(
        self, channel: Channel, ways: DeviceCapabilities, options: CommunicationOptions
    ) -> None:
        check_options(options, ways)
        self.channel = channel
        self.capabilities = ways
        self.device = ways.device
        self.options = options
        self._lossless_options = dataclasses.replace(options, wire_dtype=None)
        self.prepared: dict[Any, PreparedReduction] = {}
        self.rank = channel.rank
        self.size = channel.size
        # Strategies are made collectively, so their numbers on the channel are equal on all ranks.
        self.number = channel.num_strategies
        channel.num_strategies += 1

    @classmethod
    def solo(cls, device: Device) -> Collectives:
        """Return the collectives of a world of one rank without MPI. Local."""
        return cls(
            Channel(SoloTransport(), None), solo_capabilities(device), CommunicationOptions()
        )

    def call(
        self, kind: str, name: str | None = None, options: CommunicationOptions | None = None
    ) -> CollectiveCall:
        """Return the context manager in which the collective `kind` is checked and done. Local.

        Parameters
        ----------
        kind : str
            Name of the public function.
        name : str, optional
            Name of the variable or object that it is called on.
        options : CommunicationOptions, optional
            By default those of the strategy. Where there is a `name`, their `wire_dtype` is left
            out: it may round a value that the program reduces, but not the state of an object.
        """
        if options is None:
            options = self.options if name is None else self._lossless_options
        return CollectiveCall(self, kind, name, options)

    def all_or_none(self, kind: str, name: str | None = None) -> AllOrNone:
        """Return a context manager: where its body fails on any rank, it fails on all.

        **Collective** on entry and on exit. The body may do no collective that a failing rank
        would miss.
        """
        return AllOrNone(self.channel, kind, name, self.options.timeout_seconds, self.number)

    def broadcast(self, array: Array, root: int = 0, kind: str = "broadcast") -> Array:
        """Return the `array` of `root`, whose shape and dtype all ranks pass. **Collective**."""
        with self.call(kind) as call:
            return call.broadcast(array, root=root)

    def gather_json(self, value: Any, kind: str = "gather_json") -> list[Any]:
        """Return the JSON `value` of every rank, in rank order. **Collective**."""
        with self.call(kind) as call:
            return call.exchange(value)

    def broadcast_json(self, value: Any, root: int = 0, kind: str = "broadcast_json") -> Any:
        """Return the JSON `value` of `root`; that of the others does not matter. **Collective**."""
        return self.gather_json(value if self.rank == root else None, kind)[root]
