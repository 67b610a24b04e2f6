"""Collectives, agreed before data moves: what all higher layers communicate through.

The vocabulary is MPI's (rank, size, root). A world of one rank has its transport too, so nothing
above asks for the size.
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
"""More reductions than any loop repeats; a program with ever new shapes starts again there."""


class CollectiveCall(Call):
    """A collective call and the ways in which it can move arrays."""

    # Each method agrees before it moves. Arrays may lie on the host or the device; results lie
    # where the array of this rank does, and share memory with nothing.

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
        self.reduction: Reduction | None = None
        """What `all_reduce` has done last."""
        self._collectives = collectives

    @property
    def layout(self) -> Layout:
        """Which replicas the ranks of the call make up."""
        return self._collectives.layout

    def agree(self, *details: object) -> None:
        """Make sure that the options can be honoured, then agree. **Collective**."""
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
        # `details` must agree over ranks too. `wires` are what the arrays travel as, where their
        # own dtypes do not decide it.
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
        # Options by identity: their hash takes longer than all the rest.
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
            # Without fast paths, each call is checked like the first one.
            if self.channel.transport.has_fast_paths:
                collectives.reductions[key] = reduction
        return reduction

    def fast(self, reduction: Reduction, lends: bool = False) -> FastReduction | None:
        """Return what repeats `reduction` for calls like this one, if there is compiled code."""
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
        """Reduce each array over ranks, equal to the bit on all of them. **Collective**."""
        # Dtypes, shapes and the `structure` of the nest that the arrays come from must agree over
        # ranks. For `wires` see `prepare`, for `out` `Reduction.all_reduce`.
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
        """Give the communicator that moves data, ``None`` to all but a rank's first replica."""
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
        """Which replicas these ranks make up."""
        self.capabilities = capabilities
        self.device = capabilities.device
        self.options = options
        self._lossless_options = dataclasses.replace(options, wire_dtype=None)
        self.describe = describe_function()
        self.reductions: dict[Any, Reduction] = {}
        """The reductions of earlier calls, by all that they check."""
        self._fast: dict[tuple[object, bytes], FastReduction] = {}
        """Fast paths for one array, by op and description, for calls that pass no options."""
        self.rank = channel.rank
        self.size = channel.size
        self.arithmetic = ""
        """Fingerprint of what the bits depend on, where they do not depend on the ranks."""
        self.is_closed = False
        self.name_of_close = "close"
        """What errors call it, where a program does by another name."""
        self.on_close: dict[object, Callable[[], object]] = {}
        """What this rank does when it is closed, before other ranks return."""
        channel.users.add(self)
        self._unclosed: weakref.finalize[[int, int], Any] | None = None
        if channel.on_free is not None and not is_part:  # of what is closed as a whole
            self._unclosed = weakref.finalize(self, _warn_unclosed, self.rank, self.size)
            # Not at the end of the program, where MPI takes everything back anyway.
            self._unclosed.atexit = False
        # Strategies are made collectively, so their numbers on the channel are equal on all ranks.
        self.number = channel.num_strategies
        channel.num_strategies += 1

    def close(self, error: RuntimeError) -> None:
        """Free what no other strategy uses; all later calls raise `error`. **Collective**."""
        if self.is_closed:
            return
        channel = self.channel
        # After a `CollectiveError` nothing can be agreed, and the ranks part when the program ends.
        if channel.closed is None:
            with self.call(self.name_of_close) as call:
                # Before the ranks agree, so that each has done this when any of them returns.
                for action in self.on_close.values():
                    action()
                call.agree()
                # Garbage may be collected on some ranks only, but all ranks free, or none.
                others = channel.exchange(len(channel.users) - 1)
            # All ranks have all counts, so all free the channel, or none: that is collective.
            if not any(others):
                channel.free()
        channel.users.discard(self)
        if self._unclosed is not None:
            self._unclosed.detach()
        self.is_closed = True
        self.reductions.clear()
        self._fast.clear()
        self.capabilities = DeviceCapabilities.solo(self.device)
        # In place of the one that may be freed: every later call raises `error` before it moves
        # anything.
        self.channel = Channel(SoloTransport(), None)
        self.channel.closed = error

    def abandon(self) -> None:
        """Be closed without a word to the other ranks, some of which are lost: nothing is freed."""
        self.channel.users.discard(self)
        if self._unclosed is not None:
            self._unclosed.detach()
        self.is_closed = True

    def again(self, channel: Channel | None = None, layout: Layout | None = None) -> Collectives:
        """Return others of this kind, with another channel or layout where given."""
        return type(self)(
            channel or self.channel,
            self.capabilities,
            self.options,
            layout or self.layout,
            is_deterministic=self.is_deterministic,
        )

    def has_checked(self, options: CommunicationOptions) -> bool:
        """Return whether these are the options that were checked when this was made."""
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
        # `kind` is the name of the public function, `name` that of the variable or object that it
        # is called on.
        if options is None:
            # `wire_dtype` may round a value that the program reduces, not the state of an object.
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
        """Have `fast_path` return one for the `call` that has reduced `array`, if it has any."""
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
        """Return a context manager: where its body fails on any rank, it fails on all."""
        # **Collective** on entry and on exit. The body may do no collective that a failing rank
        # would miss.
        return AllOrNone(self.channel, kind, name, self.options.timeout_seconds, self.number)

    def common_outcome(self, kind: str, name: str | None = None) -> CommonOutcome:
        """Return `all_or_none` for ranks that are known to be in step: one round, at the end."""
        return CommonOutcome(self.channel, kind, name, self.options.timeout_seconds, self.number)

    def on_all(self, work: Callable[[], Any], kind: str, name: str | None = None) -> list[Any]:
        """Return the JSON values that `work` returns on each rank, in rank order. **Collective**.

        Where it fails on any rank, it fails on all. The ranks must be known to be in step, and
        `work` may do no collective.
        """
        # Two steps: no value is sent before all ranks have one, so that a failing rank never leaves
        # the others in the exchange.
        outcome = self.common_outcome(kind, name)
        with outcome:
            own = work()
        return outcome.exchange(own)

    def on_root(self, work: Callable[[], Any], kind: str, name: str | None = None) -> Any:
        """Return on every rank what `work` returns on rank 0. **Collective**, as `on_all`."""
        return self.on_all(work if self.rank == 0 else _nothing, kind, name)[0]

    def gather_json(self, value: Any, kind: str = "gather_json") -> list[Any]:
        """Return the JSON `value` of every rank, in rank order. **Collective**."""
        with self.call(kind) as call:
            return call.exchange(value)

    def broadcast_json(self, value: Any, root: int = 0, kind: str = "broadcast_json") -> Any:
        """Return the JSON `value` of `root`; that of the others does not matter. **Collective**."""
        return self.gather_json(value if self.rank == root else None, kind)[root]


def check_can_order(options: CommunicationOptions) -> None:
    """Refuse what rounds, or adds up elsewhere, in an order that depends on the ranks."""
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
    """Stand in for work that another rank does."""
