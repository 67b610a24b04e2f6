"""Gradients through collectives, for programs that write their own backward pass.

PyTorch tensors need none of this: `ReplicaContext.all_reduce` and `all_gather` return tensors
that are attached to the graph.
"""

from __future__ import annotations

from typing import Any, overload

from mpistrat import context, nests
from mpistrat.arguments import as_array
from mpistrat.arrays import Array
from mpistrat.collectives.operations.all_gather import AllGather
from mpistrat.collectives.operations.all_reduce import pull_back_all_reduce
from mpistrat.errors import ContextError
from mpistrat.options import ReduceOp, ReduceOpLike
from mpistrat.replica import ReplicaContext
from mpistrat.strategies import get_replica_context
from mpistrat.strategies.one_replica import warn_of_one_replica

__all__ = ["all_gather_pullback", "all_reduce_pullback"]


@overload
def all_reduce_pullback(
    reduce_op: ReduceOpLike, value: Array, result: Array, gradient: Array
) -> Array: ...


@overload
def all_reduce_pullback(reduce_op: ReduceOpLike, value: Any, result: Any, gradient: Any) -> Any: ...


def all_reduce_pullback(reduce_op: ReduceOpLike, value: Any, result: Any, gradient: Any) -> Any:
    """Return the gradient with respect to this replica's `value` of an `all_reduce`.

    **Collective**: every replica makes the call, inside `Strategy.run`.

    The loss is the sum of the replicas' losses. For SUM the result is the sum of the replicas'
    gradients, for MEAN their mean. For MIN and MAX the replica with the extremal element gets that
    sum; if several replicas tie, they get equal parts of it. For PROD the sum is multiplied by the
    product of the other replicas' values, even if some are zero.

    Parameters
    ----------
    reduce_op : ReduceOp or str
        The reduction that `all_reduce` did.
    value : nest of arrays
        The value that this replica passed to `all_reduce`.
    result : nest of arrays
        The value that `all_reduce` returned.
    gradient : nest of arrays
        Gradient of this replica's loss with respect to `result`.

    Returns
    -------
    nest of arrays
        The gradient, in the shapes of `value`.

    Raises
    ------
    ContextError
        In cross-replica context. Outside every scope there is one replica, this process: nothing is
        summed over ranks, and a `ScopeWarning` says so if a strategy of several is open.
    ValueError
        If the nests differ in structure, or shapes do not match.
    CollectiveError
        If the replicas disagree.

    Examples
    --------
    >>> def step(x):
    ...     total = ms.get_replica_context().all_reduce("sum", x)
    ...     return ms.gradients.all_reduce_pullback("sum", x, total, 2 * total)
    >>> gradient = strategy.run(step, args=(np.ones(2),))
    """
    replica = _current("all_reduce_pullback")
    with context.replicas_of(replica.strategy).call("all_reduce_pullback") as call:
        op = ReduceOp.parse(reduce_op)
        (values, results, gradients), structure = _flattened(call.kind, value, result, gradient)
        signature = nests.signature(structure)
        pulled = pull_back_all_reduce(call, op, values, results, gradients, signature)
        return nests.unflatten(structure, pulled)


@overload
def all_gather_pullback(value: Array, axis: int, gradient: Array) -> Array: ...


@overload
def all_gather_pullback(value: Any, axis: int, gradient: Any) -> Any: ...


def all_gather_pullback(value: Any, axis: int, gradient: Any) -> Any:
    """Return the gradient with respect to this replica's `value` of an `all_gather`.

    **Collective**: every replica makes the call, inside `Strategy.run`.

    Parameters
    ----------
    value : nest of arrays
        The value that this replica passed to `all_gather`.
    axis : int
        Axis along which the values were concatenated.
    gradient : nest of arrays
        Gradient of this replica's loss with respect to the gathered arrays, in their shapes.

    Returns
    -------
    nest of arrays
        This replica's slice of the sum of all replicas' gradients, in the shapes of `value`.

    Raises
    ------
    ContextError
        In cross-replica context. Outside every scope there is one replica, this process: nothing is
        summed over ranks, and a `ScopeWarning` says so if a strategy of several is open.
    ValueError
        If the nests differ in structure, or shapes do not match.
    CollectiveError
        If the replicas disagree.

    Examples
    --------
    >>> def step(x):
    ...     rows = ms.get_replica_context().all_gather(x, axis=0)
    ...     return ms.gradients.all_gather_pullback(x, 0, np.ones_like(rows)).shape
    >>> strategy.run(step, args=(np.ones((2, 3)),))
    (PerReplica(2), PerReplica(3))
    """
    replica = _current("all_gather_pullback")
    with context.replicas_of(replica.strategy).call("all_gather_pullback") as call:
        (values, gradients), structure = _flattened(call.kind, value, gradient)
        shapes = [each.shape for each in values]
        operation = AllGather.parse(call.kind, axis)
        pulled = operation.pull_back(call, shapes, gradients, nests.signature(structure))
        return nests.unflatten(structure, pulled)


def _current(what: str) -> ReplicaContext:
    replica = get_replica_context()
    if context.current() is None:
        warn_of_one_replica()
    if replica is None:
        raise ContextError(
            f"{what} needs the replica context, but this is the cross-replica context. Call it "
            "inside a function given to strategy.run."
        )
    return replica


def _flattened(kind: str, *given: Any) -> tuple[list[list[Any]], nests.Structure]:
    flat = [nests.flatten(nest) for nest in given]
    structure = flat[0][1]
    for _, other in flat[1:]:
        if other != structure:
            raise ValueError(
                f"{kind}: the nests must have one structure, but one has "
                f"{nests.signature(structure)} and another {nests.signature(other)}."
            )
    return [[as_array(kind, leaf) for leaf in leaves] for leaves, _ in flat], structure
