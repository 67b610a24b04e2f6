"""Collectives of a group as programs call them: all-reduce, and those that move parts."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, overload

import numpy as np

from mpistrat import nests
from mpistrat.arrays import Array, Device, is_on_host, place
from mpistrat.collectives.autograd import apply_to_tensors, has_tensors
from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.collectives.nest_reductions import (
    PendingReduction,
    leaf_arrays,
    like_leaf,
    start_all_reduce_nest,
)
from mpistrat.collectives.objects import as_text, from_text
from mpistrat.collectives.operations import Operation
from mpistrat.collectives.operations.all_gather import AllGather
from mpistrat.collectives.operations.all_reduce import all_reduce
from mpistrat.collectives.operations.all_to_all import AllToAll
from mpistrat.collectives.operations.broadcast import Broadcast, FromRoot
from mpistrat.collectives.operations.reduce_scatter import ReduceScatter
from mpistrat.collectives.operations.scan import Scan
from mpistrat.collectives.operations.scatter import Scatter
from mpistrat.collectives.operations.shift import Shift
from mpistrat.collectives.reduction import dtype_name
from mpistrat.comm.wire import named_dtype
from mpistrat.options import CommunicationOptions, ReduceOp, ReduceOpLike
from mpistrat.pytorch import is_loaded, is_tensor, needs_graph, tensor_of_zeros
from mpistrat.system.callsite import call_site
from mpistrat.values import IndexedSlices, Number, T, localize


class GroupCollectives(ABC):
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

    @abstractmethod
    def _group(self) -> Collectives:
        """Return the collectives of the group, if it may be used here."""

    @overload
    def all_gather(
        self, value: Array, axis: int, options: CommunicationOptions | None = None
    ) -> Array: ...

    @overload
    def all_gather(self, value: T, axis: int, options: CommunicationOptions | None = None) -> T: ...

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate `value` over replicas along `axis`, in rank order.

        **Collective**: every replica makes the call, with the same structure, dtypes and axis.

        Parameters
        ----------
        value : nest of arrays and PyTorch tensors
            Shapes may differ along `axis` only; its length may be 0. Tensors come back attached
            to the graph.
        axis : int
            May be negative.
        options : CommunicationOptions, optional

        Returns
        -------
        nest
            As `value`, the same on every replica.

        Raises
        ------
        ContextError
            If this replica context is not the current one.
        ValueError
            On every replica, if a value is 0-d, the axis is out of range, or shapes differ
            elsewhere.
        NotImplementedError
            For `IndexedSlices`.
        """
        return self._apply(
            "all_gather", value, options, lambda _: AllGather.parse("all_gather", axis)
        )

    def reduce_scatter(
        self,
        reduce_op: ReduceOpLike,
        value: T,
        axis: int = 0,
        options: CommunicationOptions | None = None,
    ) -> T:
        """Reduce `value` over replicas, and return this replica's part of the result.

        **Collective**, with the same reduction, structure, shapes, dtypes and axis everywhere.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            As for `all_reduce`. Tensors that require a gradient take SUM and MEAN.
        value : nest of arrays and tensors
        axis : int
            Along it the first ``length % N`` replicas get one element more. Parts may be empty.
        options : CommunicationOptions, optional
            With `deterministic`, the bits are those of `all_reduce`.

        Raises
        ------
        ValueError, TypeError
            On every replica, for a value that is 0-d or an axis out of range.
        CollectiveError
            If the replicas disagree.
        """
        return self._apply(
            "reduce_scatter", value, options, lambda _: ReduceScatter.parse(reduce_op, axis)
        )

    def all_to_all(
        self,
        value: T,
        split_axis: int = 0,
        concat_axis: int = 0,
        options: CommunicationOptions | None = None,
    ) -> T:
        """Send part k of `value` to replica k, and join the parts that come in replica order.

        **Collective**, with the same structure, dtypes and axes everywhere.

        Parameters
        ----------
        value : nest of arrays and tensors
            Shapes may differ along `concat_axis` only.
        split_axis : int
            Cut so that the first ``length % N`` parts hold one element more.
        concat_axis : int
        options : CommunicationOptions, optional

        Raises
        ------
        ValueError, TypeError
            On every replica, for a value that is 0-d or an axis out of range.
        CollectiveMismatchError
            On every replica, if shapes differ along other axes than `concat_axis`: it names the
            replicas and their shapes, and is a `ValueError` too.
        CollectiveError
            If the replicas disagree.
        """
        return self._apply(
            "all_to_all", value, options, lambda _: AllToAll.parse(split_axis, concat_axis)
        )

    def broadcast(
        self, value: Any, root: int = 0, options: CommunicationOptions | None = None
    ) -> Any:
        """Return the `value` of replica `root` on every replica.

        **Collective**, with the same root everywhere.

        Parameters
        ----------
        value : nest of arrays, numbers and tensors
            Replicas other than `root` may give ``None``, or a value of the same structure, shapes
            and dtypes.
        root : int
        options : CommunicationOptions, optional

        Raises
        ------
        TypeError, ValueError
            If `root` is not an integer or is out of range, or if its value is ``None``.
        CollectiveError
            If the replicas disagree.
        """
        return self._apply("broadcast", value, options, lambda size: Broadcast.parse(root, size))

    def scatter(
        self, value: Any, root: int = 0, options: CommunicationOptions | None = None
    ) -> Any:
        """Return this replica's part along axis 0 of the `value` of replica `root`.

        **Collective**, with the same root everywhere.

        Parameters
        ----------
        value : nest of arrays and tensors
            As for `broadcast`. The first ``length % N`` replicas get one row more.
        root : int
        options : CommunicationOptions, optional

        Raises
        ------
        TypeError, ValueError, CollectiveError
            As `broadcast`; and if a value is 0-d.
        """
        return self._apply("scatter", value, options, lambda size: Scatter.parse(root, size))

    def shift(
        self,
        value: T,
        offset: int = 1,
        periodic: bool = False,
        fill: complex = 0,
        options: CommunicationOptions | None = None,
    ) -> T:
        """Return the `value` of the replica `offset` before this one, as NumPy's roll moves.

        **Collective**, with the same structure, shapes, dtypes, offset, `periodic` and `fill`.

        Parameters
        ----------
        value : nest of arrays, numbers and tensors
        offset : int
            Any: negative ones bring values of replicas behind.
        periodic : bool
            Whether the first replica follows the last.
        fill : number
            What stands where there is no such replica, in the shape of the own value.
        options : CommunicationOptions, optional

        Raises
        ------
        TypeError
            On every replica, if an argument is of another kind.
        CollectiveError
            If the replicas disagree.
        """
        return self._apply("shift", value, options, lambda _: Shift.parse(offset, periodic, fill))

    def scan(
        self,
        reduce_op: ReduceOpLike,
        value: T,
        exclusive: bool = False,
        options: CommunicationOptions | None = None,
    ) -> T:
        """Reduce `value` over the replicas up to this one, in their order.

        **Collective**, with the same reduction, structure, shapes, dtypes and `exclusive`.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            Not MEAN. Tensors that require a gradient take SUM.
        value : nest of arrays, numbers and tensors
        exclusive : bool
            Whether this replica is left out. The first one then gets what changes nothing: 0 for
            SUM, 1 for PROD, the largest or least number of the dtype for MIN and MAX.
        options : CommunicationOptions, optional

        Raises
        ------
        ValueError, TypeError
            On every replica, for MEAN, or a dtype that the reduction does not know.
        CollectiveError
            If the replicas disagree.
        """
        return self._apply("scan", value, options, lambda _: Scan.parse(reduce_op, exclusive))

    def _apply(
        self,
        kind: str,
        value: T,
        options: CommunicationOptions | None,
        make: Callable[[int], Operation],
    ) -> T:
        """Apply the operation that `make` returns for the number of replicas."""
        collectives = self._group()
        with collectives.call(kind, options=options) as call:
            operation, nest = make(collectives.size), localize(value)
            if isinstance(operation, FromRoot):
                nest = _as_root(call, nest, operation, collectives.device)
            result: T
            if has_tensors(nest):
                result = _apply_to_tensors(call, operation, nest, collectives, options)
            else:
                result = apply_to_nest(call, operation, nest)
            return result


