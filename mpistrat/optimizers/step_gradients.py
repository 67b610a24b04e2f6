"""Checks, casts and sums over replicas of the gradients of a step."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from mpistrat import context, nests, user_warnings
from mpistrat.arguments import as_array, span_outside
from mpistrat.arrays import Array, address_of, host_view, is_on_host, namespace_of, place
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.nest_reductions import all_reduce_nest
from mpistrat.collectives.reduction import Reduction
from mpistrat.comm.wire import is_floating
from mpistrat.errors import ContextError
from mpistrat.options import ReduceOp
from mpistrat.values import DistributedValues, IndexedSlices, PerReplica
from mpistrat.variables import SyncOnReadVariable, Variable, can_cast
from mpistrat.variables.slice_writes import split_into_rounds
from mpistrat.variables.variable import device_of, storage_of


def listed(values: Any) -> Any:
    """Return an iterable as a list, and anything else unchanged: the call raises for it."""
    is_one = isinstance(values, Variable) or not isinstance(values, Iterable)
    return values if is_one else list(values)


def owner_among(variables: Iterable[Variable], default: Any) -> Any:
    """Return the strategy of the first of `variables` that has one, else `default`."""
    owners = (variable.strategy for variable in variables)
    return next((owner for owner in owners if owner is not None), default)


def variables_in(pairs: Any) -> list[Variable]:
    """Return the variables of those `pairs` that are (gradient, Variable)."""
    found = pairs if isinstance(pairs, list) else []
    return [pair[1] for pair in found if _is_pair(pair)]


def _is_pair(pair: object) -> bool:
    return isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], Variable)


def split_pairs(
    kind: str, grads_and_vars: Iterable[Any], may_repeat: bool = False
) -> tuple[list[Any], list[Variable]]:
    """Return the gradients and the variables of (gradient, Variable) pairs, at least one."""
    if not isinstance(grads_and_vars, Iterable):
        raise TypeError(
            f"{kind} takes an iterable of (gradient, Variable) pairs, not {grads_and_vars!r}."
        )
    pairs = list(grads_and_vars)
    if not pairs:
        raise ValueError(f"{kind} was given no (gradient, variable) pair.")
    for number, pair in enumerate(pairs):
        if not _is_pair(pair):
            raise TypeError(
                f"{kind} takes (gradient, Variable) pairs, but element {number} is {pair!r} of "
                f"type {type(pair).__name__}."
            )
    variables = [variable for _, variable in pairs]
    if not may_repeat:
        _check_each_once(kind, variables, " Add its gradients, and pass it once.")
    return [gradient for gradient, _ in pairs], variables


def check_owners(kind: str, strategy: Any, variables: Sequence[Variable]) -> None:
    """Check that no variable belongs to a strategy other than `strategy`, or to only one rank."""
    for variable in variables:
        check_scope(f"{kind}: the variable {variable.name!r}", variable)
        if variable.strategy not in (None, strategy):
            raise ContextError(
                f"{kind}: the variable {variable.name!r} belongs to {variable.strategy!r}, but "
                f"the step is one of {strategy!r}. Different strategies cannot be mixed: use the "
                "optimizer and its variables in the scope in which they were created."
            )


def check_scope(what: str, variable: Variable) -> None:
    """Raise if `what` is called in `run` of several replicas with a `variable` of one rank."""
    if variable.strategy is None:
        context.require_scope_of_several(what)


def check_gradients(
    kind: str, gradients: Sequence[Any], variables: Sequence[Variable], summed: bool
) -> list[Any]:
    """Return each gradient as an array or `IndexedSlices` of its variable's dtype."""
    # ``None`` stays ``None``. `summed` says whether each replica passes its own gradient.
    if all(gradient is None for gradient in gradients):
        names = [variable.name for variable in variables]
        raise ValueError(f"{kind}: every gradient is None (variables {names}).")
    checked = [
        None if gradient is None else _checked(kind, gradient, variable, summed)
        for gradient, variable in zip(gradients, variables, strict=True)
    ]
    if user_warnings.empty_parts:
        warn_of_nan(checked, variables)
    return checked


def warn_of_nan(gradients: Iterable[Any], variables: Iterable[Variable]) -> None:
    """Warn if a gradient is NaN on this replica because its part of a batch was empty."""
    frame = context.current()
    if frame is not None:
        named = zip(variables, gradients, strict=True)
        arrays = ((v.name, g.values if isinstance(g, IndexedSlices) else g) for v, g in named)
        replica = context.layout_of(frame.strategy).replica_id
        user_warnings.warn_of_nan(replica, ((f"the gradient of {n!r}", g) for n, g in arrays))


