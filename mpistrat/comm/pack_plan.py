"""Packing plan: which arrays are sent in one message, and how gathered arrays are joined."""

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
"""Arrays up to this size are copied one behind the other: cheaper than describing each."""


@dataclass(frozen=True)
class Pack:
    """The arrays that are sent in one message."""

    wire: np.dtype
    """The dtype to which the arrays are cast."""
    dtype: np.dtype
    """The dtype that is reduced: integers for floats that need a total order, else `wire`."""
    small: list[int]
    """Positions of the arrays that are copied one behind the other first."""
    spans: list[tuple[int, int]]
    """Start and end of each of them in that copy, in elements."""
    small_size: int
    large: list[int]
    """Positions of the other arrays."""
    num_bytes: int
    is_reordered: bool
    """Whether numbers are changed for the message, and so need a copy."""
    on_device: bool
    """Whether all is in device memory. Then it is sent as one array, joined or unchanged."""
    is_uncast: bool
    """Whether the arrays and their results have the dtype of the message."""


@dataclass(frozen=True)
class Plan:
    """Everything that is equal in all reductions of arrays of the same dtypes and shapes."""

    op: ReduceOp
    packs: list[Pack]
    results: list[tuple[tuple[int, ...], np.dtype]]
    """Shape and dtype of each result."""
    is_plain: bool
    """Whether all arrays are known to be NumPy's own, and are sent from host memory unchanged."""
    is_single: bool
    """Whether there is one host array, and its numbers are sent and returned unchanged."""

    @functools.cached_property
    def is_unchanged(self) -> bool:
        """Whether all arrays are plain, and their numbers are sent and returned unchanged."""
        return self.is_plain and all(
            pack.is_uncast and not pack.is_reordered and not pack.on_device for pack in self.packs
        )

    @functools.cached_property
    def stays_on_device(self) -> bool:
        """Whether all numbers are in device memory, and are sent and returned unchanged."""
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
    """Return the plan for arrays of the dtypes and shapes `kinds`, which `op` must support."""
    # `wires` are the dtypes in the messages, if the arrays' own dtypes do not decide them.
    if wires is None:
        wires = [wire_dtype(op, dtype, options.wire_dtype) for dtype, _ in kinds]
    sizes = [math.prod(shape) for _, shape in kinds]
    num_bytes = [size * wire.itemsize for size, wire in zip(sizes, wires, strict=True)]
    # mpistrat's own arithmetic runs on the host, so arrays that need it are sent as host arrays.
    stays = [False] * len(kinds) if options.deterministic or not on_device else on_device
    keys = [
        (wire.char, stay and not is_narrow(wire)) for wire, stay in zip(wires, stays, strict=True)
    ]
    results = [(shape, result_dtype(op, dtype)) for dtype, shape in kinds]
    packs = []
    for group in plan_packs(num_bytes, keys, options.bytes_per_pack or AUTOMATIC_BYTES_PER_PACK):
        wire = wires[group[0]]
        # Decided only by dtypes and shapes, like the rest of the plan: the ranks agree on these, so
        # every rank creates equal messages.
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
    # On a device, one kernel joins all arrays of a pack, whatever their size.
    is_small = [
        len(group) > 1 and (on_device or sizes[i] * wire.itemsize <= _SMALL_BYTES) for i in group
    ]
    small = [i for i, each in zip(group, is_small, strict=True) if each]
    large = [i for i, each in zip(group, is_small, strict=True) if not each]
    # In elements of the wire dtype, not in bytes.
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
    # Arrays share a message if they have the same key (the dtype of the message), in the order
    # passed, up to `bytes_per_pack`. A larger array has its own message.
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
    """How arrays of all ranks are concatenated; their lengths along `axis` may differ."""

    shapes: Sequence[Sequence[int]]
    """Shapes by rank."""
    axis: int

    def check(self, kind: str, place: Callable[[int], str]) -> None:
        """Raise if the shapes cannot be concatenated; errors use `kind` and `place` of a rank."""
        shapes, axis = self.shapes, self.axis
        for rank, shape in enumerate(shapes):
            if not shape:
                raise ValueError(
                    f"{kind}: the value on {place(rank)} is 0-d and has no axis to "
                    "concatenate along. Add one, for example with numpy.reshape(value, (1,))."
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
        """How many elements each rank contributes."""
        return [math.prod(shape) for shape in self.shapes]

    def join(self, flat: np.ndarray) -> np.ndarray:
        """Return the whole array, from the elements of all ranks with the axis at the front."""
        length = sum(shape[self.axis] for shape in self.shapes)
        whole = flat.reshape(length, *_trailing(self.shapes[0], self.axis))
        return native(np.moveaxis(whole, 0, self.axis))


def _trailing(shape: Sequence[int], axis: int) -> list[int]:
    """Return the shape that remains after the gathered axis has moved to the front."""
    axis %= len(shape)
    return [*shape[:axis], *shape[axis + 1 :]]
