"""Packing plan: which arrays travel in one message, and how gathered ones are joined."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import numpy as np

from mpistrat.arrays import native
from mpistrat.comm.wire import as_ordered_integers, is_narrow, result_dtype, wire_dtype
from mpistrat.options import AUTOMATIC_BYTES_PER_PACK, CommunicationOptions, ReduceOp

_SMALL_BYTES = 2**14
"""Arrays up to this size are copied one behind the other: cheaper than a description of each."""


@dataclass(frozen=True)
class Pack:
    """What travels in one message."""

    wire: np.dtype
    """What the arrays are cast to."""
    dtype: np.dtype
    """What is reduced: integers in place of floats whose order must be total, else `wire`."""
    small: list[int]
    """Positions of the arrays that are copied one behind the other first."""
    spans: list[tuple[int, int]]
    """Where each of them begins and ends in that copy, in elements."""
    small_size: int
    large: list[int]
    """Positions of the other arrays."""
    num_bytes: int
    is_reordered: bool
    """Whether numbers change on the way into the message, and so need a copy."""
    on_device: bool
    """Whether all of it is in device memory. Then it is one array, copied together or as it is."""
    is_uncast: bool
    """Whether the arrays and their results have the dtype that travels."""


@dataclass(frozen=True)
class Plan:
    """What is equal in all reductions of arrays of the same dtypes and shapes."""

    op: ReduceOp
    packs: list[Pack]
    results: list[tuple[tuple[int, ...], np.dtype]]
    """Shape and dtype of each result."""
    is_plain: bool
    """Whether all arrays are known to be NumPy's own and to travel as they lie in host memory."""
    is_single: bool
    """Whether there is one host array, whose numbers travel and come back as they are."""

    @functools.cached_property
    def is_unchanged(self) -> bool:
        """Whether all arrays are plain, and their numbers travel and come back as they are."""
        return self.is_plain and all(
            pack.is_uncast and not pack.is_reordered and not pack.on_device for pack in self.packs
        )

    @functools.cached_property
    def stays_on_device(self) -> bool:
        """Whether all numbers lie in device memory, and travel and come back as they are."""
        return bool(self.packs) and all(
            pack.on_device and pack.is_uncast and not pack.is_reordered for pack in self.packs
        )


def plan_reduction(
    op: ReduceOp,
    kinds: Sequence[tuple[np.dtype, tuple[int, ...]]],
    wires: Sequence[np.dtype] | None,
    options: CommunicationOptions,
    on_device: Sequence[bool] = (),
    is_plain: bool = False,
) -> Plan:
    """Return the plan for arrays of the dtypes and shapes `kinds`, which `op` must know."""
    # `wires` are what the arrays travel as, where their own dtypes do not decide it.
    if wires is None:
        wires = [wire_dtype(op, dtype, options.wire_dtype) for dtype, _ in kinds]
    sizes = [math.prod(shape) for _, shape in kinds]
    num_bytes = [size * wire.itemsize for size, wire in zip(sizes, wires, strict=True)]
    # Our own arithmetic is done on the host, so the arrays that need it travel as host arrays.
    stays = [False] * len(kinds) if options.deterministic or not on_device else on_device
    keys = [
        (wire.char, stay and not is_narrow(wire)) for wire, stay in zip(wires, stays, strict=True)
    ]
    results = [(shape, result_dtype(op, dtype)) for dtype, shape in kinds]
    packs = []
    for group in plan_packs(num_bytes, keys, options.bytes_per_pack or AUTOMATIC_BYTES_PER_PACK):
        wire = wires[group[0]]
        # Decided by dtypes and shapes only, like the rest of the plan: the ranks agree on these, so
        # every rank makes equal messages.
        is_uncast = all(kinds[i][0] == wire == results[i][1] for i in group)
        packs.append(_plan_pack(op, group, sizes, wire, keys[group[0]][1], is_uncast))
    is_single = len(kinds) == 1 and not (packs[0].is_reordered or packs[0].on_device)
    return Plan(op, packs, results, is_plain, is_single and packs[0].is_uncast)


def _plan_pack(
    op: ReduceOp,
    group: list[int],
    sizes: list[int],
    wire: np.dtype,
    on_device: bool,
    is_uncast: bool,
) -> Pack:
    # On a device, all arrays of a pack are joined by one kernel, whatever their size.
    is_small = [
        len(group) > 1 and (on_device or sizes[i] * wire.itemsize <= _SMALL_BYTES) for i in group
    ]
    small = [i for i, each in zip(group, is_small, strict=True) if each]
    large = [i for i, each in zip(group, is_small, strict=True) if not each]
    # In elements of the wire's dtype, not in bytes.
    stops = list(itertools.accumulate(sizes[i] for i in small))
    dtype = as_ordered_integers(op, np.empty(0, wire)).dtype  # floats have no total order
    return Pack(
        wire=wire,
        dtype=dtype,
        small=small,
        spans=list(zip([0, *stops], stops, strict=False)),
        small_size=stops[-1] if stops else 0,
        large=large,
        num_bytes=sum(sizes[i] for i in group) * wire.itemsize,
        is_reordered=dtype != wire,
        on_device=on_device,
        is_uncast=is_uncast,
    )


def plan_packs(
    num_bytes: Sequence[int], keys: Sequence[Hashable], bytes_per_pack: int
) -> list[list[int]]:
    """Return the positions of the arrays in each message, every position once."""
    # Arrays share a message if they have the same key (the dtype that travels), in the order given,
    # up to `bytes_per_pack`. A larger array travels alone.
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


@dataclass(frozen=True)
class GatherPlan:
    """How arrays of all ranks are concatenated to one; their lengths along `axis` may differ."""

    shapes: Sequence[Sequence[int]]
    """By rank."""
    axis: int

    def check(self, kind: str, place: Callable[[int], str]) -> None:
        """Refuse shapes that do not concatenate, in `kind`; `place` is what ranks are called."""
        shapes, axis = self.shapes, self.axis
        for rank, shape in enumerate(shapes):
            if not shape:
                raise ValueError(
                    f"{kind}: the value on {place(rank)} is 0-d and has no axis to "
                    "concatenate along. Give it one, for example with numpy.reshape(value, (1,))."
                )
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"{kind}: axis {axis} is out of range for the array of shape {tuple(shape)} on "
                    f"{place(rank)}. Use an axis in [{-len(shape)}, {len(shape) - 1}]."
                )
            if _trailing(shape, axis) != _trailing(shapes[0], axis):
                raise ValueError(
                    f"{kind}: arrays may differ along axis {axis} only, but the shape is "
                    f"{tuple(shapes[0])} on {place(0)} and {tuple(shape)} on {place(rank)}."
                )

    @property
    def counts(self) -> list[int]:
        """How many elements each rank brings."""
        return [math.prod(shape) for shape in self.shapes]

    def join(self, flat: np.ndarray) -> np.ndarray:
        """Return the whole, from the elements of all ranks with the axis moved to the front."""
        length = sum(shape[self.axis] for shape in self.shapes)
        whole = flat.reshape(length, *_trailing(self.shapes[0], self.axis))
        return native(np.moveaxis(whole, 0, self.axis))


def _trailing(shape: Sequence[int], axis: int) -> list[int]:
    """Return the shape that remains after the gathered axis has moved to the front."""
    axis %= len(shape)
    return [*shape[:axis], *shape[axis + 1 :]]