def check_variables(kind: str, variables: Any) -> None:
    """Check that `variables` is a list of variables that gradients can change, each once."""
    if not isinstance(variables, list):
        raise TypeError(
            f"{kind} takes an iterable of variables, not {variables!r} of type "
            f"{type(variables).__name__}."
        )
    if not variables:
        raise ValueError(f"{kind} was given no variable.")
    for variable in variables:
        if not isinstance(variable, Variable):
            raise TypeError(
                f"{kind} takes variables, not {variable!r} of type {type(variable).__name__}."
            )
        _check_takes_gradients(kind, variable)
    _check_each_once(kind, variables)


def _check_each_once(kind: str, variables: Sequence[Variable], remedy: str = "") -> None:
    if len({id(variable) for variable in variables}) < len(variables):
        names = [variable.name for variable in variables]
        raise ValueError(f"{kind} was given one variable twice: {names}.{remedy}")


def _check_takes_gradients(kind: str, variable: Variable) -> None:
    """Raise if a variable cannot hold fractions, because steps along gradients are fractions."""
    if not is_floating(variable.dtype) and variable.dtype.kind != "c":
        raise TypeError(
            f"{kind}: the variable {variable.name!r} of dtype {variable.dtype} cannot take the "
            "steps of an optimizer, which are fractions. Leave it out, or give it a floating dtype."
        )


def _checked(kind: str, gradient: Any, variable: Variable, summed: bool) -> Any:
    _check_takes_gradients(kind, variable)
    is_plain = type(gradient) is np.ndarray and gradient.shape == variable.shape
    if is_plain and gradient.dtype == variable.dtype:
        return gradient  # the usual case: the code below takes longer than a small update
    what = f"{kind}: the gradient of variable {variable.name!r}"
    if isinstance(gradient, PerReplica | SyncOnReadVariable) and not summed:
        raise ValueError(
            f"{what} differs from replica to replica ({type(gradient).__name__}) and is not "
            "summed here, so the replicas would drift apart: forgot strategy.run? Call "
            "apply_gradients inside of it, or reduce the gradient first, with "
            "reduce_to('sum', gradient, variable)."
        )
    if isinstance(gradient, DistributedValues | Variable):
        gradient = gradient.values[0]
    if isinstance(gradient, IndexedSlices):
        return _checked_slices(what, gradient, variable)
    array = _as_array(what, gradient)
    if tuple(array.shape) != variable.shape:
        raise ValueError(
            f"{what} has the shape {tuple(array.shape)}, but the variable has the shape "
            f"{variable.shape}."
        )
    return _cast(what, array, variable)


def _as_array(what: str, gradient: Any) -> Array:
    if not isinstance(gradient, list | tuple):
        return as_array(what, gradient)
    try:
        return np.asarray(gradient)
    except ValueError as reason:
        raise ValueError(f"{what} is a sequence that is not an array: {reason}") from None


def _cast(what: str, array: Array, variable: Variable) -> Array:
    if not can_cast(array.dtype, variable.dtype):
        raise TypeError(
            f"{what} has the dtype {array.dtype}, which does not fit into {variable.dtype}. Cast "
            "it first."
        )
    return array.astype(variable.dtype, copy=False)


def _checked_slices(what: str, slices: IndexedSlices, variable: Variable) -> IndexedSlices:
    values, indices = as_array(what, slices.values), as_array(what, slices.indices)
    has_rows = variable.shape and len(indices.shape) == 1
    fits = has_rows and tuple(values.shape[1:]) == variable.shape[1:]
    if not fits or slices.dense_shape not in (None, variable.shape):
        raise ValueError(
            f"{what} has rows of the shape {tuple(values.shape[1:])} (dense_shape "
            f"{slices.dense_shape}), but the variable has the shape {variable.shape}."
        )
    num_rows = variable.shape[0]
    span = span_outside(indices, num_rows)
    if span is not None:
        raise IndexError(
            f"{what} has indices from {span[0]} to {span[1]}, but the variable of "
            f"shape {variable.shape} has the rows 0 to {num_rows - 1}."
        )
    # All ranks use the same dtype of indices, so that they can concatenate them.
    return IndexedSlices(_cast(what, values, variable), indices.astype(np.int64), variable.shape)


def sum_over_replicas(
    call: CollectiveCall,
    gradients: list[Any],
    variables: Sequence[Variable],
    parameters: str = "",
    unsummed: Collection[int] = (),
) -> list[Any]:
    """Return each gradient summed over replicas, small ones in one message. **Collective**.

    Gradients at the positions `unsummed` are not summed; the ranks only agree on them.
    """
    # The names of variables, which gradients are None, and `parameters` are compared too.
    given = [None if i in unsummed else gradient for i, gradient in enumerate(gradients)]
    if unsummed:
        parameters += f" and in parts {', '.join(variables[i].name for i in unsummed)}"
    reduced = all_reduce_nest(call, ReduceOp.SUM, _named(given, variables), parameters)
    return [
        gradient if each is None else result[variable.name]
        for each, gradient, variable, result in zip(
            given, gradients, variables, reduced, strict=True
        )
    ]