def _apply_to_tensors(
    call: CollectiveCall,
    operation: Operation,
    nest: Any,
    collectives: Collectives,
    options: CommunicationOptions | None,
) -> Any:
    """Do `apply_to_nest` on a nest with tensors. **Collective**, and so is the backward pass."""
    leaves, _ = nests.flatten(nest)
    tensors = {i: leaf for i, leaf in enumerate(leaves) if is_tensor(leaf)}
    if not operation.has_gradient and any(map(needs_graph, tensors.values())):
        raise NotImplementedError(
            f"{call.kind} has gradients for reductions that add up only. Give tensor.detach(), or "
            "reduce by SUM."
        )
    floating = [i for i, leaf in tensors.items() if leaf.is_floating_point() or leaf.is_complex()]
    return apply_to_tensors(
        call,
        collectives,
        options,
        nest,
        lambda arrays: apply_to_nest(call, operation, arrays),
        lambda again, values, results, gradients: operation.backward(again, floating, gradients),
    )


def apply_to_nest(call: CollectiveCall, operation: Operation, nest: Any) -> Any:
    """Apply `operation` to each leaf of a nest without tensors. **Collective**."""
    leaves, structure = nests.flatten(nest)
    arrays = _dense_arrays(call, leaves, structure, operation)
    results = operation.forward(call, arrays, nests.signature(structure))
    return nests.unflatten(
        structure, [like_leaf(*pair) for pair in zip(leaves, results, strict=True)]
    )


