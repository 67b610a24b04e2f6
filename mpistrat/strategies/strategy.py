"""Strategy, the public interface of a group of replicas."""

from __future__ import annotations

import contextlib
import copy
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np
import numpy.typing as npt

from mpistrat import context, user_warnings
from mpistrat.arguments import as_array, as_integer
from mpistrat.arrays import Array
from mpistrat.collectives import objects
from mpistrat.collectives.collectives import Collectives
from mpistrat.collectives.replica_collectives import GroupCollectives
from mpistrat.errors import warn_deprecated
from mpistrat.layout import Layout
from mpistrat.options import (
    CommunicationOptions,
    InputOptions,
    InputReplicationMode,
    ReduceOpLike,
    RunOptions,
    ValueContext,
)
from mpistrat.pytorch import is_tensor
from mpistrat.strategies.cluster_resolver import ClusterResolver
from mpistrat.strategies.destinations import warn_of_empty_parts
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.strategies.extended_v1 import InputIterator
from mpistrat.system.hints import Hinted
from mpistrat.values import DistributedValues, Number, PerReplica, T, localize
from mpistrat.variables import Variable

if TYPE_CHECKING:
    from mpistrat.data.dataset import Dataset
    from mpistrat.data.distributed_dataset import DistributedDataset
    from mpistrat.data.iterators import ElementIterator
    from mpistrat.options import InputContext


ValueT = TypeVar("ValueT", bound="np.ndarray | Number")


_OF_GRAPHS = frozenset(
    {
        *("colocate_vars_with", "configure", "experimental_distribute_datasets_from_function"),
        *("experimental_make_numpy_dataset", "experimental_run", "group", "make_dataset_iterator"),
        *("make_input_fn_iterator", "unwrap", "update_config_proto"),
    }
)
"""Names that only programs for TensorFlow 1 need. `dir` leaves them out."""


