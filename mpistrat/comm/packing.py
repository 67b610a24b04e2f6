"""Arrays on their way: packed into the buffers that travel, and out of them again."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from mpistrat.arrays import Array, Device, host_view, place
from mpistrat.comm.casts import cast, cast_into
from mpistrat.comm.dtypes import result_dtype, wire_dtype
from mpistrat.comm.ordered import as_floats, as_ordered_integers
from mpistrat.comm.packs import plan_packs
from mpistrat.options import CommunicationOptions, ReduceOp

__all__ = ["Packing", "placed_like"]


class Packing:
    """Copies of arrays for a reduction, small ones one behind the other.

    Parameters
    ----------
    op : ReduceOp
    arrays : sequence of arrays
        On the host or the device, of any layout and byte order. Never written to.
    options : CommunicationOptions
        For the size limit of a buffer of several arrays, and for what travels.
    wires : sequence of numpy.dtype, optional
        What each array travels as, where its own dtype does not tell.

    Raises
    ------
    TypeError
        If `op` cannot reduce a dtype.
    """

    buffers: list[np.ndarray]
    """What travels, 1-d or in the shape of its only array; to be reduced in place."""

    def __init__(
        self,
        op: ReduceOp,
        arrays: Sequence[Array],
        options: CommunicationOptions,
        wires: Sequence[np.dtype] | None = None,
    ) -> None:
        self._op = op
        self._arrays = arrays
        kinds = tuple([(array.dtype, array.size) for array in arrays])
        chosen = None if wires is None else tuple(wires)
        self._plan = _plan(op, kinds, chosen, options.wire_dtype, options.bytes_per_pack)
        self.buffers = []
        self._parts: list[list[np.ndarray]] = []
        for pack, wire in zip(self._plan.packs, self._plan.wires, strict=True):
            buffer, parts = _packed([arrays[i] for i in pack], wire)
            self.buffers.append(as_ordered_integers(op, buffer))
            self._parts.append(parts)

    def unpack(self) -> list[Array]:
        """Return the results, each where its array lies. Local."""
        results: list[Array] = [None] * len(self._arrays)
        for pack, buffer, parts in zip(self._plan.packs, self.buffers, self._parts, strict=True):
            as_floats(self._op, buffer, parts[0].dtype)
            for i, part in zip(pack, parts, strict=True):
                # Parts of one buffer are copied out, so that one result keeps no other alive.
                result = cast(part, self._plan.results[i], copy=len(pack) > 1)
                results[i] = placed_like(result, self._arrays[i])
        return results


@dataclass(frozen=True)
class _Plan:
    """What is equal in all calls with arrays of the same dtypes and sizes."""

    packs: list[list[int]]
    """The positions of the arrays in each message."""
    wires: list[np.dtype]
    """What each message consists of."""
    results: list[np.dtype]
    """The dtype of each result."""


@functools.lru_cache(maxsize=1024)
def _plan(
    op: ReduceOp,
    kinds: tuple[tuple[np.dtype, int], ...],
    chosen: tuple[np.dtype, ...] | None,
    asked: str | None,
    bytes_per_pack: int,
) -> _Plan:
    """Return the plan for arrays of the dtypes and sizes `kinds`."""
    wires = chosen or tuple(wire_dtype(op, dtype, asked) for dtype, _ in kinds)
    num_bytes = [size * wire.itemsize for (_, size), wire in zip(kinds, wires, strict=True)]
    packs = plan_packs(num_bytes, [wire.char for wire in wires], bytes_per_pack)
    results = [result_dtype(op, dtype) for dtype, _ in kinds]
    return _Plan(packs, [wires[pack[0]] for pack in packs], results)


def _packed(arrays: Sequence[Array], wire: np.dtype) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return a buffer with the arrays one behind the other, and the part of each in it."""
    if len(arrays) == 1:
        buffer = cast(host_view(arrays[0]), wire, copy=True)
        return buffer, [buffer]
    buffer = np.empty(sum(array.size for array in arrays), wire)
    parts, start = [], 0
    for array in arrays:
        part = buffer[start : start + array.size].reshape(array.shape)
        cast_into(part, host_view(array))
        parts.append(part)
        start += array.size
    return buffer, parts


def placed_like(result: np.ndarray, array: Array) -> Array:
    """Return `result` on the device where `array` lies. Local."""
    device = getattr(array, "device", None)
    index = getattr(device, "id", None)  # a cupy.cuda.Device; NumPy says "cpu"
    return result if index is None else place(result, Device("gpu", index))
