"""Collectives on nests: each leaf reduced or gathered over replicas."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.arguments import as_array, as_integer
from mpistrat.arrays import Array, is_array
from mpistrat.collectives import CollectiveCall
from mpistrat.comm.dtypes import wire_dtype
from mpistrat.options import ReduceOp
from mpistrat.values import DistributedValues, IndexedSlices, localize

__all__ = [
    "all_gather_nest",
    "all_reduce_nest",
    "start_all_reduce_nest",
]


def all_reduce_nest(call: CollectiveCall, op: ReduceOp, nest: Any, words: str = "") -> Any:
    """Reduce each leaf of `nest` over replicas. **Collective**.

    Of a distributed value it is this rank's component. `IndexedSlices` are concatenated in rank
    order; MEAN divides their values by the number of replicas. `words` must agree over ranks too.

    Raises
    ------
    TypeError
        If a leaf is no array, number or `IndexedSlices`.
    NotImplementedError
        For `IndexedSlices` under another reduction than SUM and MEAN.
    """
    if type(nest) is np.ndarray:  # the shortest way for what is reduced most often
        return call.all_reduce(op, [nest], (_LEAF, words) if words else _LEAF)[0]
    if type(nest) in (int, float):
        return call.all_reduce(op, [np.asarray(nest)], (_LEAF, words) if words else _LEAF)[0][()]
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


_LEAF = nests.signature(nests.flatten(0)[1])
"""The signature of a nest that is one leaf."""


class _Split:
    """A nest to be reduced, taken apart into arrays and `IndexedSlices`."""

    def __init__(self, kind: str, op: ReduceOp, nest: Any) -> None:
        self._op = op
        self._leaves, self._structure = nests.flatten(nest)
        types = set(map(type, self._leaves))
        if any(issubclass(each, DistributedValues) for each in types):
            self._leaves, self._structure = nests.flatten(localize(nest))
            types = set(map(type, self._leaves))
        self._sparse: list[int] = []
        self._holds_arrays = types == {np.ndarray}
        self.arrays = self._leaves
        if not self._holds_arrays:
            self._sort_out(kind, op)

    def _sort_out(self, kind: str, op: ReduceOp) -> None:
        """Find the `IndexedSlices`, and make arrays of the rest."""
        self._sparse = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, IndexedSlices)]
        for i in self._sparse:
            _check_sparse(kind, op, self._leaves[i])
        dense = self._leaves
        if self._sparse:
            dense = [leaf for leaf in self._leaves if not isinstance(leaf, IndexedSlices)]
        self.arrays = [as_array(kind, leaf) for leaf in dense]

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
        if self._holds_arrays:
            return nests.unflatten(self._structure, arrays)
        results: list[Any] = list(arrays)
        for i, each in zip(self._sparse, slices, strict=True):
            results.insert(i, each)
        pairs = zip(self._leaves, results, strict=True)
        return nests.unflatten(self._structure, [_like(leaf, result) for leaf, result in pairs])


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
    axis = as_integer(f"{call.kind}: axis", axis)
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


def _like(leaf: Any, result: Any) -> Any:
    """Return a NumPy scalar where the leaf was a number, else the result as it is."""
    if type(leaf) is np.ndarray or isinstance(leaf, IndexedSlices):
        return result
    return result if is_array(leaf) and not isinstance(leaf, np.generic) else result[()]
