"""Arrays on their way: cast, grouped into messages, and out of them again."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpistrat.arrays import Array, Device, host_view, place
from mpistrat.comm.casts import cast, cast_into
from mpistrat.comm.dtypes import result_dtype, wire_dtype
from mpistrat.comm.message import Message
from mpistrat.comm.ordered import as_floats, as_ordered_integers, is_reordered
from mpistrat.comm.packs import plan_packs
from mpistrat.comm.pool import Pool
from mpistrat.options import CommunicationOptions, ReduceOp

__all__ = ["Packing", "placed_like"]

_SMALL_BYTES = 2**14
"""Arrays up to this size are copied one behind the other: cheaper than to tell of each."""


class Packing:
    """Arrays in the form in which they are reduced.

    Parameters
    ----------
    op : ReduceOp
    arrays : sequence of arrays
        On the host or the device, of any layout and byte order. Never written to.
    options : CommunicationOptions
        For the size limit of a message of several arrays, and for what travels.
    pool : Pool
        For results and copies.
    wires : sequence of numpy.dtype, optional
        What each array travels as, where its own dtype does not tell.
    copy : bool
        Whether the arrays may change before the reduction ends.

    Raises
    ------
    TypeError
        If `op` cannot reduce a dtype.
    """

    messages: list[Message]
    """What is to be reduced."""

    def __init__(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions,
        pool: Pool,
        wires: Sequence[np.dtype] | None = None,
        copy: bool = False,
    ) -> None:
        self._op = op
        self._copy = copy
        self._arrays = arrays
        kinds = tuple([(array.dtype, array.shape) for array in arrays])
        chosen = None if wires is None else tuple(wires)
        self._plan = _plan(op, kinds, chosen, options.wire_dtype, options.bytes_per_pack)
        self._targets: dict[int, np.ndarray] = {}
        self._joined: list[np.ndarray] = []
        self.messages = [self._message(pack, pool) for pack in self._plan.packs]

    def _message(self, pack: _Pack, pool: Pool) -> Message:
        sources, targets = [], []
        if pack.small:
            joined = pool.take((pack.small_size,), pack.wire)
            self._fill(joined, pack)
            joined = as_ordered_integers(self._op, joined)
            self._joined.append(joined)
            sources.append(joined)
            targets.append(joined)
        for position in pack.large:
            array = host_view(self._arrays[position])
            target = pool.take(array.shape, pack.wire)
            if not (self._copy or pack.is_reordered) and _is_plain(array, pack.wire):
                source = array.view(pack.wire)  # C has two names for one integer
            else:
                cast_into(target, array)
                source = target = as_ordered_integers(self._op, target)
            sources.append(source)
            targets.append(target)
            self._targets[position] = target
        return Message(sources, targets, pool)

    def _fill(self, joined: np.ndarray, pack: _Pack) -> None:
        """Copy the small arrays of `pack` to `joined`, one behind the other."""
        hosts = [host_view(self._arrays[position]) for position in pack.small]
        if all(host.dtype == pack.wire for host in hosts):
            np.concatenate([host.reshape(-1) for host in hosts], out=joined)
            return
        for host, (start, stop) in zip(hosts, pack.places, strict=True):
            cast_into(joined[start:stop].reshape(host.shape), host)

    def unpack(self) -> list[Array]:
        """Return the results, each where its array lies. Local."""
        results: list[Array] = [None] * len(self._arrays)
        joined_ones = iter(self._joined)
        for pack in self._plan.packs:
            if pack.small:
                joined = as_floats(self._op, next(joined_ones), pack.wire)
                for position, (start, stop) in zip(pack.small, pack.places, strict=True):
                    shape, dtype = self._plan.results[position]
                    # Copied out, so that one result keeps no other alive.
                    part = cast(joined[start:stop], dtype, copy=True)
                    results[position] = part if len(shape) == 1 else part.reshape(shape)
            for position in pack.large:
                reduced = as_floats(self._op, self._targets[position], pack.wire)
                results[position] = cast(reduced, self._plan.results[position][1])
        return [
            result if isinstance(array, np.ndarray) else placed_like(result, array)
            for result, array in zip(results, self._arrays, strict=True)
        ]


def _is_plain(array: np.ndarray, dtype: np.dtype) -> bool:
    """Return whether `array` can travel as it lies in memory."""
    return array.dtype == dtype and array.flags.c_contiguous


@dataclass(frozen=True)
class _Pack:
    """What travels in one message."""

    wire: np.dtype
    small: list[int]
    """Positions of the arrays that are copied one behind the other first."""
    places: list[tuple[int, int]]
    """Where each of them begins and ends in that copy, in elements."""
    small_size: int
    large: list[int]
    """Positions of the other arrays."""
    is_reordered: bool
    """Whether numbers change on the way into the message, and so need a copy."""


@dataclass(frozen=True)
class _Plan:
    """What is equal in all calls with arrays of the same dtypes and shapes."""

    packs: list[_Pack]
    results: list[tuple[tuple[int, ...], np.dtype]]
    """Shape and dtype of each result."""


@functools.lru_cache(maxsize=1024)
def _plan(
    op: ReduceOp,
    kinds: tuple[tuple[np.dtype, tuple[int, ...]], ...],
    chosen: tuple[np.dtype, ...] | None,
    asked: str | None,
    bytes_per_pack: int,
) -> _Plan:
    """Return the plan for arrays of the dtypes and shapes `kinds`."""
    wires = chosen or tuple(wire_dtype(op, dtype, asked) for dtype, _ in kinds)
    sizes = [math.prod(shape) for _, shape in kinds]
    num_bytes = [size * wire.itemsize for size, wire in zip(sizes, wires, strict=True)]
    groups = plan_packs(num_bytes, [wire.char for wire in wires], bytes_per_pack)
    results = [(shape, result_dtype(op, dtype)) for dtype, shape in kinds]
    return _Plan([_plan_pack(op, group, sizes, wires[group[0]]) for group in groups], results)


def _plan_pack(op: ReduceOp, group: list[int], sizes: list[int], wire: np.dtype) -> _Pack:
    is_small = [len(group) > 1 and sizes[i] * wire.itemsize <= _SMALL_BYTES for i in group]
    small = [i for i, each in zip(group, is_small, strict=True) if each]
    large = [i for i, each in zip(group, is_small, strict=True) if not each]
    stops = list(itertools.accumulate(sizes[i] for i in small))
    places = list(zip([0, *stops], stops, strict=False))
    total = stops[-1] if stops else 0
    return _Pack(wire, small, places, total, large, is_reordered(op, wire))


def placed_like(result: np.ndarray, array: Array) -> Array:
    """Return `result` on the device where `array` lies. Local."""
    device = getattr(array, "device", None)
    index = getattr(device, "id", None)  # a cupy.cuda.Device; NumPy says "cpu"
    return result if index is None else place(result, Device("gpu", index))
