"""Packing plan: which arrays travel in one message. Pure code."""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from mpistrat.arrays import native
from mpistrat.comm.wire import is_narrow, is_reordered, result_dtype, wire_dtype
from mpistrat.options import CommunicationOptions, ReduceOp

__all__ = ["Pack", "Plan", "check_gatherable", "joined", "plan_packs", "plan_reduction"]


def plan_packs(
    num_bytes: Sequence[int], keys: Sequence[Hashable], bytes_per_pack: int
) -> list[list[int]]:
    """Group arrays into messages.

    Arrays share a message if they have the same key (the dtype that travels), in the order
    given, up to `bytes_per_pack`. A larger array travels alone. Local.

    Parameters
    ----------
    num_bytes : sequence of int
        The size of each array.
    keys : sequence of hashable
        What must be equal in a message, for each array.
    bytes_per_pack : int
        Size limit of a message of several arrays.

    Returns
    -------
    list of list of int
        The positions of the arrays in each message. Every position occurs once.
    """
    packs: list[list[int]] = []
    open_packs: dict[Hashable, tuple[list[int], int]] = {}
    for position, (size, key) in enumerate(zip(num_bytes, keys, strict=True)):
        pack, filled = open_packs.get(key, (None, 0))
        if pack is None or filled + size > bytes_per_pack:
            pack, filled = [], 0
            packs.append(pack)
        pack.append(position)
        open_packs[key] = (pack, filled + size)
    return packs


_SMALL_BYTES = 2**14
"""Arrays up to this size are copied one behind the other: cheaper than to tell of each."""


@dataclass(frozen=True)
class Pack:
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
    on_device: bool = False
    """Whether all of it is in device memory. Then it is one array, copied together or as it is."""
    is_uncast: bool = False
    """Whether the small arrays and their results have the dtype that travels."""


@dataclass(frozen=True)
class Plan:
    """What is equal in all calls with arrays of the same dtypes and shapes."""

    op: ReduceOp
    packs: list[Pack]
    results: list[tuple[tuple[int, ...], np.dtype]]
    """Shape and dtype of each result."""
    only_wire: np.dtype | None
    """What travels where there is one array, and its numbers stay as they are."""


def plan_reduction(
    op: ReduceOp,
    kinds: Sequence[tuple[np.dtype, tuple[int, ...]]],
    wires: Sequence[np.dtype] | None,
    options: CommunicationOptions,
    on_device: Sequence[bool] = (),
) -> Plan:
    """Return the plan for arrays of the dtypes and shapes `kinds`. Local.

    Parameters
    ----------
    op : ReduceOp
    kinds : sequence of (numpy.dtype, tuple of int)
    wires : sequence of numpy.dtype or None
        What each array travels as, where its own dtype does not tell.
    options : CommunicationOptions
        For the size limit of a message of several arrays, and for what travels.
    on_device : sequence of bool
        Which arrays are in device memory; empty if none is. Our own arithmetic is done on the host,
        so the arrays that need it travel as host arrays.

    Raises
    ------
    TypeError
        If `op` cannot reduce a dtype.
    """
    if wires is None:
        wires = [wire_dtype(op, dtype, options.wire_dtype) for dtype, _ in kinds]
    sizes = [math.prod(shape) for _, shape in kinds]
    num_bytes = [size * wire.itemsize for size, wire in zip(sizes, wires, strict=True)]
    places = [False] * len(kinds) if options.deterministic or not on_device else on_device
    keys = [
        (wire.char, place and not is_narrow(wire))
        for wire, place in zip(wires, places, strict=True)
    ]
    groups = plan_packs(num_bytes, keys, options.bytes_per_pack)
    results = [(shape, result_dtype(op, dtype)) for dtype, shape in kinds]
    packs = [_plan_pack(op, group, sizes, wires[group[0]], keys[group[0]][1]) for group in groups]
    packs = [_noting_casts(pack, kinds, results) for pack in packs]
    is_plain = len(kinds) == 1 and not (packs[0].is_reordered or packs[0].on_device)
    return Plan(op, packs, results, wires[0] if is_plain and results[0][1] == wires[0] else None)


def _plan_pack(
    op: ReduceOp, group: list[int], sizes: list[int], wire: np.dtype, on_device: bool
) -> Pack:
    is_small = [
        len(group) > 1 and (on_device or sizes[i] * wire.itemsize <= _SMALL_BYTES) for i in group
    ]
    small = [i for i, each in zip(group, is_small, strict=True) if each]
    large = [i for i, each in zip(group, is_small, strict=True) if not each]
    stops = list(itertools.accumulate(sizes[i] for i in small))
    places = list(zip([0, *stops], stops, strict=False))
    total = stops[-1] if stops else 0
    return Pack(wire, small, places, total, large, is_reordered(op, wire), on_device)


def _noting_casts(
    pack: Pack,
    kinds: Sequence[tuple[np.dtype, tuple[int, ...]]],
    results: Sequence[tuple[tuple[int, ...], np.dtype]],
) -> Pack:
    is_uncast = all(kinds[i][0] == pack.wire == results[i][1] for i in pack.small)
    return replace(pack, is_uncast=is_uncast)


def check_gatherable(kind: str, shapes: Sequence[Sequence[int]], axis: int) -> None:
    """Refuse arrays of all ranks that cannot be concatenated along `axis`. Local.

    Parameters
    ----------
    kind : str
        The call, for messages.
    shapes : sequence of shapes
        By rank.
    axis : int
        May be negative.

    Raises
    ------
    ValueError
        If one has no axis, `axis` is out of range, or they differ along another.
    """
    size = len(shapes)
    for rank, shape in enumerate(shapes):
        if not shape:
            raise ValueError(
                f"{kind}: the value on rank {rank} of {size} is 0-d and has no axis to "
                "concatenate along. Give it one, for example with numpy.reshape(value, (1,))."
            )
        if not -len(shape) <= axis < len(shape):
            raise ValueError(
                f"{kind}: axis {axis} is out of range for the array of shape {tuple(shape)} on "
                f"rank {rank} of {size}. Use an axis in [{-len(shape)}, {len(shape) - 1}]."
            )
        if _trailing(shape, axis) != _trailing(shapes[0], axis):
            raise ValueError(
                f"{kind}: arrays may differ along axis {axis} only, but the shape is "
                f"{tuple(shapes[0])} on rank 0 and {tuple(shape)} on rank {rank} of {size}."
            )


def _trailing(shape: Sequence[int], axis: int) -> list[int]:
    """Return the shape that remains after the gathered axis has moved to the front."""
    axis %= len(shape)
    return [*shape[:axis], *shape[axis + 1 :]]


def joined(flat: np.ndarray, shapes: Sequence[Sequence[int]], axis: int) -> np.ndarray:
    """Return the arrays of all ranks as one. Local.

    Parameters
    ----------
    flat : array
        All numbers in rank order, of each array with `axis` moved to the front.
    shapes : sequence of shapes
        By rank.
    axis : int
    """
    length = sum(shape[axis] for shape in shapes)
    whole = flat.reshape(length, *_trailing(shapes[0], axis))
    return native(np.moveaxis(whole, 0, axis))
