"""Collectives that move parts of arrays between ranks: their forward and backward passes.

Each is a class: `forward` takes the arrays of a nest, `backward` the gradients of its results.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat.arguments import as_bool, as_integer
from mpistrat.arrays import Array, host_copy_to_send, host_view, is_number, native
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.prepared import dtype_name
from mpistrat.comm.packing import placed_like
from mpistrat.comm.wire import is_floating, named_dtype
from mpistrat.errors import _ShapeMismatchError
from mpistrat.options import ReduceOp
from mpistrat.sharding import consecutive, part_lengths
from mpistrat.system.text import rank_list, ranks_by_value


class Move(ABC):
    """A collective that moves arrays, each in its own way."""

    @property
    def has_gradient(self) -> bool:
        """Whether it can be differentiated."""
        return True

    @abstractmethod
    def forward(
        self, call: CollectiveCall, arrays: Sequence[Array], structure: object
    ) -> list[Array]:
        """Return what it makes of `arrays`, in fresh memory on their device. **Collective**."""

    @abstractmethod
    def backward(
        self, call: CollectiveCall, leaves: Sequence[int], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return the gradients of some `leaves` from those of their results. **Collective**."""


def described(arrays: Sequence[Array]) -> tuple[object, ...]:
    """Return dtypes and shapes for ranks to compare."""
    return tuple((dtype_name(array.dtype), tuple(array.shape)) for array in arrays)


def _check_sendable(kind: str, arrays: Sequence[Array]) -> None:
    for array in arrays:
        if array.dtype.hasobject:
            raise TypeError(f"{kind}: an array of dtype object cannot be sent.")


def _check_from_root(kind: str, arrays: Sequence[Array]) -> None:
    """Refuse what ranks that give nothing cannot make room for."""
    _check_sendable(kind, arrays)
    for array in arrays:
        dtype = np.dtype(array.dtype)
        try:
            there = np.empty(0, named_dtype(dtype_name(dtype))).dtype
        except (TypeError, ValueError, SyntaxError):
            there = None
        if there != dtype.newbyteorder("="):
            raise TypeError(
                f"{kind}: an array of dtype {dtype} cannot be sent, as its dtype has no name by "
                "which other ranks find it. Send its fields, or its bytes as array.view(np.uint8)."
            )


def axis_of(call: CollectiveCall, name: str, axis: int, array: Array) -> int:
    """Return the position of `axis` in the shape of `array`."""
    ndim, shape = len(array.shape), tuple(array.shape)
    if ndim == 0:
        raise ValueError(
            f"{call.kind} divides arrays along an axis, but the value is 0-d on "
            f"{call.channel.place()}. Give it an axis, as in array[None]."
        )
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"{call.kind}: {name} {axis} is out of range for the array of shape {shape} on "
            f"{call.channel.place()}. Use an axis in [{-ndim}, {ndim - 1}]."
        )
    return axis % ndim


@dataclass(frozen=True)
class _Route:
    """How the parts of one array travel: cut along one axis, and joined along another."""

    shape: tuple[int, ...]
    """Of the array that leaves this rank."""
    split_axis: int
    lengths: Sequence[int]
    """Of the part for each rank."""
    concat_axis: int
    incoming: Sequence[tuple[int, ...]]
    """The shape of the part from each rank."""

    @property
    def outgoing(self) -> list[tuple[int, ...]]:
        """The shape of the part for each rank."""
        return [_with_length(self.shape, self.split_axis, length) for length in self.lengths]

    @property
    def result_shape(self) -> tuple[int, ...]:
        """The shape of what the parts from all ranks form."""
        total = sum(shape[self.concat_axis] for shape in self.incoming)
        return _with_length(self.incoming[0], self.concat_axis, total)

    def reverse(self) -> _Route:
        """Return the route of the gradient."""
        lengths = [shape[self.concat_axis] for shape in self.incoming]
        return _Route(self.result_shape, self.concat_axis, lengths, self.split_axis, self.outgoing)

    def travel(self, call: CollectiveCall, array: np.ndarray) -> np.ndarray:
        """Send the parts of `array`, and return those that come, joined. **Collective**."""
        whole, slices = native(array), consecutive(self.lengths)
        parts = [whole[_along(self.split_axis, part)] for part in slices]
        buffer = np.concatenate([part.reshape(-1) for part in parts])
        sizes = [math.prod(shape) for shape in self.incoming]
        call.note_moved(buffer.nbytes, "all_to_all")
        received = call.channel.transport.all_to_all(buffer, [part.size for part in parts], sizes)
        call.show_received([received])
        pieces = [
            received[part].reshape(shape)
            for part, shape in zip(consecutive(sizes), self.incoming, strict=True)
        ]
        return np.concatenate(pieces, axis=self.concat_axis)


