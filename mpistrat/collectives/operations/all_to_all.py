"""All-to-all: part k of each rank's arrays is sent to rank k."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat.arguments import as_integer
from mpistrat.arrays import Array, host_view, native
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.operations import Operation, axis_of, check_sendable
from mpistrat.collectives.reduction import dtype_name
from mpistrat.comm.packing import placed_like
from mpistrat.errors import _ShapeMismatchError
from mpistrat.sharding import consecutive, part_lengths
from mpistrat.system.text import rank_list, ranks_by_value


@dataclass
class AllToAll(Operation):
    """`ReplicaContext.all_to_all`."""

    split_axis: int
    concat_axis: int
    routes: list[Route] = field(default_factory=list)

    @classmethod
    def parse(cls, split_axis: Any, concat_axis: Any) -> AllToAll:
        """Return the operation for arguments as users pass them."""
        return cls(
            as_integer("all_to_all: split_axis", split_axis),
            as_integer("all_to_all: concat_axis", concat_axis),
        )

    def forward(
        self, call: CollectiveCall, arrays: Sequence[Array], structure: object = ()
    ) -> list[Array]:
        """Exchange the parts, after the ranks have exchanged the shapes. **Collective**."""
        check_sendable(call.kind, arrays)
        axes = [
            (
                axis_of(call, "split_axis", self.split_axis, array),
                axis_of(call, "concat_axis", self.concat_axis, array),
            )
            for array in arrays
        ]
        dtypes = tuple(dtype_name(array.dtype) for array in arrays)
        call.agree(f"axes {self.split_axis} and {self.concat_axis}", dtypes, structure)
        with call.moving():
            # Not in the signature, because they may differ along `concat_axis`.
            shapes_of_ranks = call.channel.exchange([np.shape(array) for array in arrays])
        shapes_of_leaves = [list(map(tuple, each)) for each in zip(*shapes_of_ranks, strict=True)]
        for shapes, (_, concat) in zip(shapes_of_leaves, axes, strict=True):
            _check_other_axes(call, shapes, concat)
        rank, size = call.channel.rank, call.channel.size
        for array, shapes, (split, concat) in zip(arrays, shapes_of_leaves, axes, strict=True):
            incoming = [
                _with_length(shape, split, part_lengths(shape[split], size)[rank])
                for shape in shapes
            ]
            lengths = part_lengths(array.shape[split], size)
            self.routes.append(Route(tuple(array.shape), split, lengths, concat, incoming))
        return [
            placed_like(route.travel(call, host_view(array)), array)
            for route, array in zip(self.routes, arrays, strict=True)
        ]

    def backward(
        self, call: CollectiveCall, leaves: Sequence[int], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Send the gradients back to where the parts came from. **Collective**."""
        call.agree(len(leaves))
        return [
            self.routes[leaf].reverse().travel(call, gradient)
            for leaf, gradient in zip(leaves, gradients, strict=True)
        ]


def exchange_flat(
    call: CollectiveCall,
    buffer: np.ndarray,
    counts: Sequence[int],
    incoming: Sequence[int],
    out: np.ndarray | None = None,
    is_even: bool = False,
) -> np.ndarray:
    """Send each rank its elements of a 1-d `buffer`; return the received ones. **Collective**."""
    # The ranks have agreed already. `out` is the returned array; `is_even` says that every rank
    # sends the same number of elements to every other rank.
    with call.moving():
        call.note_moved(buffer.nbytes, "all_to_all")
        received = call.channel.transport.all_to_all(buffer, counts, incoming, out, is_even)
    call.show_received([received])
    return received


@dataclass(frozen=True)
class Route:
    """How the parts of one array are sent: cut along one axis, and joined along another."""

    shape: tuple[int, ...]
    """Shape of the array that this rank sends."""
    split_axis: int
    lengths: Sequence[int]
    """Lengths of the parts for each rank."""
    concat_axis: int
    incoming: Sequence[tuple[int, ...]]
    """The shape of the part from each rank."""

    @property
    def outgoing(self) -> list[tuple[int, ...]]:
        """The shape of the part for each rank."""
        return [_with_length(self.shape, self.split_axis, length) for length in self.lengths]

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of the array that the parts from all ranks form."""
        total = sum(shape[self.concat_axis] for shape in self.incoming)
        return _with_length(self.incoming[0], self.concat_axis, total)

    def reverse(self) -> Route:
        """Return the route of the gradient."""
        # The gradient is cut where the result was joined, and joined where the value was cut.
        lengths = [shape[self.concat_axis] for shape in self.incoming]
        return Route(self.result_shape, self.concat_axis, lengths, self.split_axis, self.outgoing)

    def travel(self, call: CollectiveCall, array: np.ndarray) -> np.ndarray:
        """Send the parts of `array`, and return the received ones, joined. **Collective**."""
        whole, slices = native(array), consecutive(self.lengths)
        parts = [whole[_along(self.split_axis, part)] for part in slices]
        buffer = np.concatenate([part.reshape(-1) for part in parts])
        sizes = [math.prod(shape) for shape in self.incoming]
        received = exchange_flat(call, buffer, [part.size for part in parts], sizes)
        pieces = [
            received[part].reshape(shape)
            for part, shape in zip(consecutive(sizes), self.incoming, strict=True)
        ]
        return np.concatenate(pieces, axis=self.concat_axis)


def _check_other_axes(call: CollectiveCall, shapes: Sequence[tuple[int, ...]], axis: int) -> None:
    """Raise if the ranks' arrays differ along other axes than `axis`; the error names all ranks."""
    others = [(len(shape), *shape[:axis], *shape[axis + 1 :]) for shape in shapes]
    if len(set(others)) == 1:
        return
    channel = call.channel
    noun = channel.place().partition(" ")[0]  # "rank", or "replica" if a rank has several
    lines = [
        f"  {rank_list(channel.names(ranks)).replace('rank', noun, 1)}: {shape}"
        for shape, ranks in ranks_by_value(enumerate(shapes)).items()
    ]
    raise _ShapeMismatchError(
        "\n".join(
            [
                f"{call.kind}: the shapes of the {noun}s may differ along concat_axis {axis} only:",
                *lines,
                "Pass arrays with the same length along each other axis, or choose a different "
                "concat_axis.",
            ]
        )
    )


def _along(axis: int, part: slice) -> tuple[slice, ...]:
    """Return the index of `part` of an axis."""
    return (*(slice(None),) * axis, part)


def _with_length(shape: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    return (*shape[:axis], length, *shape[axis + 1 :])
