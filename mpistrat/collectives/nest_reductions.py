"""Reductions of nests of arrays, and the handle of a pending one."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Generic

import numpy as np

from mpistrat import nests
from mpistrat.arguments import as_array
from mpistrat.arrays import Array, is_array
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.operations.all_gather import AllGather
from mpistrat.comm.wire import result_dtype, wire_dtype
from mpistrat.options import ReduceOp
from mpistrat.pytorch import is_tensor, needs_graph, overwrite
from mpistrat.ragged import Ragged
from mpistrat.values import DistributedValues, IndexedSlices, T, localize


def all_reduce_nest(call: CollectiveCall, op: ReduceOp, nest: Any, detail: str = "") -> Any:
    """Reduce each leaf of `nest` over replicas. **Collective**."""
    # For a distributed value this reduces the rank's component. `IndexedSlices` are concatenated in
    # rank order; MEAN divides their values by the number of replicas. The ranks must agree on
    # `detail` too.
    if type(nest) is np.ndarray:  # this and the next two cases are short cuts, for speed alone
        return call.all_reduce(op, [nest], (_LEAF, detail) if detail else _LEAF)[0]
    if type(nest) in (int, float):
        return call.all_reduce(op, [np.asarray(nest)], (_LEAF, detail) if detail else _LEAF)[0][()]
    if nests.may_be_flat(nest) and call.are_plain(arrays := list(nest)):
        is_list = type(nest) is list
        structure = nests.signature_of_flat(is_list, len(arrays))
        reduced = call.all_reduce(op, arrays, (structure, detail) if detail else structure)
        return reduced if is_list else tuple(reduced)
    split = _Split(call, op, nest)
    agreed = (split.signature, detail) if detail else split.signature
    reduced = call.all_reduce(op, split.arrays, agreed)
    return split.joined(reduced, split.gathered_slices(call))


class PendingReduction(Generic[T]):
    """A reduction that `ReplicaContext.start_all_reduce` has begun.

    Dropping it without `wait` is an error: the reduction still writes to memory that the program
    has released, and its result is lost. The next collective of this rank raises the error.
    """

    def __init__(self, end: Callable[[], T], when_dropped: Callable[[], object]) -> None:
        self._end: Callable[[], T] | None = end
        self._when_dropped = when_dropped
        self._result: Any = None
        self._error: BaseException | None = None

    def wait(self) -> T:
        """Return the result, once the other ranks have contributed; later calls return it again.

        Local: the ranks need not call it at the same time, nor in the same order. It has no time
        limit, because every rank has begun the reduction.

        Returns
        -------
        nest
            The result, in the form that `ReplicaContext.all_reduce` returns.
        """
        if self._end is not None:
            # Cleared before the end: a program that catches an error from here need not wait again.
            end, self._end = self._end, None
            try:
                self._result = end()
            except BaseException as error:
                self._error = error
                raise
        if self._error is not None:
            raise self._error
        result: T = self._result
        return result

    def _check_ended(self, site: str) -> None:
        """Raise if it is pending at the end of an elastic ``run``; it was begun at `site`."""
        if self._end is not None:
            raise ValueError(
                f"The handle that start_all_reduce at {site} returned is not waited for when run "
                "ends. With elastic=True a call is repeated after a loss, with all that it has "
                "begun: call wait() within fn."
            )

    def __repr__(self) -> str:
        is_ended = self._end is None
        return f"<PendingReduction {'ended' if is_ended else 'under way: call wait()'}>"

    def __del__(self) -> None:
        if self._end is not None and not sys.is_finalizing():
            self._when_dropped()


def start_all_reduce_nest(call: CollectiveCall, op: ReduceOp, nest: Any) -> Callable[[], Any]:
    """Begin `all_reduce_nest`, and return the function that ends it. **Collective**."""
    # `IndexedSlices` are reduced before this returns, because their sizes differ between ranks.
    # Tensors are written to at the end.
    split = _Split(call, op, nest)
    split.check_tensors(call)
    end = call.start_all_reduce(op, split.arrays, split.signature)
    slices = split.gathered_slices(call)
    return lambda: split.joined(end(), slices, _in_place)


_LEAF = nests.signature(nests.flatten(0)[1])
"""The signature of a nest that is a single leaf."""


def leaf_arrays(
    call: CollectiveCall, leaves: Sequence[Any], structure: nests.Structure
) -> list[Array]:
    """Return the leaves of a nest as arrays, without the `IndexedSlices`."""
    for number, leaf in enumerate(leaves):
        if leaf is None:
            path = nests.paths_of(structure)[number]
            where = f"the leaf {path!r}" if path else "the value"
            raise TypeError(
                f"{call.kind}: {where} is None on {call.channel.place()}, which does not "
                "mean zero. Pass zeros of the shape that the other ranks have, such as "
                "zeros_like(parameter) for a parameter without a gradient, or leave it out on all "
                "of them."
            )
        if isinstance(leaf, Ragged):
            raise NotImplementedError(
                f"{call.kind} takes dense arrays, but the value is Ragged. Pass its values, and "
                "its row_lengths() if you need to know which row they belong to."
            )
    return [as_array(call.kind, leaf) for leaf in leaves if not isinstance(leaf, IndexedSlices)]


class _Split:
    """A nest to be reduced, separated into arrays and `IndexedSlices`."""

    def __init__(self, call: CollectiveCall, op: ReduceOp, nest: Any) -> None:
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
            self._sort_out(call, op)

    def _sort_out(self, call: CollectiveCall, op: ReduceOp) -> None:
        """Find the `IndexedSlices`, and convert the rest to arrays."""
        self._sparse = [i for i, leaf in enumerate(self._leaves) if isinstance(leaf, IndexedSlices)]
        for i in self._sparse:
            _check_sparse(call.kind, op, self._leaves[i])
        self.arrays = leaf_arrays(call, self._leaves, self._structure)

    @property
    def signature(self) -> object:
        """The signature on which the ranks must agree in addition to the arrays."""
        structure = nests.signature(self._structure)
        sparse = tuple((i, self._leaves[i].dense_shape) for i in self._sparse)
        return (structure, sparse) if sparse else structure

    def gathered_slices(self, call: CollectiveCall) -> list[IndexedSlices]:
        """Return the reduced `IndexedSlices`. **Collective**."""
        return [_gather_slices(call, self._op, self._leaves[i]) for i in self._sparse]

    def check_tensors(self, call: CollectiveCall) -> None:
        """Raise for tensors that the result cannot be written to."""
        for number, leaf in enumerate(self._leaves):
            if not is_tensor(leaf):
                continue
            path = nests.paths_of(self._structure)[number]
            what = f"{call.kind} writes the result to the tensor that it is given"
            if needs_graph(leaf):
                raise NotImplementedError(
                    f"{what}, but the leaf {path!r} is part of a graph, which it would leave. "
                    "Use all_reduce, or pass tensor.detach()."
                )
            dtype = as_array(call.kind, leaf).dtype
            reduced = result_dtype(self._op, dtype)
            if reduced != dtype:
                raise TypeError(
                    f"{what}, but {self._op.name} of {dtype} is {reduced}. Use all_reduce, or "
                    "cast the tensor first."
                )

    def joined(
        self,
        arrays: Sequence[Array],
        slices: Sequence[IndexedSlices],
        like: Callable[[Any, Any], Any] | None = None,
    ) -> Any:
        """Return the nest of the results, each converted by `like` to the form of its leaf."""
        like = like or like_leaf
        if self._holds_arrays:
            return nests.unflatten(self._structure, arrays)
        results: list[Any] = list(arrays)
        for i, each in zip(self._sparse, slices, strict=True):
            results.insert(i, each)
        pairs = zip(self._leaves, results, strict=True)
        return nests.unflatten(self._structure, [like(leaf, result) for leaf, result in pairs])


def _gather_slices(call: CollectiveCall, op: ReduceOp, slices: IndexedSlices) -> IndexedSlices:
    fields = [as_array(call.kind, each) for each in (slices.values, slices.indices)]
    values, indices = AllGather(0).forward(call, fields)
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
            f"{tuple(slices.indices.shape)}, cannot be reduced. Pass row numbers of shape (n,)."
        )
    if op is ReduceOp.MEAN:
        wire_dtype(op, as_array(kind, slices.values).dtype)


def like_leaf(leaf: Any, result: Any) -> Any:
    """Return a NumPy scalar if the leaf was a number, else the result unchanged."""
    if type(leaf) is np.ndarray or isinstance(leaf, IndexedSlices):
        return result
    return result if is_array(leaf) and not isinstance(leaf, np.generic) else result[()]


def _in_place(leaf: Any, result: Any) -> Any:
    """Return the leaf with the result in it if it is a tensor, otherwise as `like_leaf`."""
    return overwrite(leaf, result) if is_tensor(leaf) else like_leaf(leaf, result)
