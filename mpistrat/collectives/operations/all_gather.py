"""All-gather: the arrays of all ranks, concatenated in rank order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat.arguments import as_integer, normalize_axes
from mpistrat.arrays import Array, native
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.operations import Operation, check_sendable
from mpistrat.collectives.reduction import dtype_name
from mpistrat.comm.pack_plan import GatherPlan
from mpistrat.comm.packing import placed_like
from mpistrat.comm.wire import TEXT_KINDS, with_width
from mpistrat.options import ReduceOp


@dataclass
class AllGather(Operation):
    """`ReplicaContext.all_gather`."""

    axis: int
    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of this rank's arrays."""

    verbs = "concatenates", "Gather"

    @classmethod
    def parse(cls, kind: str, axis: Any) -> AllGather:
        """Return the operation for arguments as users pass them."""
        return cls(as_integer(f"{kind}: axis", axis))

    def forward(
        self, call: CollectiveCall, arrays: Sequence[Array], structure: object = ()
    ) -> list[Array]:
        """Concatenate each array over ranks, in rank order. **Collective**."""
        # Dtypes must agree, except for the width of strings, and shapes must agree, except for
        # their length along the axis. If shapes do not agree, every rank raises a `ValueError` and
        # the strategy stays usable.
        check_sendable(call.kind, arrays)
        dtypes = tuple(_name_without_width(array.dtype) for array in arrays)
        call.agree(f"axis {self.axis}", dtypes, structure)
        self.shapes = [np.shape(array) for array in arrays]
        # Shapes may differ, so they cannot be part of the signature.
        with call.moving():
            own = [(np.shape(array), array.dtype.itemsize) for array in arrays]
            of_ranks = list(zip(*call.channel.exchange(own), strict=True))
        plans = [GatherPlan([shape for shape, _ in each], self.axis) for each in of_ranks]
        # Every rank has the shapes of all, so all raise the same error here and stay in step.
        for plan in plans:
            plan.check(call.kind, call.channel.place)
        # Arrays of strings may differ in width. They are sent as bytes, so all must have one width
        # first.
        widest = [max(width for _, width in each) for each in of_ranks]
        with call.moving():
            flat = [
                native(np.moveaxis(with_width(array, width), self.axis, 0)).reshape(-1)
                for array, width in zip(arrays, widest, strict=True)
            ]
        gathered = gather_flat(call, flat, [plan.counts for plan in plans])
        return [
            placed_like(plan.join(each), array)
            for plan, each, array in zip(plans, gathered, arrays, strict=True)
        ]

    def backward(
        self, call: CollectiveCall, leaves: Sequence[int], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return this rank's part of the summed gradients. **Collective**."""
        return self.pull_back(call, [self.shapes[leaf] for leaf in leaves], gradients)

    def pull_back(
        self,
        call: CollectiveCall,
        shapes: Sequence[tuple[int, ...]],
        gradients: Sequence[Array],
        structure: str = "",
    ) -> list[Array]:
        """Do `backward` for values of the given `shapes`. **Collective**."""
        axis = self.axis
        for shape in shapes:
            normalize_axes(call.kind, axis, shape)
        call.agree(f"axis {axis}", structure, len(shapes))
        pairs = zip(shapes, gradients, strict=True)
        # Every rank checks the lengths of all, so that all raise the same error.
        lengths_of_ranks = call.channel.exchange(
            [(shape[axis], _length(gradient, axis)) for shape, gradient in pairs]
        )
        starts = []
        for lengths in zip(*lengths_of_ranks, strict=True):
            total = sum(own for own, _ in lengths)
            for rank, (_, given) in enumerate(lengths):
                if given != total:
                    raise ValueError(
                        f"{call.kind}: the gradient on {call.channel.place(rank)} has the length "
                        f"{given} along axis {axis}, but the values of all replicas have {total} "
                        "together."
                    )
            starts.append(sum(own for own, _ in lengths[: call.channel.rank]))
        totals = call.all_reduce(ReduceOp.SUM, gradients)
        slices = []
        for total, shape, start in zip(totals, shapes, starts, strict=True):
            index = [slice(None)] * np.ndim(total)
            index[axis] = slice(start, start + shape[axis])
            slices.append(total[tuple(index)])
        return slices


def gather_flat(
    call: CollectiveCall,
    parts: Sequence[np.ndarray],
    counts: Sequence[Sequence[int]],
    out: Sequence[np.ndarray | None] | None = None,
) -> list[np.ndarray]:
    """Return each of the 1-d `parts` of all ranks, in `out` if it is passed. **Collective**."""
    # The ranks have agreed already. `counts` are the lengths by rank, of each part.
    gathered = []
    with call.moving():
        for part, of_ranks, target in zip(parts, counts, out or [None] * len(parts), strict=True):
            call.note_moved(part.nbytes, "all_gather")
            gathered.append(call.channel.transport.all_gather(part, of_ranks, target))
    call.show_received(gathered)
    return gathered


def _length(array: Array, axis: int) -> int | None:
    """Return the length along `axis`, ``None`` if there is no such axis."""
    shape = np.shape(array)
    return shape[axis] if -len(shape) <= axis < len(shape) else None


def _name_without_width(dtype: np.dtype) -> str:
    return dtype.kind if dtype.kind in TEXT_KINDS else dtype_name(dtype)
