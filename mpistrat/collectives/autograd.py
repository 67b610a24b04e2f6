"""Autograd: the gradients of collectives, by hand and for PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.arguments import as_integer, normalize_axes
from mpistrat.arrays import Array, array_of_tensor, namespace_of
from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.collectives.nested import all_gather_nest, all_reduce_nest
from mpistrat.options import CommunicationOptions, ReduceOp
from mpistrat.pytorch import apply_differentiable, is_loaded, is_tensor


def pull_back_all_reduce(
    call: CollectiveCall,
    op: ReduceOp,
    values: Sequence[Array],
    results: Sequence[Array],
    gradients: Sequence[Array],
    structure: str = "",
) -> list[Array]:
    """Return the gradients with respect to `values` from those to `results`. **Collective**."""
    for value, result, gradient in zip(values, results, gradients, strict=True):
        if not np.shape(value) == np.shape(result) == np.shape(gradient):
            raise ValueError(
                f"{call.kind}: the value, the result and its gradient must have one shape, but "
                f"have {np.shape(value)}, {np.shape(result)} and {np.shape(gradient)}."
            )
    # What travels is a SUM for most of them, so the forward reduction is compared too.
    details = (op.name, structure)
    if op in (ReduceOp.SUM, ReduceOp.MEAN):
        return call.all_reduce(op, gradients, details)
    if op is ReduceOp.PROD:
        return _pull_back_product(call, values, gradients, details)
    return _pull_back_extreme(call, values, results, gradients, details)


def _pull_back_extreme(
    call: CollectiveCall,
    values: Sequence[Array],
    results: Sequence[Array],
    gradients: Sequence[Array],
    details: object,
) -> list[Array]:
    """Give the gradient to the extremal element; replicas that tie share it."""
    # NaN is extremal wherever there is one, and equals no other.
    chosen = [
        ((value == result) | ((value != value) & (result != result))).astype(gradient.dtype)
        for value, result, gradient in zip(values, results, gradients, strict=True)
    ]
    reduced = call.all_reduce(ReduceOp.SUM, [*gradients, *chosen], details)
    totals, counts = reduced[: len(chosen)], reduced[len(chosen) :]
    return [mine * total / count for mine, total, count in zip(chosen, totals, counts, strict=True)]


def _pull_back_product(
    call: CollectiveCall, values: Sequence[Array], gradients: Sequence[Array], details: object
) -> list[Array]:
    """Multiply the gradient by the product of the other replicas' values."""
    # Dividing the product by a value would fail at zeros, so these are counted apart: one zero
    # leaves a gradient to its own replica alone, two leave none.
    xps = [namespace_of(value) for value in values]
    is_zero = [value == 0 for value in values]
    replaced = [
        xp.where(zero, xp.ones_like(value), value)
        for xp, zero, value in zip(xps, is_zero, values, strict=True)
    ]
    products = call.all_reduce(ReduceOp.PROD, replaced, details)
    zeros = [zero.astype(gradient.dtype) for zero, gradient in zip(is_zero, gradients, strict=True)]
    reduced = call.all_reduce(ReduceOp.SUM, [*gradients, *zeros])
    totals, num_zeros = reduced[: len(zeros)], reduced[len(zeros) :]
    return [
        total * xp.conj(product / value) * (count == mine)
        for xp, total, product, value, count, mine in zip(
            xps, totals, products, replaced, num_zeros, zeros, strict=True
        )
    ]


