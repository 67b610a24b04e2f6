"""All-reduce of replicas: repeated calls, tensors and their gradients, and ``out=``."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.arrays import (
    Array,
    address_of,
    are_apart,
    host_view,
    in_memory_of,
    is_array,
    is_on_host,
    is_plain,
    namespace_of,
)
from mpistrat.collectives.autograd import Arrays, apply_to_tensors, has_tensors
from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.collectives.nest_reductions import all_reduce_nest, leaf_arrays
from mpistrat.comm.wire import result_dtype
from mpistrat.options import CommunicationOptions, ReduceOp, ReduceOpLike
from mpistrat.pytorch import is_loaded, is_tensor
from mpistrat.values import IndexedSlices, localize

_ndarray = np.ndarray
_NUMBERS = (int, float)
_NO_NESTS = (_ndarray, *_NUMBERS)
"""The most frequent types, which cannot contain tensors."""
_OPS = (str, ReduceOp)


def all_reduce(
    collectives: Collectives,
    reduce_op: ReduceOpLike,
    value: Any,
    options: CommunicationOptions | None,
    out: Any,
) -> Any:
    """Do `ReplicaContext.all_reduce`. **Collective**."""
    is_number = type(value) in _NUMBERS and out is None
    is_one = options is None and (is_number or type(value) is _ndarray)
    if is_one and type(reduce_op) in _OPS:
        array = np.asarray(value) if is_number else value
        known = collectives.fast_path(reduce_op, array)
        source = array if known is None or out is None else _source_for(array, out)
        if known is not None and source is not None:
            result = known.all_reduce(source, out)
            # Otherwise the fast path has found something unusual, before anything was sent. The
            # call below starts again.
            if result is not None:
                return result[()] if is_number else result
    with collectives.call("all_reduce", options=options) as call:
        op = ReduceOp.parse(reduce_op)
        if type(value) not in _NO_NESTS and is_loaded() and has_tensors(localize(value)):
            if out is not None:
                raise TypeError(f"{call.kind}: out is not for tensors. Leave out= away.")
            return _all_reduce_tensors(call, collectives, options, op, localize(value))
        if out is None:
            result = all_reduce_nest(call, op, value)
        else:
            result = _all_reduce_into(call, op, value, out)
    if is_one:
        collectives.keep_fast_path(call, reduce_op, np.asarray(value))
    return result


def _all_reduce_tensors(
    call: CollectiveCall,
    collectives: Collectives,
    options: CommunicationOptions | None,
    op: ReduceOp,
    nest: Any,
) -> Any:
    """Do `all_reduce_nest` on a nest with tensors. **Collective**, and so is the backward pass."""

    def back(again: CollectiveCall, values: Arrays, results: Arrays, gradients: Arrays) -> Arrays:
        return pull_back_all_reduce(again, op, values, results, gradients)

    move = functools.partial(all_reduce_nest, call, op)
    needs_values = op not in (ReduceOp.SUM, ReduceOp.MEAN)
    return apply_to_tensors(call, collectives, options, nest, move, back, needs_values)


def _all_reduce_into(call: CollectiveCall, op: ReduceOp, nest: Any, out: Any) -> Any:
    """Reduce each leaf of `nest` over replicas into the same leaf of `out`. **Collective**."""
    # The ranks need not agree on `out`: the messages are the same without it.
    leaves, structure = nests.flatten(localize(nest))
    targets, structure_of_out = nests.flatten(localize(out))
    if structure_of_out != structure:
        raise ValueError(
            f"{call.kind}: out must have the structure of the value, "
            f"{nests.signature(structure)}, but it has {nests.signature(structure_of_out)}."
        )
    for leaf in leaves:
        if isinstance(leaf, IndexedSlices):
            raise TypeError(f"{call.kind}: out is not for IndexedSlices. Leave out= away.")
    arrays = leaf_arrays(call, leaves, structure)
    for number, (array, target) in enumerate(zip(arrays, targets, strict=True)):
        path = nests.paths_of(structure)[number]
        what = f"out{f' at {path!r}' if path else ''}"
        rank = f"on {call.channel.place()}"
        _check(call.kind, what, rank, op, array, target)
    direct = None
    # Replicas of one rank may pass each other's memory: nothing is written before all is read.
    if not call.channel.shares_memory and _can_reduce_into(arrays, targets):
        arrays, direct = list(map(in_memory_of, arrays, targets)), targets
    results = call.all_reduce(op, arrays, nests.signature(structure), out=direct)
    for result, target in zip(results, targets, strict=True):
        if result is not target:
            is_host = is_on_host(target)
            target[...] = host_view(result) if is_host else namespace_of(target).asarray(result)
    return out


def _check(kind: str, what: str, rank: str, op: ReduceOp, array: Array, target: Any) -> None:
    """Raise if the reduction of `array` does not fit `target`."""
    if not is_array(target) or is_tensor(target):
        raise TypeError(
            f"{kind}: {what} must be an array, but is {target!r} of type "
            f"{type(target).__name__} {rank}."
        )
    dtype = result_dtype(op, np.dtype(array.dtype))
    if tuple(target.shape) != tuple(array.shape) or target.dtype.newbyteorder("=") != dtype:
        raise ValueError(
            f"{kind}: {what} must have shape {tuple(array.shape)} and dtype {dtype}, not "
            f"{tuple(target.shape)} and {target.dtype} as {rank}."
        )
    if isinstance(target, np.ndarray) and not target.flags.writeable:
        raise ValueError(f"{kind}: {what} is read-only {rank}. Pass a writable array.")


def _can_reduce_into(arrays: Sequence[Array], targets: Sequence[Any]) -> bool:
    """Return whether `arrays` may be reduced to `targets` of fitting shapes and dtypes."""
    are_on_host = all(map(is_on_host, arrays)) and all(map(is_plain, targets))
    return are_on_host and are_apart(arrays, targets)


def _source_for(array: np.ndarray, target: object) -> np.ndarray | None:
    """Return a plain `array`, as `target` if it has the same memory; ``None`` if it does not fit.

    `target` has not been checked before.
    """
    if target is array:
        return array if array.flags.writeable else None
    if (
        type(target) is not np.ndarray
        or not is_plain(target)
        or target.shape != array.shape
        or target.dtype != array.dtype
        or not target.flags.writeable
    ):
        return None
    # The same check as `are_apart` and `in_memory_of`, for two arrays of equal length in C order.
    distance = abs(address_of(array) - address_of(target))
    if not distance:
        return target
    return array if distance >= array.nbytes else None


def pull_back_all_reduce(
    call: CollectiveCall,
    op: ReduceOp,
    values: Sequence[Array],
    results: Sequence[Array],
    gradients: Sequence[Array],
    structure: str = "",
) -> list[Array]:
    """Return the gradients for `values` from the gradients for `results`. **Collective**."""
    for value, result, gradient in zip(values, results, gradients, strict=True):
        if not np.shape(value) == np.shape(result) == np.shape(gradient):
            raise ValueError(
                f"{call.kind}: the value, the result and its gradient must have one shape, but "
                f"have {np.shape(value)}, {np.shape(result)} and {np.shape(gradient)}."
            )
    # Most messages are a SUM, so the ranks compare the forward reduction too.
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
    """Pass the gradient to the extremal element; replicas that tie share it."""
    # NaN is extremal wherever it occurs, and is not equal to any other NaN.
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
    # Dividing the product by a value would fail at zeros, so zeros are counted separately: with one
    # zero, only its own replica has a gradient; with two, none has.
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