def _dense_arrays(
    call: CollectiveCall, leaves: Sequence[Any], structure: nests.Structure, operation: Operation
) -> list[Array]:
    """Return the leaves of a nest as arrays."""
    if any(isinstance(leaf, IndexedSlices) for leaf in leaves):
        does, do = operation.verbs
        raise NotImplementedError(
            f"{call.kind} {does} dense arrays, but the value is IndexedSlices. {do} its values and "
            "its indices, or add it into a dense array first."
        )
    return leaf_arrays(call, leaves, structure)


def _as_root(call: CollectiveCall, nest: Any, operation: FromRoot, device: Device) -> Any:
    """Return `nest`, or zeros like that of the root where it is ``None``. **Collective**."""
    is_root = call.channel.rank == operation.root
    if nest is None and is_root:
        raise TypeError(
            f"{call.kind}: the value is None on the root, {call.channel.place()}. Give what "
            "the others shall get."
        )
    own = None if nest is None else _describe(call, nest, operation)
    skeleton = _skeleton(call.kind, nest) if is_root else None
    # First on the root only: ranks that pass None know neither structure nor shapes before the
    # exchange, and cannot compare them.
    call.agree(f"from rank {operation.root}")
    with call.moving():
        (given, text) = call.channel.exchange((own, skeleton))[operation.root]
    # Tuples, which can be hashed, in place of JSON's lists.
    compared = own if own is not None else given
    # Ranks that passed None compare what the root has sent, so only one that passed something else
    # disagrees.
    call.agree(compared["structure"], tuple((d, tuple(s)) for _, d, s, _ in compared["leaves"]))
    if nest is not None:
        return nest
    stand_ins = [_stand_in(device, *leaf) for leaf in given["leaves"]]
    return nests.map_nest(lambda number: stand_ins[number], from_text(text))


def _describe(call: CollectiveCall, nest: Any, operation: FromRoot) -> dict[str, Any]:
    """Return the structure of a nest, and of each leaf its form, dtype and shape, as JSON."""
    leaves, structure = nests.flatten(nest)
    arrays = _dense_arrays(call, leaves, structure, operation)
    operation.check(call, arrays)
    described = []
    for leaf, array in zip(leaves, arrays, strict=True):
        form, is_in_graph = "host" if is_on_host(array) else "device", False
        if is_loaded() and is_tensor(leaf):
            form, is_in_graph = f"{leaf.dtype} on {leaf.device.type}", needs_graph(leaf)
        elif not hasattr(leaf, "shape"):
            form = "number"
        described.append((form, dtype_name(array.dtype), list(array.shape), is_in_graph))
    return {"structure": nests.signature(structure), "leaves": described}


def _skeleton(kind: str, nest: Any) -> str:
    """Return a nest with numbers in place of its leaves, as text."""
    leaves, structure = nests.flatten(nest)
    return as_text(kind, nests.unflatten(structure, range(len(leaves))))


def _stand_in(own: Device, form: str, dtype: str, shape: list[int], is_in_graph: bool) -> Any:
    """Return zeros of the form of a leaf on the root."""
    if form.startswith("torch."):
        name, _, device = form.partition(" on ")
        return tensor_of_zeros(shape, name, device, is_in_graph)
    zeros = np.zeros(shape, named_dtype(dtype))
    if form == "number":
        return zeros[()]
    return place(zeros, own) if form == "device" else zeros