def _check_other_axes(call: CollectiveCall, shapes: Sequence[tuple[int, ...]], axis: int) -> None:
    """Refuse arrays of the ranks that differ along other axes than `axis`, naming all ranks."""
    others = [(len(shape), *shape[:axis], *shape[axis + 1 :]) for shape in shapes]
    if len(set(others)) == 1:
        return
    channel = call.channel
    noun = channel.place().partition(" ")[0]  # a rank, or one of several replicas of a rank
    lines = [
        f"  {rank_list(channel.names(ranks)).replace('rank', noun, 1)}: {shape}"
        for shape, ranks in ranks_by_value(enumerate(shapes)).items()
    ]
    raise _ShapeMismatchError(
        "\n".join(
            [
                f"{call.kind}: the shapes of the {noun}s may differ along concat_axis {axis} only:",
                *lines,
                "Bring arrays of the same length along each other axis, or choose another "
                "concat_axis.",
            ]
        )
    )


def _along(axis: int, part: slice) -> tuple[slice, ...]:
    """Return the index of `part` of an axis."""
    return (*(slice(None),) * axis, part)


def _with_length(shape: tuple[int, ...], axis: int, length: int) -> tuple[int, ...]:
    return (*shape[:axis], length, *shape[axis + 1 :])


def _travel_back(
    call: CollectiveCall, routes: Sequence[_Route], gradients: Sequence[np.ndarray]
) -> list[np.ndarray]:
    """Return gradients along the reverse of `routes`. **Collective**."""
    call.agree(len(routes))
    with call.moving():
        return [
            route.reverse().travel(call, gradient)
            for route, gradient in zip(routes, gradients, strict=True)
        ]


