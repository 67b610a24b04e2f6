"""Collectives of a group as programs call them: all-reduce, and operations that move parts."""

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

    Here, replicas are the members of the group.
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
            The reduction, such as ``"sum"``.
        value : nest of arrays, numbers, IndexedSlices and PyTorch tensors
            The values of this replica. Small arrays are sent together. `IndexedSlices` are
            concatenated in rank order. The results of tensors are attached to the graph, which can
            be differentiated once. The backward pass is collective too: every replica runs it,
            through the same calls in the same order.
        options : CommunicationOptions, optional
            Options of this call. Default: the strategy's options.
        out : nest of arrays, optional
            Arrays for the results, of their shapes and dtypes, or `value` itself, which is fastest
            for large arrays. Ranks may pass different ones. Not for tensors and IndexedSlices.
            Default: new arrays.

        Returns
        -------
        nest
            `out`, or the results in the structure of `value`, on the same device. MEAN of integers
            is float64.

        Raises
        ------
        ContextError
            If this replica context is not the current one.
        ValueError, TypeError
            If an argument is invalid, such as an `out` that the result does not fit.
        NotImplementedError
            For `IndexedSlices` with another reduction than SUM and MEAN.
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

        **Collective**: every replica makes the call. Several reductions may be pending, other
        collectives may be called in between, and handles may be waited for in any order.

        Parameters
        ----------
        reduce_op, value, options
            The same as for `all_reduce`. Arrays are copied, so the program may write to them at
            once. PyTorch tensors, such as the ``.grad`` of a parameter, are reduced in place:
            ``wait()`` writes to them and returns them. They must not have ``requires_grad``.
            `IndexedSlices` are reduced before this returns. With the option `wire_dtype`, or with
            `deterministic` over several nodes, so is everything else.

        Returns
        -------
        PendingReduction
            Handle whose ``wait()`` returns the result. Dropping it without ``wait()`` is an error,
            which the next collective of this rank raises. With ``elastic=True``, ``run`` raises
            `ValueError` if it ends before ``wait()``.

        Raises
        ------
        ContextError, ValueError, TypeError, CollectiveError, NotImplementedError
            In the same cases as `all_reduce`; NotImplementedError for tensors with
            ``requires_grad``.
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
            Values of this replica. Shapes may differ only along `axis`, where the length may be 0.
            The results of tensors are attached to the graph.
        axis : int
            Axis along which the values are concatenated, the same on every replica; may be
            negative.
        options : CommunicationOptions, optional
            Options of this call. Default: the strategy's options.

        Returns
        -------
        nest
            The results in the structure of `value`, the same on every replica.

        Raises
        ------
        ContextError
            If this replica context is not the current one.
        ValueError
            On every replica, if a value is 0-d, the axis is out of range, or shapes differ along
            other axes.
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
            The reduction, as for `all_reduce`. Tensors that require a gradient support SUM and
            MEAN.
        value : nest of arrays and tensors
            Values of this replica, of the same shape and dtype on every replica.
        axis : int
            Axis along which the result is divided. The first ``length % N`` replicas get one
            element more. Parts may be empty.
        options : CommunicationOptions, optional
            Options of this call. Default: the strategy's options. With `deterministic`, the result
            has the same bits as `all_reduce`.

        Returns
        -------
        nest
            This replica's part of each result, in the structure of `value`.

        Raises
        ------
        ValueError, TypeError
            On every replica, if a value is 0-d or the axis is out of range.
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
        """Send part k of `value` to replica k, and join the received parts in replica order.

        **Collective**, with the same structure, dtypes and axes everywhere.

        Parameters
        ----------
        value : nest of arrays and tensors
            Values of this replica. Shapes may differ only along `concat_axis`.
        split_axis : int
            Axis along which the array is cut into one part per replica. The first ``length % N``
            parts have one element more.
        concat_axis : int
            Axis along which the received parts are joined.
        options : CommunicationOptions, optional
            Options of this call. Default: the strategy's options.

        Returns
        -------
        nest
            The joined parts, in the structure of `value`.

        Raises
        ------
        ValueError, TypeError
            On every replica, if a value is 0-d or an axis is out of range.
        CollectiveMismatchError
            On every replica, if shapes differ along other axes than `concat_axis`. The error names
            the replicas and their shapes, and is a `ValueError` too.
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
            The value to send. Replicas other than `root` may pass ``None``, or a value of the same
            structure, shapes and dtypes.
        root : int
            The replica whose value is sent, the same everywhere.
        options : CommunicationOptions, optional
            Options of this call. Default: the strategy's options.

        Returns
        -------
        nest
            A copy of the root's value.

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
            The value to divide, as for `broadcast`. The first ``length % N`` replicas get one row
            more.
        root : int
            The replica whose value is divided, the same everywhere.
        options : CommunicationOptions, optional
            Options of this call. Default: the strategy's options.

        Returns
        -------
        nest
            This replica's rows of each array.

        Raises
        ------
        TypeError, ValueError, CollectiveError
            In the same cases as `broadcast`, and if a value is 0-d.
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
        """Return the `value` of the replica `offset` before this one.

        With ``periodic=True`` this works like NumPy's roll.

        **Collective**, with the same structure, shapes, dtypes, offset, `periodic` and `fill`.

        Parameters
        ----------
        value : nest of arrays, numbers and tensors
            The value of this replica.
        offset : int
            By how many replicas values move. It may be negative: the values of later replicas then
            move to earlier ones.
        periodic : bool
            Whether the first replica follows the last.
        fill : number
            Value of the elements if there is no such replica, in the shape of this replica's value.
        options : CommunicationOptions, optional
            Options of this call. Default: the strategy's options.

        Returns
        -------
        nest
            The value of the other replica, or `fill`.

        Raises
        ------
        TypeError, ValueError
            On every replica, if an argument has the wrong type, or `fill` does not fit the dtype.
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
            The reduction; not MEAN. Tensors that require a gradient support SUM.
        value : nest of arrays, numbers and tensors
            The value of this replica.
        exclusive : bool
            Whether this replica's own value is left out. The first replica then gets the identity
            of the reduction: 0 for SUM, 1 for PROD, and for MIN and MAX the largest or smallest
            number of the dtype, of floats infinity.
        options : CommunicationOptions, optional
            Options of this call. Default: the strategy's options.

        Returns
        -------
        nest
            The reduced values, in the structure of `value`.

        Raises
        ------
        ValueError, TypeError
            On every replica, for MEAN, or if the reduction does not support the dtype.
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
            f"{call.kind} has gradients for reductions that add up only. Pass tensor.detach(), or "
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
    """Return `nest`, or zeros like the root's nest if it is ``None``. **Collective**."""
    is_root = call.channel.rank == operation.root
    if nest is None and is_root:
        raise TypeError(
            f"{call.kind}: the value is None on the root, {call.channel.place()}. Pass the value "
            "that the root sends to the other ranks."
        )
    own = None if nest is None else _describe(call, nest, operation)
    skeleton = _skeleton(call.kind, nest) if is_root else None
    # First only the root: ranks that pass None know neither structure nor shapes before the
    # exchange, and cannot compare them.
    call.agree(f"from rank {operation.root}")
    with call.moving():
        (given, text) = call.channel.exchange((own, skeleton))[operation.root]
    # Tuples can be hashed, unlike JSON's lists.
    compared = own if own is not None else given
    # Ranks that passed None compare the description that the root has sent, so only a rank that
    # passed something different disagrees.
    call.agree(compared["structure"], tuple((d, tuple(s)) for _, d, s, _ in compared["leaves"]))
    if nest is not None:
        return nest
    stand_ins = [_stand_in(device, *leaf) for leaf in given["leaves"]]
    return nests.map_nest(lambda number: stand_ins[number], from_text(text))


def _describe(call: CollectiveCall, nest: Any, operation: FromRoot) -> dict[str, Any]:
    """Return as JSON the structure of a nest, and the form, dtype and shape of each leaf."""
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
    """Return a nest with numbers in place of its leaves, as a string."""
    leaves, structure = nests.flatten(nest)
    return as_text(kind, nests.unflatten(structure, range(len(leaves))))


def _stand_in(own: Device, form: str, dtype: str, shape: list[int], is_in_graph: bool) -> Any:
    """Return zeros of the same form as a leaf on the root."""
    if form.startswith("torch."):
        name, _, device = form.partition(" on ")
        return tensor_of_zeros(shape, name, device, is_in_graph)
    zeros = np.zeros(shape, named_dtype(dtype))
    if form == "number":
        return zeros[()]
    return place(zeros, own) if form == "device" else zeros