class Strategy(Hinted):
    """State and computation distributed over replicas.

    Create one of its subclasses: `MPIStrategy`, or `OneDeviceStrategy` for one replica without
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
        """The interface for libraries that handle distribution themselves. Local."""
        return self._extended

    @property
    def num_replicas_in_sync(self) -> int:
        """Number of replicas whose gradients are reduced together. Local."""
        return context.layout_of(self).num_replicas

    def close(self) -> None:
        """Free communicators, descriptors, threads and shared memory that no other strategy uses.

        **Collective**. Strategies on the same communicator share these resources; closing the last
        strategy frees them. Using a closed strategy raises `RuntimeError`, but its mirrored
        variables can still be read, except under `CentralStorageStrategy`. After a
        `CollectiveError` the resources are freed when the program ends. A second call does nothing.

        Examples
        --------
        >>> other = ms.MPIStrategy()
        >>> other.close()
        """
        context.note_closed(self)
        self._extended._close()

    def scope(self) -> contextlib.AbstractContextManager[Strategy]:
        """Make this strategy current, in cross-replica context, within the ``with`` block.

        Variables created inside are distributed. A scope may be entered again, even inside itself.
        **Local**: entering and leaving cost nothing and wait for no other rank.

        Returns
        -------
        context manager
            It returns this strategy to ``with ... as``.

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

        **Collective**: every rank makes the call, but `run` itself sends nothing.

        Parameters
        ----------
        fn : callable
            Called with this replica's component of every distributed value in `args` and
            `kwargs`, nests included. Variables are passed unchanged.
        args, kwargs : sequence, mapping
            Positional and keyword arguments of `fn`; `args` is a list or tuple.
        options : RunOptions, optional
            Accepted for compatibility with tf.distribute. Has no effect.

        Returns
        -------
        nest
            The result of `fn`, with a `PerReplica` for each array or number.

        Raises
        ------
        ValueError
            If `args` is neither a list nor a tuple, or `kwargs` is not a mapping.
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
        if user_warnings.latest_batch and self.num_replicas_in_sync > 1:
            user_warnings.warn_if_whole((args, kwargs))
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
        """Reduce `value` over replicas, and over `axis` if given, to host memory.

        **Collective**: every rank makes the call, with the same reduction, axis, structure,
        dtypes and reduced shapes.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            The reduction, such as ``"sum"`` or ``"mean"``.
        value : nest of PerReplica, Mirrored, arrays or numbers
            A plain array or number is this rank's component; with ``num_replicas=`` it raises.
        axis : int or tuple of int, optional
            Axes of each component to reduce over as well, typically the batch axis 0. All elements
            have equal weight, so a shorter last batch is averaged correctly.

        Returns
        -------
        nest of numpy.ndarray or NumPy scalars
            The same on every rank. MEAN of integers is float64; otherwise the dtype is kept.

        Raises
        ------
        ContextError
            Inside a replica function.
        ValueError, TypeError
            For a bad argument, or SUM or PROD of a mirrored value.
        CollectiveError
            If the ranks disagree.
        """
        if user_warnings.empty_parts:
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
            Shapes may differ only along `axis`, where the length may be 0.
        axis : int
            Axis to concatenate along. May be negative.

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
            along other axes.
        NotImplementedError
            For `IndexedSlices`.

        Examples
        --------
        >>> strategy.gather(np.array([strategy.rank]), axis=0).tolist() == [*range(strategy.size)]
        True
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
        """Return the components of `value` on this rank. Local.

        Parameters
        ----------
        value : distributed value, Variable or any other object
            A value without components is returned as the only element.

        Returns
        -------
        tuple
            One component for each replica of this rank: one element by default.

        Examples
        --------
        >>> strategy.experimental_local_results(strategy.run(lambda: 3))
        (3,)
        """
        return self._extended._local_results(value)

    def experimental_distribute_dataset(
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Return `dataset` with each global batch split over the replicas.

        **Collective**: see `distribute_dataset`, which is the same method.

        Parameters
        ----------
        dataset : Dataset
            A batched dataset, the same one on all ranks.
        options : InputOptions, optional
            Where batches are stored.

        Returns
        -------
        DistributedDataset
            Its iterators yield this rank's part of each global batch.

        Raises
        ------
        TypeError, ValueError
            If `dataset` is not a batched `Dataset`, or the policy FILE has too few files.
        DataError
            On every rank, if its files do not match.

        Examples
        --------
        >>> batches = strategy.experimental_distribute_dataset(ms.data.Dataset.range(8).batch(4))
        """
        return self._extended._distribute_dataset(dataset, options)

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Dataset],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Return one distributed dataset, joined from those that `dataset_fn` returns on each rank.

        **Collective**. The datasets are batched per replica, and may differ in length.

        Parameters
        ----------
        dataset_fn : callable
            Called with an `InputContext`, for each replica of this rank. Returns the `Dataset` of
            the replica.
        options : InputOptions, optional
            Where batches are stored.

        Returns
        -------
        DistributedDataset
            Its iterators yield the batches of this rank's dataset.

        Examples
        --------
        >>> def dataset_fn(context):
        ...     return ms.data.Dataset.range(8).batch(context.get_per_replica_batch_size(8))
        >>> batches = strategy.distribute_datasets_from_function(dataset_fn)
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
        """Return ``value_fn(context)`` with each leaf of the nest as a `PerReplica`. Local.

        Parameters
        ----------
        value_fn : callable
            Called with a `ValueContext`, once for each replica of this rank.

        Returns
        -------
        nest of PerReplica
            The values that `value_fn` returned.

        Examples
        --------
        >>> twos = strategy.experimental_distribute_values_from_function(lambda context: 2)
        """
        return self._extended._values_from_function(value_fn)

    # Names that are deprecated, and names that control graphs and sessions in TensorFlow 1.

    def unwrap(self, value: Any) -> tuple[Any, ...]:
        """Return ``experimental_local_results(value)``. Deprecated. Local.

        Parameters
        ----------
        value : distributed value, Variable or any other object
            See `experimental_local_results`.

        Returns
        -------
        tuple
            The components of `value` on this rank.
        """
        warn_deprecated("unwrap", "Use experimental_local_results.")
        return self.experimental_local_results(value)

    def experimental_make_numpy_dataset(self, numpy_input: Any, session: None = None) -> Dataset:
        """Return a dataset of the examples along the first axis of a nest of arrays. Local.

        Parameters
        ----------
        numpy_input : nest of numpy.ndarray
            Arrays of equal length along axis 0.
        session : None
            Must be ``None``: there are no sessions.

        Returns
        -------
        Dataset
            See `StrategyExtended.experimental_make_numpy_dataset`.

        Examples
        --------
        >>> strategy.experimental_make_numpy_dataset(np.zeros((5, 2))).cardinality()
        5
        """
        return self.extended.experimental_make_numpy_dataset(numpy_input, session)

    def colocate_vars_with(
        self, colocate_with_variable: Variable | tuple[str, ...]
    ) -> contextlib.AbstractContextManager[None]:
        """Call `StrategyExtended.colocate_vars_with`. Deprecated. Local.

        Parameters
        ----------
        colocate_with_variable : Variable or tuple of str
            A variable of this strategy, or the result of `StrategyExtended.non_slot_devices`.

        Returns
        -------
        context manager
            It has no effect.
        """
        warn_deprecated("Strategy.colocate_vars_with", "Use extended.colocate_vars_with.")
        return self.extended.colocate_vars_with(colocate_with_variable)

    def make_dataset_iterator(self, dataset: Dataset) -> InputIterator:
        """Return an iterator over the distributed dataset. Deprecated. **Collective**.

        Parameters
        ----------
        dataset : Dataset
            A batched dataset, the same one on all ranks.

        Returns
        -------
        InputIterator
            Iterator over ``experimental_distribute_dataset(dataset)``.
        """
        warn_deprecated("make_dataset_iterator", "Use iter(experimental_distribute_dataset(...)).")
        context.require_cross_replica(self, "make_dataset_iterator")
        return InputIterator(self.experimental_distribute_dataset(dataset))

    def make_input_fn_iterator(
        self,
        input_fn: Callable[[InputContext], Dataset],
        replication_mode: InputReplicationMode = InputReplicationMode.PER_WORKER,
    ) -> InputIterator:
        """Return an iterator over the datasets of `input_fn`. Deprecated. **Collective**.

        Parameters
        ----------
        input_fn : callable
            Called with an `InputContext`. Returns the `Dataset` of this rank.
        replication_mode : InputReplicationMode
            Must be PER_WORKER.

        Returns
        -------
        InputIterator
            Iterator over ``distribute_datasets_from_function(input_fn)``.

        Raises
        ------
        ValueError
            If the replication mode is not PER_WORKER.
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

        Parameters
        ----------
        fn : callable
            Called on each replica with the next element, or without arguments.
        input_iterator : iterator, optional
            Iterator of a distributed dataset.

        Returns
        -------
        nest
            The result of `run`.
        """
        warn_deprecated("experimental_run", "Use run(fn, args=(next(iterator),)).")
        context.require_cross_replica(self, "experimental_run")
        return self.run(fn, args=() if input_iterator is None else (input_iterator.get_next(),))

    def experimental_distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[InputContext], Dataset],
        options: InputOptions | None = None,
    ) -> DistributedDataset:
        """Call `distribute_datasets_from_function`. Deprecated. **Collective**.

        Parameters
        ----------
        dataset_fn, options : callable, InputOptions
            As for `distribute_datasets_from_function`.

        Returns
        -------
        DistributedDataset
            The result of `distribute_datasets_from_function`.
        """
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

    @property
    def xp(self) -> Any:
        """The array namespace of the replica's device: NumPy's or CuPy's. Local."""
        return self._extended.xp

    def distribute_dataset(
        self, dataset: Dataset, options: InputOptions | None = None
    ) -> DistributedDataset:
        """Return `dataset` with each global batch split over the replicas.

        **Collective**. The name in tf.distribute is ``experimental_distribute_dataset``. All ranks
        pass the same dataset; mpistrat compares the contents of arrays passed to
        `Dataset.from_arrays`.

        Parameters
        ----------
        dataset : Dataset
            A batched dataset, the same one on all ranks.
        options : InputOptions, optional
            Where batches are stored.

        Returns
        -------
        DistributedDataset
            Its iterators yield this rank's part of each global batch.

        Raises
        ------
        TypeError, ValueError
            If `dataset` is not a batched `Dataset`, or the policy FILE has too few files.
        DataError
            On every rank, if its files do not match, or the datasets of the ranks differ.
        """
        return self._extended._distribute_dataset(dataset, options)

    def distribute_values_from_function(self, value_fn: Callable[[ValueContext], Any]) -> Any:
        """Return ``value_fn(context)`` with each leaf of the nest as a `PerReplica`. Local.

        The name in tf.distribute is ``experimental_distribute_values_from_function``.

        Parameters
        ----------
        value_fn : callable
            Called with a `ValueContext`, once for each replica of this rank.

        Returns
        -------
        nest of PerReplica
            The values that `value_fn` returned.

        Examples
        --------
        >>> strategy.distribute_values_from_function(lambda context: np.ones(2))
        PerReplica(array([1., 1.]))
        """
        return self._extended._values_from_function(value_fn)

    def local_results(self, value: Any) -> tuple[Any, ...]:
        """Return the components of `value` on this rank. Local.

        The name in tf.distribute is ``experimental_local_results``.

        Parameters
        ----------
        value : distributed value, Variable or any other object
            A value without components is returned as the only element.

        Returns
        -------
        tuple
            One component for each replica of this rank: one element by default.

        Examples
        --------
        >>> strategy.local_results(strategy.run(lambda: 3))
        (3,)
        """
        return self._extended._local_results(value)

    def assert_replicas_agree(self, variables: object) -> None:
        """Check that mirrored variables still hold the same bytes on every rank.

        **Collective**: see `StrategyExtended.assert_replicas_agree`.

        Parameters
        ----------
        variables : Variable, model, optimizer, Checkpoint, or dicts, lists and tuples of them
            The variables to compare, or objects that contain them; the same on all ranks.

        Raises
        ------
        ReplicaDriftError
            On every rank, if a variable differs.

        Examples
        --------
        >>> with strategy.scope():
        ...     weight = ms.Variable(np.zeros(2))
        >>> strategy.assert_replicas_agree(weight)
        """
        self._extended.assert_replicas_agree(variables)

    def all_reduce(
        self, reduce_op: ReduceOpLike, value: Any, options: CommunicationOptions | None = None
    ) -> Any:
        """Reduce `value` over replicas, outside `run`: see `ReplicaContext.all_reduce`.

        **Collective**. `Strategy.reduce` can also reduce over axes, and returns host arrays.

        Parameters
        ----------
        reduce_op : ReduceOp or str
            The reduction, such as ``"sum"`` or ``"mean"``; the same on all ranks.
        value : nest of arrays, numbers, IndexedSlices or PerReplica
            The value of this rank's replica. With ``num_replicas=`` a `PerReplica`.
        options : CommunicationOptions, optional
            Options for this call. Default: those of the strategy.

        Returns
        -------
        nest
            The structure of `value`, on the same device, equal on every rank.

        Raises
        ------
        ContextError
            Inside a replica function: use ``get_replica_context().all_reduce`` there.
        ValueError, TypeError
            For a bad argument.
        CollectiveError
            If the ranks disagree.

        Examples
        --------
        >>> strategy.all_reduce("mean", np.ones(2))
        array([1., 1.])
        """
        return self._as_replicas(
            "all_reduce", value, lambda group, own: group.all_reduce(reduce_op, own, options)
        )[0]

    def all_gather(self, value: Any, axis: int, options: CommunicationOptions | None = None) -> Any:
        """Concatenate `value` over replicas, outside `run`: see `ReplicaContext.all_gather`.

        **Collective**; it raises the errors of `all_reduce` and `gather`.

        Parameters
        ----------
        value : nest of arrays or PerReplica
            The value of this rank's replica, with ``num_replicas=`` a `PerReplica`. Shapes may
            differ only along `axis`.
        axis : int
            Axis to concatenate along.
        options : CommunicationOptions, optional
            Options for this call. Default: those of the strategy.

        Returns
        -------
        nest of arrays
            The values in the order of the replicas, on the same device, equal on every rank.

        Examples
        --------
        >>> len(strategy.all_gather(np.ones(2), axis=0)) == 2 * strategy.size
        True
        """
        return self._as_replicas(
            "all_gather", value, lambda group, own: group.all_gather(own, axis, options)
        )[0]

    def broadcast(
        self, value: Any, root: int = 0, options: CommunicationOptions | None = None
    ) -> Any:
        """Return the `value` of replica `root` on every rank: see `ReplicaContext.broadcast`.

        **Collective**. For Python objects use `broadcast_object`.

        Parameters
        ----------
        value : nest of arrays, numbers or PerReplica
            The contents matter only for replica `root`.
        root : int
            Number of the replica that sends its value; the same on all ranks.
        options : CommunicationOptions, optional
            Options for this call. Default: those of the strategy.

        Returns
        -------
        nest
            The value of replica `root`.

        Examples
        --------
        >>> strategy.broadcast(np.ones(2))
        array([1., 1.])
        """
        return self._as_replicas(
            "broadcast", value, lambda group, own: group.broadcast(own, root, options)
        )[0]

    def scatter(
        self, value: Any, root: int = 0, options: CommunicationOptions | None = None
    ) -> Any:
        """Return this replica's part of the `value` of replica `root`, cut along axis 0.

        **Collective**: see `ReplicaContext.scatter`.

        Parameters
        ----------
        value : nest of arrays or PerReplica
            The contents matter only for replica `root`.
        root : int
            Number of the replica that sends its value; the same on all ranks.
        options : CommunicationOptions, optional
            Options for this call. Default: those of the strategy.

        Returns
        -------
        nest
            This replica's part. With ``num_replicas=`` a `PerReplica`.

        Examples
        --------
        >>> part = strategy.scatter(np.arange(4.0))  # rank 0's array, divided by its first axis
        """
        parts = self._as_replicas(
            "scatter", value, lambda group, own: group.scatter(own, root, options)
        )
        return context.replica_set_of(self).joined(parts)

    def _as_replicas(
        self, kind: str, value: Any, collective: Callable[[_Replicas, Any], Any]
    ) -> list[Any]:
        """Return the result of each replica of this rank. **Collective**."""
        context.require_cross_replica(self, kind)
        group = _Replicas(self)
        results: list[Any] = context.replica_set_of(self).with_components(
            kind, value, lambda own: collective(group, localize(own))
        )
        return results

    # Names that control graphs and sessions in TensorFlow 1.

    def group(self, value: object, name: str | None = None) -> None:
        """Do nothing: `value` is already computed. Has no effect. Local.

        Parameters
        ----------
        value, name : object, str
            Accepted for compatibility with tf.distribute. They have no effect.
        """
        return

    def configure(
        self,
        session_config: object = None,
        cluster_spec: object = None,
        task_type: str | None = None,
        task_id: int | None = None,
    ) -> None:
        """Do nothing: there are no sessions and no servers. Has no effect. Local.

        Parameters
        ----------
        session_config, cluster_spec, task_type, task_id : object
            Accepted for compatibility with tf.distribute. They have no effect.
        """
        return

    def update_config_proto(self, config_proto: Any) -> Any:
        """Return a copy of `config_proto`: there are no sessions. Has no effect. Local.

        Parameters
        ----------
        config_proto : object
            A configuration for TensorFlow.

        Returns
        -------
        object
            An unchanged deep copy.
        """
        return copy.deepcopy(config_proto)

    def __dir__(self) -> list[str]:
        return sorted(set(super().__dir__()) - _OF_GRAPHS)

    def experimental_split_to_logical_devices(
        self, tensor: Any, partition_dimensions: Sequence[int]
    ) -> Any:
        """Return this rank's block of a value that all ranks of the replica hold. Local.

        Parameters
        ----------
        tensor : array, PyTorch tensor or PerReplica
            The whole value, the same on all ranks of the replica.
        partition_dimensions : sequence of int
            Number of blocks along each axis. Their product must be the number of ranks per
            replica. Ranks take the blocks in C order.

        Returns
        -------
        array or tensor
            A view. mpistrat does not split later computations by itself: the program
            communicates, for instance with `ReplicaContext.shards`.

        Raises
        ------
        ValueError
            If the number of axes differs, an axis cannot be divided evenly, or the product is not
            the number of ranks per replica.
        TypeError
            If a number is not an integer.

        Examples
        --------
        >>> strategy.experimental_split_to_logical_devices(np.ones((2, 3)), [1, 1]).shape
        (2, 3)
        """
        kind, layout = "experimental_split_to_logical_devices", context.layout_of(self)
        value = localize(tensor)
        array = value if is_tensor(value) else as_array(kind, value)
        shape = tuple(array.shape)
        dims = [as_integer(f"{kind}: partition_dimensions", each) for each in partition_dimensions]
        if len(dims) != len(shape):
            raise ValueError(
                f"{kind}: the length of partition_dimensions, {len(dims)}, must be the number of "
                f"axes of the value, whose shape is {shape}."
            )
        for axis, (length, number) in enumerate(zip(shape, dims, strict=True)):
            if number < 1 or length % number:
                raise ValueError(
                    f"{kind}: axis {axis} of the shape {shape} is not divisible by "
                    f"partition_dimensions[{axis}], which is {number}. For parts of different "
                    "lengths there is ReplicaContext.shards.scatter."
                )
        if math.prod(dims) != layout.ranks_per_replica:
            raise ValueError(
                f"{kind}: the product of partition_dimensions {dims} must be the number of ranks "
                f"of a replica, {layout.ranks_per_replica}."
            )
        if not dims:
            return array
        block = np.unravel_index(layout.shard, dims)
        steps = [length // number for length, number in zip(shape, dims, strict=True)]
        places = zip(block, steps, strict=True)
        return array[tuple(slice(int(i) * step, (int(i) + 1) * step) for i, step in places)]

    def experimental_assign_to_logical_device(self, tensor: T, logical_device_id: int) -> T:
        """Return `tensor` unchanged: each rank has its own code. Has no effect. Local.

        Parameters
        ----------
        tensor : array, PyTorch tensor or PerReplica
            Any value.
        logical_device_id : int
            Number of a rank within its replica. It is only checked.

        Returns
        -------
        same type as `tensor`
            `tensor` itself.

        Raises
        ------
        ValueError, TypeError
            If no rank of a replica has the number `logical_device_id`.
        """
        what = "experimental_assign_to_logical_device: logical_device_id"
        as_integer(what, logical_device_id, 0, context.layout_of(self).ranks_per_replica - 1)
        return tensor

    def experimental_replicate_to_logical_devices(self, tensor: T) -> T:
        """Return `tensor` unchanged: each rank has its own values. Has no effect. Local.

        Parameters
        ----------
        tensor : array, PyTorch tensor or PerReplica
            Any value.

        Returns
        -------
        same type as `tensor`
            `tensor` itself.
        """
        return tensor

    @property
    def cluster_resolver(self) -> ClusterResolver | None:
        """Position of this rank in the cluster; ``None`` if there is no cluster. Local."""
        return None

    @property
    def rank(self) -> int:
        """Number of this rank among all; ``cluster_resolver.task_id`` is within a role. Local."""
        return self._layout.rank

    @property
    def size(self) -> int:
        """Number of all ranks; ``cluster_resolver.num_workers`` counts only workers. Local."""
        return self._layout.num_ranks

    @property
    def local_rank(self) -> int:
        """Number of this rank on its node: short for ``cluster_resolver.local_rank``. Local."""
        resolver = self.cluster_resolver
        return 0 if resolver is None else resolver.local_rank

    @property
    def is_chief(self) -> bool:
        """Whether this is rank 0: short for ``extended.should_save_summary``. Local."""
        return self._layout.rank == 0

    @context.collective("barrier")
    def barrier(self) -> None:
        """Return when every rank has made this call. **Collective**.

        Raises
        ------
        ContextError
            Inside a replica function: use `ReplicaContext.barrier` there.

        Examples
        --------
        >>> strategy.barrier()
        """
        objects.barrier(self._collectives)

    @context.collective("broadcast_object")
    def broadcast_object(self, obj: Any, root: int = 0) -> Any:
        """Return a copy of the object of rank `root`.

        **Collective**: every rank makes the call, with the same `root`. The object is sent as
        pickle, only between ranks of this job. For arrays, `reduce` and `gather` are faster.

        Parameters
        ----------
        obj : object
            The object to send; values on ranks other than `root` are ignored.
        root : int
            Rank that sends its object.

        Returns
        -------
        object
            A copy, on `root` as well.

        Raises
        ------
        TypeError
            If `root` is not an integer; and on `root`, if the object cannot be pickled. The other
            ranks then raise a `CollectiveMismatchError` that names the error.
        ValueError
            If there is no rank `root`.
        ContextError
            Inside a replica function: use `ReplicaContext.broadcast_object` there.

        Examples
        --------
        >>> strategy.broadcast_object({"seed": 7})
        {'seed': 7}
        """
        return objects.broadcast_object(self._collectives, "broadcast_object", obj, root)

    @context.collective("gather_objects")
    def gather_objects(self, obj: Any) -> list[Any]:
        """Return copies of the objects of all ranks, in rank order, on every rank.

        **Collective**: every rank makes the call. Objects are sent as pickle, only between ranks
        of this job. For arrays, `gather` is faster.

        Parameters
        ----------
        obj : object
            The object of this rank.

        Returns
        -------
        list
            One copy per rank.

        Raises
        ------
        TypeError
            On a rank whose object cannot be pickled. The other ranks then raise a
            `CollectiveMismatchError` that names the error.
        ContextError
            Inside a replica function: use `ReplicaContext.all_gather_object` there.

        Examples
        --------
        >>> strategy.gather_objects("ready") == ["ready"] * strategy.size
        True
        """
        return objects.gather_objects(self._collectives, "gather_objects", obj)

    @property
    def _container(self) -> Strategy:
        return self

    @property
    def _collectives(self) -> Collectives:
        return self._extended._collectives

    @property
    def _layout(self) -> Layout:
        """The layout of all ranks, and the replica that runs on this one."""
        return context.layout_of(self)


class _Replicas(GroupCollectives):
    """The collectives of the replicas of a strategy, outside `Strategy.run`."""

    def __init__(self, strategy: Strategy) -> None:
        self._strategy = strategy

    def _group(self) -> Collectives:
        return context.replicas_of(self._strategy)


def explained_call(
    error: TypeError, fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> TypeError:
    """Return `error`, or one with a hint if `fn` cannot be called with these arguments."""
    try:
        signature = inspect.signature(fn)
    except (TypeError, ValueError):  # not a function, or one in C
        return error
    if _fits(signature, args, kwargs):
        return error  # raised inside fn
    hint = ""
    first = args[0] if len(args) == 1 else None
    if isinstance(first, list | tuple) and _fits(signature, first, kwargs):
        hint = (
            f"args=(batch,) passes the {type(first).__name__} of {len(first)} as one argument. "
            "Write args=batch, or let the function take one parameter"
        )
    elif isinstance(first, dict) and _fits(signature, (), {**kwargs, **first}):
        hint = "args=(batch,) passes the dict as one argument. Write kwargs=batch"
    elif len(args) > 1 and _fits(signature, (args,), kwargs):
        hint = f"args=batch passes {len(args)} arguments. Write args=(batch,) to pass them as one"
    if not hint:
        return error
    explained = TypeError(f"run: {error}. {hint}.")
    return explained.with_traceback(error.__traceback__)


def _fits(signature: inspect.Signature, args: Sequence[Any], kwargs: Mapping[Any, Any]) -> bool:
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return False
    return True
