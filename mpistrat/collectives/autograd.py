"""Autograd: collectives of PyTorch tensors as nodes of the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.arrays import array_of_tensor
from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.options import CommunicationOptions
from mpistrat.pytorch import apply_differentiable, is_loaded, is_tensor

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
