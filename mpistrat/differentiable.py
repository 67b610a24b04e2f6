"""Collectives on nests that hold PyTorch tensors: they come back attached to the graph."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.collectives import CollectiveCall
from mpistrat.options import ReduceOp
from mpistrat.pullbacks import pull_back_all_gather, pull_back_all_reduce
from mpistrat.reductions import all_gather_nest, all_reduce_nest
from mpistrat.tensors import PullBack, apply_differentiable, is_loaded, is_tensor

__all__ = ["MakeCall", "all_gather_tensors", "all_reduce_tensors", "has_tensors"]

MakeCall = Callable[[str], CollectiveCall]


def has_tensors(nest: Any) -> bool:
    """Return whether a leaf of `nest` is a PyTorch tensor. Local."""
    return is_loaded() and any(is_tensor(leaf) for leaf in nests.flatten(nest)[0])


@dataclass(frozen=True)
class _AllReducePullBack:
    """The backward pass of `all_reduce`."""

    make_call: MakeCall
    op: ReduceOp

    @property
    def needs_values(self) -> bool:
        return self.op not in (ReduceOp.SUM, ReduceOp.MEAN)

    def __call__(
        self, values: list[np.ndarray], results: list[np.ndarray], gradients: list[np.ndarray]
    ) -> list[np.ndarray]:
        with self.make_call("gradient of all_reduce") as call:
            return pull_back_all_reduce(call, self.op, values, results, gradients)


@dataclass(frozen=True)
class _AllGatherPullBack:
    """The backward pass of `all_gather`."""

    make_call: MakeCall
    axis: int
    needs_values = False

    def __call__(
        self, values: list[np.ndarray], results: list[np.ndarray], gradients: list[np.ndarray]
    ) -> list[np.ndarray]:
        with self.make_call("gradient of all_gather") as call:
            return pull_back_all_gather(call, values, self.axis, gradients)


def all_reduce_tensors(call: CollectiveCall, make_call: MakeCall, op: ReduceOp, nest: Any) -> Any:
    """Do `all_reduce_nest` on a nest with tensors. **Collective**, and so is the backward pass.

    Parameters
    ----------
    call : CollectiveCall
        Of the forward pass.
    make_call : callable
        Returns the call of the backward pass, of a given kind.
    op : ReduceOp
    nest : nest
    """
    pull_back = _AllReducePullBack(make_call, op)
    return _apply(nest, lambda arrays: all_reduce_nest(call, op, arrays), pull_back)


def all_gather_tensors(call: CollectiveCall, make_call: MakeCall, nest: Any, axis: int) -> Any:
    """Do `all_gather_nest` on a nest with tensors. **Collective**, and so is the backward pass."""
    pull_back = _AllGatherPullBack(make_call, axis)
    return _apply(nest, lambda arrays: all_gather_nest(call, arrays, axis), pull_back)


def _apply(nest: Any, move: Callable[[Any], Any], pull_back: PullBack) -> Any:
    """Apply `move` to the whole nest at once, with tensors as one node of the graph."""
    leaves, structure = nests.flatten(nest)
    positions = [i for i, leaf in enumerate(leaves) if is_tensor(leaf)]
    results: list[Any] = []

    def move_all(arrays: list[np.ndarray]) -> list[np.ndarray]:
        given = list(leaves)
        for i, array in zip(positions, arrays, strict=True):
            given[i] = array
        results[:] = nests.flatten(move(nests.unflatten(structure, given)))[0]
        return [results[i] for i in positions]

    tensors = apply_differentiable(move_all, pull_back, [leaves[i] for i in positions])
    for i, tensor in zip(positions, tensors, strict=True):
        results[i] = tensor
    return nests.unflatten(structure, results)
