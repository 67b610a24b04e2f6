"""Autograd: collectives of PyTorch tensors as nodes of the graph."""

from __future__ import annotations

import functools
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
MoveBack = Callable[[CollectiveCall, Arrays, Arrays, Arrays], Arrays]
"""Returns the gradients of values, from the values, their results and the results' gradients."""


def has_tensors(nest: Any) -> bool:
    """Return whether a leaf of `nest` is a PyTorch tensor."""
    return is_loaded() and any(is_tensor(leaf) for leaf in nests.flatten(nest)[0])


@dataclass(frozen=True)
class _PullBack:
    """The backward pass of a collective, which is also collective."""

    make_call: Callable[[], CollectiveCall]
    move_back: MoveBack
    needs_values: bool

    def __call__(self, values: Arrays, results: Arrays, gradients: Arrays) -> Arrays:
        """Return the gradients of `values`. **Collective**."""
        with self.make_call() as call:
            return self.move_back(call, values, results, gradients)


def apply_to_tensors(
    call: CollectiveCall,
    collectives: Collectives,
    options: CommunicationOptions | None,
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
        # The results of leaves that are not tensors are returned by this list, not by PyTorch's
        # node.
        results[:] = nests.flatten(move(nests.unflatten(structure, given)))[0]
        return [results[i] for i in positions]

    # The number of the forward pass keeps the backward passes of two calls apart.
    what = f"gradient of {call.kind}", f"collective {call.channel.ledger.sequence}"
    make_call = functools.partial(collectives.call, *what, options or collectives.options)
    pull_back = _PullBack(make_call, move_back, needs_values)
    given = [leaves[i] for i in positions]
    tensors = apply_differentiable(move_all, pull_back, given, array_of_tensor)
    for i, tensor in zip(positions, tensors, strict=True):
        results[i] = tensor
    return nests.unflatten(structure, results)