def prepare_sum(
    call: CollectiveCall, gradients: list[Any], variables: Sequence[Variable], parameters: str
) -> Reduction:
    """Return the reduction that `sum_over_replicas` does if all gradients are dense."""
    names = _names_signature(tuple([variable.name for variable in variables]))
    return call.prepare(ReduceOp.SUM, gradients, (names, parameters) if parameters else names)


@functools.lru_cache
def _names_signature(names: tuple[str, ...]) -> str:
    return nests.signature(nests.flatten([{name: 0} for name in names])[1])


def agree_on_gradients(
    call: CollectiveCall,
    gradients: list[Any],
    variables: Sequence[Variable],
    parameters: str,
) -> list[Any]:
    """Compare gradients that must already be equal on all replicas; return them. **Collective**."""
    # The names of variables, which gradients are None or sparse, and `parameters` must agree. So
    # must the values in cross-replica context; in replica context the program has reduced them.
    leaves, structure = nests.flatten(_named(gradients, variables))
    sparse = tuple(i for i, leaf in enumerate(leaves) if isinstance(leaf, IndexedSlices))
    frame = context.current()
    is_replica = frame is not None and frame.kind is context.Kind.REPLICA
    if not is_replica and not _are_equal.get():
        # Device arrays are left out: copying them to the host would take longer than the step.
        on_host = [each for each in _arrays_of(leaves) if isinstance(each, np.ndarray)]
        call.include_values(on_host)
    call.agree("gradients as they are", nests.signature(structure), sparse, parameters)
    return gradients


_are_equal: ContextVar[bool] = ContextVar("_are_equal", default=False)


@contextmanager
def known_equal() -> Iterator[None]:
    """Do not compare gradients within the ``with`` block, because a reduction returned them."""
    token = _are_equal.set(True)
    try:
        yield
    finally:
        _are_equal.reset(token)


def _arrays_of(leaves: Iterable[Any]) -> Iterator[Array]:
    for leaf in leaves:
        if isinstance(leaf, IndexedSlices):
            yield leaf.indices
            yield leaf.values
        else:
            yield leaf


def _named(gradients: Sequence[Any], variables: Sequence[Variable]) -> list[dict[str, Any]]:
    """Return a nest whose structure shows each name, with an empty tuple for each ``None``."""
    return [
        {variable.name: () if gradient is None else gradient}
        for gradient, variable in zip(gradients, variables, strict=True)
    ]


def settled_beside(
    pairs: Sequence[tuple[Any, Variable]], written: Sequence[tuple[int, int]]
) -> list[Any]:
    """Return the gradients in C order on the devices of their variables, or coalesced."""
    # Gradients that overlap with `written`, the memory that the step changes, are copied.
    spans = _joined_spans(written)
    settled: list[Any] = []
    for gradient, variable in pairs:
        if type(gradient) is np.ndarray and type(storage_of(variable)) is np.ndarray:
            settled.append(_unshared(gradient, spans))
            continue
        device = device_of(variable)
        if isinstance(gradient, IndexedSlices):
            values, indices = place(gradient.values, device), place(gradient.indices, device)
            settled.append(coalesced(IndexedSlices(values, indices, gradient.dense_shape)))
        else:
            settled.append(_unshared(place(gradient, device), spans))
    return settled


def _unshared(array: Array, spans: Sequence[tuple[int, int]]) -> Array:
    if not array.flags.c_contiguous or (spans and _lies_in(array, spans)):
        array = array.copy()
    return array


def _joined_spans(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return `spans` in order, with overlapping ones merged."""
    joined: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        # If ranks update parts of a variable, the list contains both the whole and the part.
        if joined and begin < joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end)
        else:
            joined.append((begin, end))
    return joined


def _lies_in(array: Array, spans: Sequence[tuple[int, int]]) -> bool:
    """Return whether the C-ordered `array` shares memory with `spans`, sorted and disjoint."""
    begin = address_of(array)
    last = bisect.bisect_left(spans, (begin + array.nbytes,)) - 1
    return last >= 0 and spans[last][1] > begin


def coalesced(slices: IndexedSlices) -> IndexedSlices:
    """Return `slices` with each index once, in ascending order, its values added up."""
    xp = namespace_of(slices.values)
    indices, places = xp.unique_inverse(slices.indices)
    values = xp.zeros((indices.size, *slices.values.shape[1:]), dtype=slices.values.dtype)
    _add_rows(values, places, slices.values)
    return IndexedSlices(values, indices, slices.dense_shape)


def _add_rows(values: Array, places: Array, added: Array) -> None:
    """Add each row of `added` to ``values[place]``, in the same order on all ranks."""
    if is_on_host(values):
        np.add.at(values, places, added)
        return
    # Atomic additions on a device have no fixed order, so ranks would differ in the last bits.
    order, ends = split_into_rounds(host_view(places))
    order_there = namespace_of(values).asarray(order)
    for start, end in itertools.pairwise([0, *ends]):
        chosen = order_there[start:end]
        values[places[chosen]] += added[chosen]