def pull_back_all_gather(
    call: CollectiveCall,
    values: Sequence[Array],
    axis: int,
    gradients: Sequence[Array],
    structure: str = "",
) -> list[Array]:
    """Return this replica's slice of the summed gradient of each gathered value. **Collective**."""
    axis = as_integer(f"{call.kind}: axis", axis)
    for value in values:
        normalize_axes(call.kind, axis, np.shape(value))
    call.agree(f"axis {axis}", structure, len(values))
    pairs = zip(values, gradients, strict=True)
    # Every rank checks the lengths of all, so that all raise the same error.
    lengths_of_ranks = call.channel.exchange(
        [(np.shape(value)[axis], _length(gradient, axis)) for value, gradient in pairs]
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
    for total, value, start in zip(totals, values, starts, strict=True):
        index = [slice(None)] * np.ndim(total)
        index[axis] = slice(start, start + value.shape[axis])
        slices.append(total[tuple(index)])
    return slices


def _length(array: Array, axis: int) -> int | None:
    """Return the length along `axis`, ``None`` where there is no such axis."""
    shape = np.shape(array)
    return shape[axis] if -len(shape) <= axis < len(shape) else None


Arrays = list[np.ndarray]
MakeCall = Callable[[str], CollectiveCall]
"""Makes the call of a backward pass, of a given kind."""

MoveBack = Callable[[CollectiveCall, Arrays, Arrays, Arrays], Arrays]
"""Returns the gradients of values, from the values, their results and the gradients of these."""


def backward_calls(
    call: CollectiveCall, collectives: Collectives, options: CommunicationOptions | None
) -> MakeCall:
    """Return how the backward pass of a `call` with `options` makes its own call."""
    # The number of the forward pass keeps the backward passes of two calls apart.
    forward = f"collective {call.channel.ledger.sequence}"
    chosen = collectives.options if options is None else options
    return lambda kind: collectives.call(kind, forward, chosen)


def has_tensors(nest: Any) -> bool:
    """Return whether a leaf of `nest` is a PyTorch tensor."""
    return is_loaded() and any(is_tensor(leaf) for leaf in nests.flatten(nest)[0])


@dataclass(frozen=True)
class _PullBack:
    """The backward pass of the collective `kind`, which is collective too."""

    kind: str
    make_call: MakeCall
    move_back: MoveBack
    needs_values: bool

    def __call__(self, values: Arrays, results: Arrays, gradients: Arrays) -> Arrays:
        """Return the gradients of `values`. **Collective**."""
        with self.make_call(f"gradient of {self.kind}") as call:
            return self.move_back(call, values, results, gradients)


def all_reduce_tensors(call: CollectiveCall, make_call: MakeCall, op: ReduceOp, nest: Any) -> Any:
    """Do `all_reduce_nest` on a nest with tensors. **Collective**, and so is the backward pass."""

    def move(arrays: Any) -> Any:
        return all_reduce_nest(call, op, arrays)

    def back(again: CollectiveCall, values: Arrays, results: Arrays, gradients: Arrays) -> Arrays:
        return pull_back_all_reduce(again, op, values, results, gradients)

    needs_values = op not in (ReduceOp.SUM, ReduceOp.MEAN)
    return apply_to_tensors(call, make_call, nest, move, back, needs_values)


def all_gather_tensors(call: CollectiveCall, make_call: MakeCall, nest: Any, axis: int) -> Any:
    """Do `all_gather_nest` on a nest with tensors. **Collective**, and so is the backward pass."""

    def move(arrays: Any) -> Any:
        return all_gather_nest(call, arrays, axis)

    def back(again: CollectiveCall, values: Arrays, results: Arrays, gradients: Arrays) -> Arrays:
        return pull_back_all_gather(again, values, axis, gradients)

    return apply_to_tensors(call, make_call, nest, move, back)


def apply_to_tensors(
    call: CollectiveCall,
    make_call: MakeCall,
    nest: Any,
    move: Callable[[Any], Any],
    move_back: MoveBack,
    needs_values: bool = False,
) -> Any:
    """Apply `move` to the whole nest at once, with tensors as one node of the graph."""
    # One node, because the backward pass must make one collective call for the whole nest.
    leaves, structure = nests.flatten(nest)
    positions = [i for i, leaf in enumerate(leaves) if is_tensor(leaf)]
    results: list[Any] = []

    def move_all(arrays: list[np.ndarray]) -> list[np.ndarray]:
        given = list(leaves)
        for i, array in zip(positions, arrays, strict=True):
            given[i] = array
        results[:] = nests.flatten(move(nests.unflatten(structure, given)))[0]
        return [results[i] for i in positions]

    pull_back = _PullBack(call.kind, make_call, move_back, needs_values)
    given = [leaves[i] for i in positions]
    tensors = apply_differentiable(move_all, pull_back, given, array_of_tensor)
    for i, tensor in zip(positions, tensors, strict=True):
        results[i] = tensor
    return nests.unflatten(structure, results)
