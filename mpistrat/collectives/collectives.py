"""Collectives, agreed before data is moved: all higher layers communicate through them.

The terms are MPI's (rank, size, root). A world of one rank also has a transport, so no higher layer
has to check the size.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.agreement.call import AllOrNone, Call, CommonOutcome
from mpistrat.agreement.channel import Channel
from mpistrat.arrays import Array, Device
from mpistrat.collectives.fast_reduction import FastReduction
from mpistrat.collectives.reduction import Reduction
from mpistrat.comm.device_reducers import DeviceCapabilities
from mpistrat.comm.packing import describe_function
from mpistrat.comm.selection import check_options
from mpistrat.comm.transport import SoloTransport
from mpistrat.layout import Layout
from mpistrat.native import native_library
from mpistrat.options import CommunicationImplementation, CommunicationOptions, ReduceOp
from mpistrat.system.units import RunsUnits

if TYPE_CHECKING:
    from mpi4py import MPI

_MAX_REDUCTIONS = 1024
"""More reductions than any loop repeats. With ever new shapes, the cache is then cleared."""


class CollectiveCall(Call):
    """A collective call, with methods that move arrays."""

    # Each method agrees before it moves data. Arrays may be on the host or the device. Results are
    # on the same device as this rank's array, and share memory with no other array.

    def __init__(
        self,
        collectives: Collectives,
        kind: str,
        name: str | None,
        options: CommunicationOptions,
    ) -> None:
        timeout_s = getattr(options, "timeout_seconds", None)
        if timeout_s is None:
            timeout_s = collectives.options.timeout_seconds
        super().__init__(collectives.channel, kind, name, timeout_s, collectives.number)
        self.options = options
        self.reduction: Reduction | None = None
        """The last reduction of `all_reduce`."""
        self._collectives = collectives

    @property
    def layout(self) -> Layout:
        """Which replicas the ranks of the call form."""
        return self._collectives.layout

    def agree(self, *details: object) -> None:
        """Check that the options can be used, then agree. **Collective**."""
        self._check_options()
        super().agree(*details)

    def _check_options(self) -> None:
        if not isinstance(self.options, CommunicationOptions):
            raise TypeError(
                f"{self.kind}: options must be CommunicationOptions, not {self.options!r}."
            )
        if not self._collectives.has_checked(self.options):
            check_options(self.options, self._collectives.capabilities)
        if self._collectives.is_deterministic:
            check_can_order(self.options)

    def prepare(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        *details: object,
        wires: Sequence[np.dtype] | None = None,
    ) -> Reduction:
        """Return the reduction for all calls like this one, checked the first time."""
        # `details` must agree over ranks too. `wires` are the dtypes in the messages, if the
        # arrays' own dtypes do not decide them.
        collectives = self._collectives
        if type(self.options) is not CommunicationOptions:
            self._check_options()
        described = collectives.describe(arrays)
        kinds: Any = described
        if described is None:
            kinds = (
                tuple([(array.dtype, array.shape) for array in arrays]),
                collectives.capabilities.places(arrays),
            )
        travel_as = None if wires is None else tuple(wires)
        # Options by identity: hashing them takes longer than the rest of this method.
        key = (self.kind, self.name, op, kinds, details, travel_as, id(self.options))
        reduction = collectives.reductions.get(key)
        # The cache may differ from rank to rank. That is safe: preparing sends no message, and the
        # ranks still compare the signature.
        if reduction is None:
            self._check_options()
            if len(collectives.reductions) >= _MAX_REDUCTIONS:
                collectives.reductions.clear()
            capabilities = collectives.capabilities
            reduction = Reduction(
                self, op, arrays, details, wires, described, self.options, capabilities
            )
            # Without fast paths, each call is checked like the first call.
            if self.channel.transport.has_fast_paths:
                collectives.reductions[key] = reduction
        return reduction

    def are_plain(self, values: list[Any]) -> bool:
        """Return whether all `values` are host arrays that can be sent from their own memory."""
        return self._collectives.describe(values) is not None

    def fast(self, reduction: Reduction, lends: bool = False) -> FastReduction | None:
        """Return the fast path of `reduction` for such calls, if there is compiled code."""
        if native_library() is None:
            return None
        again = functools.partial(self._collectives.call, self.kind, self.name)
        return FastReduction(self, reduction, again, lends)

    def all_reduce(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        structure: object = (),
        wires: Sequence[np.dtype] | None = None,
        out: Sequence[np.ndarray] | None = None,
    ) -> list[Array]:
        """Reduce each array over ranks, bit-identical on all of them. **Collective**."""
        # The ranks must agree on dtypes, shapes and the `structure` of the nest of the arrays. For
        # `wires` see `prepare`, for `out` see `Reduction.all_reduce`.
        self.reduction = self.prepare(op, arrays, structure, wires=wires)
        return self.reduction.all_reduce(self, arrays, out)

    def all_reduce_in_place(
        self, op: ReduceOp, arrays: Sequence[np.ndarray], structure: object = ()
    ) -> None:
        """Overwrite each array with its reduction over ranks. **Collective**."""
        self.prepare(op, arrays, "in place", structure).all_reduce(self, arrays, arrays)

    def start_all_reduce(
        self, op: ReduceOp, arrays: Sequence[Array], structure: object = ()
    ) -> Callable[[], list[Array]]:
        """Begin `all_reduce`, and return the function that ends it. **Collective**."""
        return self.prepare(op, arrays, structure).start_all_reduce(self, arrays)

    def reduce(
        self, op: ReduceOp, arrays: Sequence[Array], root: int, structure: object = ()
    ) -> list[Array] | None:
        """Reduce each array to `root`; ``None`` on the other ranks. **Collective**."""
        prepared = self.prepare(op, arrays, f"to rank {root}", structure)
        return prepared.reduce(self, arrays, root)

    @contextlib.contextmanager
    def communicator(self) -> Iterator[MPI.Intracomm]:
        """Yield the communicator that moves data, ``None`` if it is not MPI that moves them.

        Of the replicas of a rank, the first gets the communicator, and the others ``None``.
        """
        transport: Any = self.channel.transport
        with self.moving(), transport.occupancy:
            yield transport.comm

    def exchange(self, value: Any) -> list[Any]:
        """Return the JSON `value` of every rank, in rank order. **Collective**."""
        self.agree()
        with self.moving():
            return self.channel.exchange(value)


class Collectives(RunsUnits):
    """The collectives of one group of ranks; `options` are for calls that pass none.

    With `is_deterministic`, all reductions are deterministic, whatever the options.
    """

    def __init__(
        self,
        channel: Channel,
        capabilities: DeviceCapabilities,
        options: CommunicationOptions,
        layout: Layout | None = None,
        is_part: bool = False,
        is_deterministic: bool = False,
    ) -> None:
        self.is_deterministic = is_deterministic
        options = _deterministic(options) if is_deterministic else options
        check_options(options, capabilities)
        self.channel = channel
        self.layout = Layout(channel.size, channel.rank) if layout is None else layout
        """Which replicas these ranks form."""
        self.capabilities = capabilities
        self.device = capabilities.device
        self.options = options
        self._lossless_options = dataclasses.replace(options, wire_dtype=None)
        self.describe = describe_function()
        self.reductions: dict[Any, Reduction] = {}
        """The reductions of earlier calls, by everything that they check."""
        self._fast: dict[tuple[object, bytes], FastReduction] = {}
        """Fast paths for one array, by op and description, for calls that pass no options."""
        self.rank = channel.rank
        self.size = channel.size
        self.arithmetic = ""
        """Fingerprint of the arithmetic that determines the bits, if the ranks do not."""
        self.is_closed = False
        self.name_of_close = "close"
        """Name of `close` in errors, if a program closes this by a different method."""
        self.on_close: dict[object, Callable[[], object]] = {}
        """Actions of this rank when it is closed, before other ranks return."""
        channel.users.add(self)
        self._unclosed: weakref.finalize[[int, int], Any] | None = None
        if channel.on_free is not None and not is_part:  # part of a group that is closed as a whole
            self._unclosed = weakref.finalize(self, _warn_unclosed, self.rank, self.size)
            # Not at the end of the program, where MPI frees everything anyway.
            self._unclosed.atexit = False
        # Strategies are created collectively, so their numbers on the channel are equal on all
        # ranks.
        self.number = channel.num_strategies
        channel.num_strategies += 1

    def close(self, error: RuntimeError) -> None:
        """Free what no other strategy uses; all later calls raise `error`. **Collective**."""
        if self.is_closed:
            return
        channel = self.channel
        # After a `CollectiveError` the ranks cannot agree, and they separate when the program ends.
        if channel.closed is None:
            with self.call(self.name_of_close) as call:
                # Before the ranks agree, so that each rank has done this when any of them returns.
                for action in self.on_close.values():
                    action()
                call.agree()
                # Garbage may be collected on only some ranks, but either all ranks free, or none.
                others = channel.exchange(len(channel.users) - 1)
            # All ranks have all counts, so either all free the channel, or none: freeing is
            # collective.
            if not any(others):
                channel.free()
        channel.users.discard(self)
        if self._unclosed is not None:
            self._unclosed.detach()
        self.is_closed = True
        self.reductions.clear()
        self._fast.clear()
        self.capabilities = DeviceCapabilities.solo(self.device)
        # Replaces the channel that may be freed: every later call raises `error` before it moves
        # data.
        self.channel = Channel(SoloTransport(), None)
        self.channel.closed = error

    def abandon(self) -> None:
        """Close without telling the other ranks, some of which are lost: nothing is freed."""
        self.channel.users.discard(self)
        if self._unclosed is not None:
            self._unclosed.detach()
        self.is_closed = True

    def again(self, channel: Channel | None = None, layout: Layout | None = None) -> Collectives:
        """Return a copy, with a different channel or layout if it is passed."""
        return type(self)(
            channel or self.channel,
            self.capabilities,
            self.options,
            layout or self.layout,
            is_deterministic=self.is_deterministic,
        )

    def has_checked(self, options: CommunicationOptions) -> bool:
        """Return whether these are the options that were checked when this was created."""
        return options is self.options or options is self._lossless_options

    @classmethod
    def solo(cls, device: Device) -> Collectives:
        """Return the collectives of a world of one rank without MPI."""
        return cls(
            Channel(SoloTransport(), None), DeviceCapabilities.solo(device), CommunicationOptions()
        )

    def call(
        self, kind: str, name: str | None = None, options: CommunicationOptions | None = None
    ) -> CollectiveCall:
        """Return the context manager in which the collective `kind` is checked and done."""
        # `kind` is the name of the public function, `name` the name of the variable or object that
        # it is called on.
        if options is None:
            # `wire_dtype` may round a value that the program reduces, but not the state of an
            # object.
            options = self.options if name is None else self._lossless_options
        elif self.is_deterministic and isinstance(options, CommunicationOptions):
            options = _deterministic(options)
        return CollectiveCall(self, kind, name, options)

    def fast_path(self, op: object, array: np.ndarray) -> FastReduction | None:
        """Return the fast path for the `all_reduce` of such an array, if a call has kept one."""
        described = self.describe([array])
        known = self._fast.get((op, described)) if described is not None else None
        return known if known is not None and known.reduction.options is self.options else None

    def keep_fast_path(self, call: CollectiveCall, op: object, array: np.ndarray) -> None:
        """Keep the fast path of `call`, which has reduced `array`, for `fast_path`, if any."""
        described, reduction = self.describe([array]), call.reduction
        if described is None or reduction is None or call.options is not self.options:
            return
        if not self.channel.transport.has_fast_paths:
            return
        if len(self._fast) >= _MAX_REDUCTIONS:
            self._fast.clear()
        fast = call.fast(reduction)
        if fast is not None:
            self._fast[op, described] = fast

    def all_or_none(self, kind: str, name: str | None = None) -> AllOrNone:
        """Return a context manager whose body fails on all ranks if it fails on any."""
        # **Collective** on entry and on exit. The body must not contain a collective that a failing
        # rank would miss.
        return AllOrNone(self.channel, kind, name, self.options.timeout_seconds, self.number)

    def common_outcome(self, kind: str, name: str | None = None) -> CommonOutcome:
        """Return `all_or_none` for ranks that are known to be in step: one round, at the end."""
        return CommonOutcome(self.channel, kind, name, self.options.timeout_seconds, self.number)

    def on_all(self, work: Callable[[], Any], kind: str, name: str | None = None) -> list[Any]:
        """Return the JSON values that `work` returns on each rank, in rank order. **Collective**.

        If `work` fails on any rank, it fails on all. The ranks must be known to be in step, and
        `work` must not contain a collective.
        """
        # Two steps: no value is sent before all ranks have one, so that a failing rank never leaves
        # other ranks in the exchange.
        outcome = self.common_outcome(kind, name)
        with outcome:
            own = work()
        return outcome.exchange(own)

    def on_root(self, work: Callable[[], Any], kind: str, name: str | None = None) -> Any:
        """Return on every rank the result of `work` on rank 0. **Collective**, like `on_all`."""
        return self.on_all(work if self.rank == 0 else _nothing, kind, name)[0]

    def gather_json(self, value: Any, kind: str = "gather_json") -> list[Any]:
        """Return the JSON `value` of every rank, in rank order. **Collective**."""
        with self.call(kind) as call:
            return call.exchange(value)

    def broadcast_json(self, value: Any, root: int = 0, kind: str = "broadcast_json") -> Any:
        """Return the JSON `value` of `root`; other ranks' values are ignored. **Collective**."""
        return self.gather_json(value if self.rank == root else None, kind)[root]


def check_can_order(options: CommunicationOptions) -> None:
    """Raise for options that round or add up in an order that depends on the ranks."""
    if options.wire_dtype is not None:
        raise NotImplementedError(
            f"wire_dtype={options.wire_dtype!r} with num_replicas: what is rounded on the way "
            "would depend on the number of ranks. Leave one of them out."
        )
    if options.implementation is CommunicationImplementation.NCCL:
        raise ValueError(
            "CommunicationImplementation.NCCL with num_replicas: NCCL chooses its own order of "
            "summation. Use AUTO."
        )


@functools.lru_cache
def _deterministic(options: CommunicationOptions) -> CommunicationOptions:
    """Return `options` with `deterministic`, the same object each time."""
    return dataclasses.replace(options, deterministic=True)


def _warn_unclosed(rank: int, size: int) -> None:
    warnings.warn(
        f"A strategy of rank {rank} of {size} was collected without close(). Its communicator, "
        "descriptors and shared memory stay as long as its ranks may make another strategy on the "
        "same communicator. Call strategy.close() on every rank when it is no longer needed.",
        ResourceWarning,
        stacklevel=2,
    )


def _nothing() -> None:
    """Do nothing in place of work that a different rank does."""
