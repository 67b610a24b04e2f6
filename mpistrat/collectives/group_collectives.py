"""Collectives of a group as programs call them: all-reduce, and those that move parts."""

from __future__ import annotations

import functools
from typing import Any, overload

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.all_reduce import all_reduce
from mpistrat.collectives.nested import PendingReduction, start_all_reduce_nest
from mpistrat.collectives.replica_moves import ReplicaMoves
from mpistrat.options import CommunicationOptions, ReduceOp, ReduceOpLike
from mpistrat.system.callsite import call_site
from mpistrat.values import Number, T, localize


class GroupCollectives(ReplicaMoves):
    """The collectives of `ReplicaContext` and of `ReplicaContext.shards`.

    They speak of replicas: of the members of the group.
    """

    @overload
    def all_reduce(
        self,
        reduce_op: ReduceOpLike,
        value: Number,
        options: CommunicationOptions | None = None,
        out: None = None,
    ) -> np.number[Any]: ...

    @overload
    def all_reduce(
        self,
        reduce_op: ReduceOpLike,
        value: Array,
        options: CommunicationOptions | None = None,
        out: Array | None = None,
    ) -> Array: ...

    @overload
    def all_reduce(
        self,
        reduce_op: ReduceOpLike,
        value: T,
        options: CommunicationOptions | None = None,
        out: T | None = None,
    ) -> T: ...

    def all_reduce(
        self,
        reduce_op: ReduceOpLike,
        value: Any,
        options: CommunicationOptions | None = None,
        out: Any = None,
    ) -> Any:
        """Reduce `value` over replicas; every replica gets the result.

        **Collective**, with the same reduction, structure, shapes and dtypes on every replica.

        Parameters
        ----------
        reduce_op : ReduceOp or str
        value : nest of arrays, numbers, IndexedSlices and PyTorch tensors
            Small arrays travel together. `IndexedSlices` are concatenated in rank order. Tensors
            come back attached to the graph, which can be differentiated once. The backward pass
            is collective too: every replica runs it, through the same calls in the same order.
        options : CommunicationOptions, optional
        out : nest of arrays, optional
            Where the results go: arrays of their shapes and dtypes, or `value` itself, which is
            fastest for large arrays. Ranks may differ in it. Not for tensors and IndexedSlices.

        Returns
        -------
        nest
            `out`, or as `value`, on the same device. MEAN of integers is float64.

        Raises
        ------
        ContextError
            If this replica context is not the current one.
        ValueError, TypeError
            For a bad argument, such as an `out` that the result does not fit.
        CollectiveError
            If the replicas disagree.
        """
        return all_reduce(self._group(), reduce_op, value, options, out)

    @overload
    def start_all_reduce(
        self, reduce_op: ReduceOpLike, value: Number, options: CommunicationOptions | None = None
    ) -> PendingReduction[np.number[Any]]: ...

    @overload
    def start_all_reduce(
        self, reduce_op: ReduceOpLike, value: Array, options: CommunicationOptions | None = None
    ) -> PendingReduction[Array]: ...

    @overload
    def start_all_reduce(
        self, reduce_op: ReduceOpLike, value: T, options: CommunicationOptions | None = None
    ) -> PendingReduction[T]: ...

    def start_all_reduce(
        self,
        reduce_op: ReduceOpLike,
        value: Any,
        options: CommunicationOptions | None = None,
    ) -> PendingReduction[Any]:
        """Begin `all_reduce`, and return at once.

        **Collective**: every replica makes the call. Several reductions may be under way, other
        collectives may come between, and handles may be waited for in any order.

        Parameters
        ----------
        reduce_op, value, options
            As for `all_reduce`. Arrays are copied, so they may be written to at once. PyTorch
            tensors, such as the ``.grad`` of a parameter, are reduced in place: ``wait()`` writes
            to them and returns them. They must have no ``requires_grad``. `IndexedSlices` are
            reduced before this returns, and everything is with the option `wire_dtype` and, over
            several nodes, `deterministic`.

        Returns
        -------
        PendingReduction
            Its ``wait()`` gives the result. To drop it without is an error, which the next
            collective of this rank raises. With ``elastic=True``, ``run`` raises `ValueError` where
            it ends before that call.

        Raises
        ------
        ContextError, ValueError, TypeError, CollectiveError, NotImplementedError
            As `all_reduce`, the last for tensors with ``requires_grad``.
        """
        group = self._group()
        with group.call("start_all_reduce", options=options) as call:
            op, nest = ReduceOp.parse(reduce_op), localize(value)
            end = start_all_reduce_nest(call, op, nest)
            site = call_site()
            when_dropped = functools.partial(call.channel.close_for_dropped, site)
        pending = PendingReduction(end, when_dropped)
        group.at_end(functools.partial(pending._check_ended, site))
        return pending
