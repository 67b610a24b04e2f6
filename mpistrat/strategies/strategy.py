"""Strategy, the public interface of a group of replicas."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from mpistrat import context
from mpistrat.arrays import Array
from mpistrat.errors import warn_deprecated
from mpistrat.options import InputOptions, InputReplicationMode, ReduceOpLike, RunOptions
from mpistrat.strategies.cluster import ClusterMember
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.strategies.extended_v1 import InputIterator
from mpistrat.strategies.logical_devices import LogicalDevices
from mpistrat.strategies.plain_names import PlainNames
from mpistrat.strategies.reductions import warn_of_empty_parts
from mpistrat.strategies.replica_arguments import explained_call
from mpistrat.user_warnings import empty_parts, whole_batches
from mpistrat.values import DistributedValues, Number, PerReplica, T
from mpistrat.variables import Variable

if TYPE_CHECKING:
    from mpistrat.data.dataset import Dataset
    from mpistrat.data.distributed_dataset import DistributedDataset
    from mpistrat.data.iterators import ElementIterator
    from mpistrat.options import InputContext, ValueContext

ValueT = TypeVar("ValueT", bound="np.ndarray | Number")


class Strategy(PlainNames, LogicalDevices, ClusterMember):
    """State and computation distributed over replicas.

    Make one of its subclasses: `MPIStrategy`, or `OneDeviceStrategy` for one replica without
    MPI.

    Examples
    --------
    >>> isinstance(ms.get_strategy(), ms.Strategy)
    True
    """

    def __init__(self, extended: StrategyExtended) -> None:
        self._extended = extended
        extended._container = self

    @property
    def extended(self) -> StrategyExtended:
        """What algorithms need that know about distribution. Local."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients are reduced together. Local."""
        return self._extended._layout.num_replicas

    def close(self) -> None:
        """Free communicators, descriptors, threads and shared memory that no other strategy uses.

        **Collective**. Strategies on one communicator share these, and the last one frees them.
        What needs the strategy afterwards raises `RuntimeError`; mirrored variables can still be
        read. After a `CollectiveError` the end of the program frees them. A second call does
        nothing.
        """
        context.note_closed(self)
        self._extended._close()

    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """Make this strategy current, in cross-replica context, within the ``with`` block.

        Variables made inside are distributed. A scope may be entered again, inside itself too.
        **Local**: entering and leaving cost nothing and wait for nobody.

        Raises
        ------
        ContextError
            On entry, inside `run` or inside the scope of another strategy.
        """
        return context.Scope(self)

    @overload
    def run(
        self,
        fn: Callable[..., None],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> None: ...

    @overload
    def run(
        self,
        fn: Callable[..., ValueT],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> PerReplica[ValueT]: ...

    @overload
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any: ...

    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> Any:
        """Call `fn` once on each replica, in replica context.

        **Collective**: every rank makes the call, but nothing is exchanged by it.

        Parameters
        ----------
        fn : callable
            Called with this replica's component of every distributed value in `args` and
            `kwargs`, nests included. Variables arrive as themselves.
        args, kwargs : sequence, mapping
        options : RunOptions, optional

        Returns
        -------
        nest
            What `fn` returns, with a `PerReplica` for each array or number.

        Raises
        ------
        ValueError
            If `args` is neither a list nor a tuple, or `kwargs` no mapping.
        ContextError
            Inside a replica function, or inside the scope of another strategy.
        """
        if not isinstance(args, list | tuple):
            raise ValueError(
                f"run: args must be a list or tuple of the arguments, not {args!r} of type "
                f"{type(args).__name__}. For one argument write args=(value,)."
            )
        if kwargs is not None and not isinstance(kwargs, Mapping):
            raise ValueError(
                f"run: kwargs must be a dict of the keyword arguments, not {kwargs!r}."
            )
        if options is not None and not isinstance(options, RunOptions):
            raise TypeError(f"run: options must be RunOptions, not {options!r}.")
        if whole_batches.latest and self.num_replicas_in_sync > 1:
            whole_batches.warn_if_whole((args, kwargs))
        try:
            return self._extended.call_for_each_replica(fn, args, kwargs)
        except TypeError as error:
            explained = explained_call(error, fn, args, kwargs or {})
            if explained is error:
                raise
            raise explained from None

    @overload
    def reduce(
        self,
        reduce_op: ReduceOpLike,
        value: DistributedValues[Number] | Number,
        axis: None = None,
    ) -> np.number[Any]: ...

    @overload
    def reduce(
        self,
        reduce_op: ReduceOpLike,
        value: DistributedValues[Array] | Array | Variable,
        axis: int | tuple[int, ...] | None = None,
    ) -> npt.NDArray[Any]: ...

    @overload
    def reduce(
        self, reduce_op: ReduceOpLike, value: Any, axis: int | tuple[int, ...] | None = None
    ) -> Any: ...

    def reduce(
        self, reduce_op: ReduceOpLike, value: Any, axis: int | tuple[int, ...] | None = None
    ) -> Any:
        """Reduce `value` over replicas, and over `axis` where given, to host memory.

        **Collective**: every rank makes the call, with the same reduction, axis, structure,
        dtypes and reduced shapes.

        Parameters
        ----------
        reduce_op : ReduceOp or str
        value : nest of PerReplica, Mirrored, arrays or numbers
            A plain array or number is this rank's component.
        axis : int or tuple of int, optional
            Axes of each component to reduce over too, typically the batch axis 0. Every element
            counts alike, so a short last batch weighs right.

        Returns
        -------
        nest of numpy.ndarray or NumPy scalars
            The same on every rank. MEAN of integers is float64, else the dtype is kept.

        Raises
        ------
        ContextError
            Inside a replica function.
        ValueError, TypeError
            For a bad argument, or SUM or PROD of a mirrored value.
        CollectiveError
            If the ranks disagree.
        """
        if empty_parts.of_replicas:
            warn_of_empty_parts(self._extended.local_replica_ids, value)
        return self._extended._reduce(reduce_op, value, axis)

    def gather(
        self, value: DistributedValues[Any] | Array | Variable, axis: int
    ) -> npt.NDArray[Any]:
        """Concatenate `value` over replicas along `axis`, in rank order, in host memory.

        **Collective**: every rank makes the call, with the same dtype and axis.

        Parameters
        ----------
        value : PerReplica or array
            Shapes may differ along `axis` only; its length may be 0.
        axis : int
            May be negative.

        Returns
        -------
        numpy.ndarray
            The same on every rank.

        Raises
        ------
        ContextError
            Inside a replica function: use `ReplicaContext.all_gather` there.
        ValueError
            On every rank, if the value is 0-d, the axis is out of range, or shapes differ
            elsewhere.
        NotImplementedError
            For `IndexedSlices`.
        """
        gathered: npt.NDArray[Any] = self._extended._gather(value, axis)
        return gathered

    @overload
    def experimental_local_results(self, value: DistributedValues[T]) -> tuple[T, ...]: ...

    @overload
    def experimental_local_results(self, value: Variable) -> tuple[Array, ...]: ...

    @overload
    def experimental_local_results(self, value: Any) -> tuple[Any, ...]: ...

    def experimental_local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of `value` on this rank: a tuple with one element. Local."""
        return self._extended._local_results(value)

    def experimental_distribute_dataset(
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Return `dataset` with each global batch split over the replicas.

        **Collective**.

        Raises
        ------
        ValueError
            If the data set was not batched.
        DataError
            On every rank, if its files do not fit.
        """
        return self._extended._distribute_dataset(dataset, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Dataset],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Return the data sets that `dataset_fn` makes on each rank, as one distributed one.

        **Collective**. The data sets are batched per replica, and may differ in length.
        """
        return self._extended._distribute_from_function(dataset_fn, options)

    @overload
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], ValueT]
    ) -> PerReplica[ValueT]: ...

    @overload
    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any: ...

    def experimental_distribute_values_from_function(
        self, value_fn: Callable[[ValueContext], Any]
    ) -> Any:
        """Return ``value_fn(context)`` with each leaf of the nest as a `PerReplica`. Local."""
        return self._extended._values_from_function(value_fn)

    # Names that are deprecated, and names that steer graphs and sessions.

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """Return `experimental_local_results`. Deprecated. Local."""
        warn_deprecated("unwrap", "Use experimental_local_results.")
        return self.experimental_local_results(value)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: None = None) -> Dataset:
        """Return a data set of the examples along the first axis of a nest of arrays. Local."""
        return self.extended.experimental_make_numpy_dataset(numpy_input, session)

    def colocate_vars_with(
        self, colocate_with_variable: Variable | tuple[str, ...]
    ) -> contextlib.AbstractContextManager[None]:
        """Return `StrategyExtended.colocate_vars_with`. Deprecated. Local."""
        warn_deprecated("Strategy.colocate_vars_with", "Use extended.colocate_vars_with.")
        return self.extended.colocate_vars_with(colocate_with_variable)

    def make_dataset_iterator(self, dataset: Dataset) -> InputIterator:
        """Return an iterator over the distributed data set. Deprecated. **Collective**."""
        warn_deprecated("make_dataset_iterator", "Use iter(experimental_distribute_dataset(...)).")
        context.require_cross_replica(self, "make_dataset_iterator")
        return InputIterator(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Dataset],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """Return an iterator over the data sets of `input_fn`. Deprecated. **Collective**.

        Raises
        ------
        ValueError
            For another replication mode than PER_WORKER.
        """
        warn_deprecated("make_input_fn_iterator", "Use distribute_datasets_from_function.")
        context.require_cross_replica(self, "make_input_fn_iterator")
        if replication_mode is not InputReplicationMode.PER_WORKER:
            raise ValueError(
                f"make_input_fn_iterator: the replication mode {replication_mode!r} is not "
                "supported. Use InputReplicationMode.PER_WORKER."
            )
        return InputIterator(self.distribute_datasets_from_function(input_fn))

    def experimental_run(
        self, fn: Callable[..., Any], input_iterator: InputIterator | ElementIterator | None = None
    ) -> Any:
        """Run `fn` on the next element of `input_iterator`. Deprecated.

        **Collective**: every rank makes the call.
        """
        warn_deprecated("experimental_run", "Use run(fn, args=(next(iterator),)).")
        context.require_cross_replica(self, "experimental_run")
        return self.run(fn, args=() if input_iterator is None else (input_iterator.get_next(),))

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Dataset],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Return `distribute_datasets_from_function`. Deprecated. **Collective**."""
        warn_deprecated(
            "experimental_distribute_datasets_from_function",
            "Use distribute_datasets_from_function.",
        )
        return self.distribute_datasets_from_function(dataset_fn, options)

    def __copy__(self) -> Strategy:
        raise RuntimeError(
            f"{type(self).__name__} cannot be copied shallowly: two strategies would share their "
            "state. Use copy.deepcopy for a separate one."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Strategy:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        vars(twin).update(vars(self))
        twin._extended = self._extended._copied_for(twin)
        return twin
