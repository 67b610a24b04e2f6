"""Scatter: part k of one rank's arrays is sent to rank k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mpistrat.arrays import Array, host_view, native
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.operations import axis_of
from mpistrat.collectives.operations.all_to_all import exchange_flat
from mpistrat.collectives.operations.broadcast import FromRoot
from mpistrat.comm.packing import placed_like
from mpistrat.sharding import part_lengths


@dataclass
class Scatter(FromRoot):
    """`ReplicaContext.scatter`, along axis 0."""

    shapes: list[tuple[int, ...]] = field(default_factory=list)
    """Shapes of the whole arrays."""

    def check(self, call: CollectiveCall, arrays: Sequence[Array]) -> None:
        """Raise for arrays that cannot be sent, before the ranks agree."""
        super().check(call, arrays)
        for array in arrays:
            axis_of(call, "axis", 0, array)

    def forward(
        self, call: CollectiveCall, arrays: Sequence[Array], structure: object = ()
    ) -> list[Array]:
        """Send the rows of the root, whose shapes are known. **Collective**."""
        self.shapes = [tuple(array.shape) for array in arrays]
        results = []
        for array, shape in zip(arrays, self.shapes, strict=True):
            counts, incoming = self._counts(call, shape)
            # The other ranks have nothing to send, whatever they passed.
            sent = native(host_view(array)).reshape(-1)[: sum(counts)]
            own = exchange_flat(call, sent, counts, incoming)
            length = part_lengths(shape[0], call.channel.size)[call.channel.rank]
            results.append(placed_like(own.reshape(length, *shape[1:]), array))
        return results

    def backward(
        self, call: CollectiveCall, leaves: Sequence[int], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Gather the gradients on the root, and return zeros on other ranks. **Collective**."""
        call.agree(len(leaves))
        results = []
        for leaf, gradient in zip(leaves, gradients, strict=True):
            shape = self.shapes[leaf]
            counts, incoming = self._counts(call, shape)
            whole = exchange_flat(call, native(gradient).reshape(-1), incoming, counts)
            is_root = call.channel.rank == self.root
            results.append(whole.reshape(shape) if is_root else np.zeros(shape, gradient.dtype))
        return results

    def _counts(self, call: CollectiveCall, shape: tuple[int, ...]) -> tuple[list[int], list[int]]:
        """Return how many elements of an array this rank sends to each rank, and gets from each."""
        row_size = math.prod(shape[1:])
        lengths = part_lengths(shape[0], call.channel.size)
        return self.counts(call, [length * row_size for length in lengths])

    def counts(self, call: CollectiveCall, of_ranks: Sequence[int]) -> tuple[list[int], list[int]]:
        """Return how many elements this rank sends and gets, if rank r gets ``of_ranks[r]``."""
        rank, nothing = call.channel.rank, [0] * call.channel.size
        incoming = nothing.copy()
        incoming[self.root] = of_ranks[rank]
        return list(of_ranks) if rank == self.root else nothing, incoming