@dataclass
class AllToAll(Move):
    """`ReplicaContext.all_to_all`."""

    split_axis: int
    concat_axis: int
    routes: list[_Route] = field(default_factory=list)

    @classmethod
    def parse(cls, split_axis: Any, concat_axis: Any) -> AllToAll:
        """Return it for arguments as users give them."""
        return cls(
            as_integer("all_to_all: split_axis", split_axis),
            as_integer("all_to_all: concat_axis", concat_axis),
        )

    def forward(
        self, call: CollectiveCall, arrays: Sequence[Array], structure: object
    ) -> list[Array]:
        """Exchange the parts, whose shapes the ranks tell each other first. **Collective**."""
        _check_sendable(call.kind, arrays)
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
            self.routes.append(_Route(tuple(array.shape), split, lengths, concat, incoming))
        with call.moving():
            return [
                placed_like(route.travel(call, host_view(array)), array)
                for route, array in zip(self.routes, arrays, strict=True)
            ]

    def backward(
        self, call: CollectiveCall, leaves: Sequence[int], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Send the gradients the way back. **Collective**."""
        return _travel_back(call, [self.routes[leaf] for leaf in leaves], gradients)


@dataclass
class Broadcast(Move):
    """`ReplicaContext.broadcast`, of arrays that have shape and dtype of the root's."""

    root: int

    @classmethod
    def parse(cls, root: Any, size: int) -> Broadcast:
        """Return it for arguments as users give them."""
        return cls(as_integer("broadcast: root", root, 0, size - 1))

    def check(self, call: CollectiveCall, arrays: Sequence[Array]) -> None:
        """Refuse what cannot be moved, before the ranks agree."""
        _check_from_root(call.kind, arrays)

    def forward(
        self, call: CollectiveCall, arrays: Sequence[Array], structure: object
    ) -> list[Array]:
        """Copy the arrays of the root, whose shapes are known. **Collective**."""
        is_root = call.channel.rank == self.root
        results = []
        with call.moving():
            for array in arrays:
                dtype = np.dtype(array.dtype).newbyteorder("=")
                buffer = (
                    host_copy_to_send(array) if is_root else np.empty(tuple(array.shape), dtype)
                )
                call.note_moved(buffer.nbytes, "broadcast")
                call.channel.transport.broadcast(buffer, self.root)
                results.append(placed_like(buffer, array))
        call.show_received(results)
        return results

    def backward(
        self, call: CollectiveCall, leaves: Sequence[int], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Give the sum to the root, and zeros to the others. **Collective**."""
        reduced = call.reduce(ReduceOp.SUM, gradients, self.root)
        return [np.zeros_like(each) for each in gradients] if reduced is None else reduced


@dataclass
class Scatter(Move):
    """`ReplicaContext.scatter`, of arrays that have shape and dtype of the root's."""

    root: int
    routes: list[_Route] = field(default_factory=list)
    shapes: list[tuple[int, ...]] = field(default_factory=list)

    @classmethod
    def parse(cls, root: Any, size: int) -> Scatter:
        """Return it for arguments as users give them."""
        return cls(as_integer("scatter: root", root, 0, size - 1))

    def check(self, call: CollectiveCall, arrays: Sequence[Array]) -> None:
        """Refuse what cannot be moved, before the ranks agree."""
        _check_from_root(call.kind, arrays)
        for array in arrays:
            axis_of(call, "axis", 0, array)

    def forward(
        self, call: CollectiveCall, arrays: Sequence[Array], structure: object
    ) -> list[Array]:
        """Move the rows of the root, whose shapes are known. **Collective**."""
        rank, size = call.channel.rank, call.channel.size
        results = []
        with call.moving():
            for array in arrays:
                shape = tuple(array.shape)
                parts = part_lengths(shape[0], size)
                lengths = parts if rank == self.root else [0] * size
                incoming = [
                    _with_length(shape, 0, parts[rank] if source == self.root else 0)
                    for source in range(size)
                ]
                self.shapes.append(shape)
                # The others have nothing to send, whatever they gave.
                sent = host_view(array)[: sum(lengths)]
                self.routes.append(_Route(sent.shape, 0, lengths, 0, incoming))
                results.append(placed_like(self.routes[-1].travel(call, sent), array))
        return results

    def backward(
        self, call: CollectiveCall, leaves: Sequence[int], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Gather the gradients on the root, and give zeros to the others. **Collective**."""
        back = _travel_back(call, [self.routes[leaf] for leaf in leaves], gradients)
        if call.channel.rank == self.root:
            return back
        pairs = zip(leaves, gradients, strict=True)
        return [np.zeros(self.shapes[leaf], gradient.dtype) for leaf, gradient in pairs]


@dataclass
class Shift(Move):
    """`ReplicaContext.shift`."""

    offset: int
    is_periodic: bool
    fill: Any

    @classmethod
    def parse(cls, offset: Any, periodic: Any, fill: Any) -> Shift:
        """Return it for arguments as users give them."""
        if np.ndim(fill) != 0 or not is_number(fill if np.isscalar(fill) else np.asarray(fill)[()]):
            raise TypeError(f"shift: fill must be a number, not {fill!r}.")
        is_periodic = as_bool("shift: periodic", periodic)
        return cls(as_integer("shift: offset", offset), is_periodic, fill)

    def forward(
        self, call: CollectiveCall, arrays: Sequence[Array], structure: object
    ) -> list[Array]:
        """Move whole arrays, or fill them where none comes. **Collective**."""
        _check_sendable(call.kind, arrays)
        fills = [_filling(self.fill, array.dtype.newbyteorder("=")) for array in arrays]
        shown = " and ".join(dict.fromkeys(map(str, fills)))
        call.agree(
            f"offset {self.offset}, periodic {self.is_periodic}, fill {shown}",
            described(arrays),
            structure,
        )
        rank, size = call.channel.rank, call.channel.size
        target, source = rank + self.offset, rank - self.offset
        if self.is_periodic:
            target, source = target % size, source % size
        results = []
        with call.moving():
            for array, fill in zip(arrays, fills, strict=True):
                sent = host_view(array).reshape(-1)
                lengths = [sent.size if each == target else 0 for each in range(size)]
                incoming = [(sent.size if each == source else 0,) for each in range(size)]
                route = _Route((sum(lengths),), 0, lengths, 0, incoming)
                came = route.travel(call, sent[: sum(lengths)])
                if not 0 <= source < size:
                    came = np.full(sent.size, fill, fill.dtype)
                results.append(placed_like(came.reshape(array.shape), array))
        return results

    def backward(
        self, call: CollectiveCall, leaves: Sequence[int], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Shift the gradients back; nothing comes from beyond the ends. **Collective**."""
        return Shift(-self.offset, self.is_periodic, 0).forward(call, gradients, "gradient")


def _filling(fill: Any, dtype: np.dtype) -> np.ndarray:
    """Return the number `fill` as an array of `dtype`, which must have it."""
    made = np.zeros((), dtype)
    if not (dtype.kind in "biufc" or is_floating(dtype)):
        fits = fill == 0
    else:
        try:
            with np.errstate(all="ignore"):
                made[...] = fill
            # Floats round what they cannot hold, integers would wrap.
            fits = dtype.kind not in "biu" or bool(made == fill)
        except (TypeError, ValueError, OverflowError):
            fits = False
    if not fits:
        raise ValueError(f"shift: fill {fill!r} is no value of the dtype {dtype} of the array.")
    return made
