"""Reduce-scatter: each rank gets its part of a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat.arguments import as_integer
from mpistrat.arrays import Array
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.operations import Operation, axis_of
from mpistrat.collectives.operations.all_gather import AllGather
from mpistrat.options import ReduceOp, ReduceOpLike
from mpistrat.sharding import part_lengths


@dataclass
class ReduceScatter(Operation):
    """`ReplicaContext.reduce_scatter`."""

    op: ReduceOp
    axis: int

    @classmethod
    def parse(cls, op: ReduceOpLike, axis: Any) -> ReduceScatter:
        """Return the operation for arguments as users pass them."""
        return cls(ReduceOp.parse(op), as_integer("reduce_scatter: axis", axis))

    @property
    def has_gradient(self) -> bool:
        """Whether the reduction is a sum or a mean."""
        return self.op in (ReduceOp.SUM, ReduceOp.MEAN)

    def forward(
        self, call: CollectiveCall, arrays: Sequence[Array], structure: object = ()
    ) -> list[Array]:
        """Reduce as all_reduce does, and keep this rank's part. **Collective**."""
        axes = [axis_of(call, "axis", self.axis, array) for array in arrays]
        reduced = call.all_reduce(self.op, arrays, (structure, f"axis {self.axis}"))
        results = []
        for total, axis in zip(reduced, axes, strict=True):
            lengths = part_lengths(total.shape[axis], call.channel.size)
            start = sum(lengths[: call.channel.rank])
            part = slice(start, start + lengths[call.channel.rank])
            # A copy, so that a small part does not keep the whole result alive.
            results.append(total[(slice(None),) * axis + (part,)].copy())
        return results

    def backward(
        self, call: CollectiveCall, leaves: Sequence[int], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Gather the gradients of the parts. **Collective**."""
        gathered = []
        for gradient in gradients:
            (whole,) = AllGather(self.axis % gradient.ndim).forward(call, [gradient])
            divisor = call.channel.size if self.op is ReduceOp.MEAN else 1
            gathered.append(whole / whole.dtype.type(divisor))
        return gathered
