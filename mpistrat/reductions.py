"""Collectives on nests: each leaf reduced or gathered over replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.arguments import as_array, as_index
from mpistrat.arrays import Array, is_array
from mpistrat.collectives import CollectiveCall
from mpistrat.comm.dtypes import wire_dtype
from mpistrat.options import ReduceOp
from mpistrat.values import IndexedSlices

__all__ = [
    "all_gather_nest",
    "all_reduce_nest",
    "start_all_reduce_nest",
]


def all_reduce_nest(call: CollectiveCall, op: ReduceOp, nest: Any, words: str = "") -> Any:
    """Reduce each leaf of `nest` over replicas. **Collective**.

    `IndexedSlices` are concatenated in rank order; MEAN divides their values by the number of
    replicas. `words` must agree over ranks too.

    Raises
    ------
    TypeError
        If a leaf is no array, number or `IndexedSlices`.
    NotImplementedError
        For `IndexedSlices` under another reduction than SUM and MEAN.
    """
    split = _Split(call.kind, op, nest)
    agreed = (split.signature, words) if words else split.signature
    reduced = call.all_reduce(op, split.arrays, agreed)
    return split.joined(reduced, split.gathered_slices(call))


def start_all_reduce_nest(call: CollectiveCall, op: ReduceOp, nest: Any) -> Callable[[], Any]:
    """Begin `all_reduce_nest`, and return the function that ends it. **Collective**.

    `IndexedSlices` are reduced before this returns, because their sizes differ over ranks.
    """
    split = _Split(call.kind, op, nest)
    end = call.start_all_reduce(op, split.arrays, split.signature)
    slices = split.gathered_slices(call)
    return lambda: split.joined(end(), slices)


class _Split:
    """A nest to be reduced, taken apart into arrays and `IndexedSlices`."""

    def __init__(self, kind: str, op: ReduceOp, nest: Any) -> None:
        self._op = op
        self._leaves, self._structure = nests.flatten(nest)
        positions = range(len(self._leaves))
        self._sparse = [i for i in positions if isinstance(self._leaves[i], IndexedSlices)]
        self._dense = [i for i in positions if not isinstance(self._leaves[i], IndexedSlices)]
        self.arrays = [as_array(kind, self._leaves[i]) for i in self._dense]
        for i in self._sparse:
            _check_sparse(kind, op, self._leaves[i])

    @property
    def signature(self) -> object:
        """What the ranks must agree on besides the arrays."""
        spelt = nests.signature(self._structure)
        return (spelt, tuple(self._sparse)) if self._sparse else spelt

    def gathered_slices(self, call: CollectiveCall) -> list[IndexedSlices]:
        """Return the reduced `IndexedSlices`. **Collective**."""
        return [_gather_slices(call, self._op, self._leaves[i]) for i in self._sparse]

    def joined(self, arrays: Sequence[Array], slices: Sequence[IndexedSlices]) -> Any:
        """Return the nest of the results. Local."""
        results: list[Any] = [None] * len(self._leaves)
        for i, array in zip(self._dense, arrays, strict=True):
            results[i] = _scalar_if(self._leaves[i], array)
        for i, each in zip(self._sparse, slices, strict=True):
            results[i] = each
        return nests.unflatten(self._structure, results)


def all_gather_nest(call: CollectiveCall, nest: Any, axis: int) -> Any:
    """Concatenate each leaf of `nest` over replicas along `axis`. **Collective**.

    Raises
    ------
    NotImplementedError
        For `IndexedSlices`.
    TypeError
        If a leaf is no array or number, or `axis` no integer.
    ValueError
        If shapes do not fit, on every rank.
    """
    axis = as_index(call.kind, axis)
    leaves, structure = nests.flatten(nest)
    for leaf in leaves:
        if isinstance(leaf, IndexedSlices):
            raise NotImplementedError(
                f"{call.kind} concatenates dense arrays, but the value is IndexedSlices. Gather "
                "its values and its indices, or add it into a dense array first."
            )
    arrays = [as_array(call.kind, leaf) for leaf in leaves]
    return nests.unflatten(structure, call.all_gather(arrays, axis, nests.signature(structure)))


def _gather_slices(call: CollectiveCall, op: ReduceOp, slices: IndexedSlices) -> IndexedSlices:
    fields = [as_array(call.kind, each) for each in (slices.values, slices.indices)]
    values, indices = call.all_gather(fields, 0)
    if op is ReduceOp.MEAN:
        values = values / values.dtype.type(call.channel.size)
    return IndexedSlices(values, indices, slices.dense_shape)


def _check_sparse(kind: str, op: ReduceOp, slices: IndexedSlices) -> None:
    if op not in (ReduceOp.SUM, ReduceOp.MEAN):
        raise NotImplementedError(
            f"{kind}: IndexedSlices can be reduced by SUM and MEAN, not by {op.name}."
        )
    if len(slices.indices.shape) != 1:
        raise ValueError(
            f"{kind}: IndexedSlices with batches of indices, of the shape "
            f"{tuple(slices.indices.shape)}, cannot be reduced. Give row numbers of shape (n,)."
        )
    if op is ReduceOp.MEAN:
        wire_dtype(op, as_array(kind, slices.values).dtype)


def _scalar_if(leaf: Any, result: Array) -> Any:
    """Return a NumPy scalar where the leaf was a number, else the array."""
    if not is_array(leaf) or isinstance(leaf, np.generic):
        return result[()]
    return result
