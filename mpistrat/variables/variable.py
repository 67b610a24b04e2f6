"""Variables: storage on the replica's device, reads and writes in place."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, NoReturn, SupportsIndex, TypeAlias

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpistrat import context
from mpistrat.arguments import span_outside
from mpistrat.arrays import (
    Array,
    Device,
    as_index,
    host_copy,
    host_result,
    host_view,
    namespace_of,
    on_device,
    place,
    taken,
)
from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.cuda_api import ForNumPy
from mpistrat.options import VariableAggregation, VariableSynchronization
from mpistrat.system.text import html_table, readable_size, small_values
from mpistrat.values import DistributedValues, IndexedSlices, register_storage
from mpistrat.variables.initial import InitialValue, names_of
from mpistrat.variables.placement import Making, Whole, read_only
from mpistrat.variables.slice_writes import (
    BATCH_SCATTER_UPDATE,
    SCATTER_ADD,
    SCATTER_DIV,
    SCATTER_MAX,
    SCATTER_MIN,
    SCATTER_MUL,
    SCATTER_SUB,
    SCATTER_UPDATE,
)
from mpistrat.variables.writes import (
    ASSIGN,
    ASSIGN_ADD,
    ASSIGN_SUB,
    Modes,
    Target,
    Write,
    check_modes,
)

Initial: TypeAlias = npt.ArrayLike | Callable[..., npt.ArrayLike] | InitialValue
Value: TypeAlias = npt.ArrayLike | DistributedValues[Any]

_HOST = Device("cpu")


def _extended_in_scope() -> Any | None:
    """Return the extended interface of the strategy that creates variables here, if any."""
    frame = context.current()
    if frame is None or not context.distributes_variables(frame.strategy):
        return None
    return frame.strategy.extended


@context.collective("Variable", of=context.ranks_in_scope)
def _made_in_scope(make: Callable[[], Variable]) -> Variable:
    return make()


class Variable(NDArrayOperatorsMixin):
    """A named array that a program writes in place, distributed by the strategy in scope.

    In a strategy's scope, this creates a *mirrored* variable, or a *SyncOnRead* variable if
    `synchronization` is ON_READ. Outside every scope it creates a plain variable.

    **Collective** in a strategy: every rank creates the variable, with the same name, shape and
    dtype. All ranks use the initial value of rank 0.

    Parameters
    ----------
    initial_value : array, number, or callable that returns one
        The value to begin with. It is copied.
    trainable : bool, optional
        Whether an optimizer is meant to change the variable. Default: true for mirrored and plain
        variables, false for SyncOnRead ones.
    name : str, optional
        Name of the variable. Default: a unique name, which is equal on all ranks.
    dtype : dtype, optional
        Dtype of the variable. Default: the dtype that NumPy gives the initial value.
    synchronization : VariableSynchronization
        ON_READ for a SyncOnRead variable; AUTO and ON_WRITE for a mirrored one.
    aggregation : VariableAggregation
        How writes in replica context (mirrored) or components (SyncOnRead) become one value.
    shape : sequence of int, optional
        Shape of the initial value. If it and `dtype` are given, a callable may take the keywords
        ``partition_shape`` and ``partition_offset``. Each rank then calls it for the part that the
        rank holds, which is the whole unless the variable is sharded or split.
    split_axis : int, optional
        Axis along which the variable is split over the `ranks_per_replica` ranks of a replica. If
        it does not divide evenly, the first ranks get one element more; parts may be empty.
        `shape`, values, gradients and slots then describe this rank's part. `full_shape`, the
        initial value and files describe the whole.

    Raises
    ------
    ValueError
        For `synchronization` NONE, an unknown mode, MEAN on a dtype that is not floating, or a
        value that is not a numeric array.
    CollectiveMismatchError
        If the ranks disagree on name, shape, dtype or modes.

    Examples
    --------
    >>> with strategy.scope():
    ...     weight = ms.Variable(np.zeros((2, 3)), name="weight")
    >>> weight.assign_add(np.ones((2, 3)), read_value=False)
    >>> weight.assign_sub(0.5 * weight.read_value())
    array([[0.5, 0.5, 0.5],
           [0.5, 0.5, 0.5]])
    >>> weight.assign(np.arange(6.0).reshape(2, 3)).sum()
    np.float64(15.0)
    >>> weight.value().flags.writeable, weight.numpy().flags.writeable
    (False, True)

    Rows can be read and written by their numbers:

    >>> weight.lookup([1, 1])
    array([[3., 4., 5.],
           [3., 4., 5.]])

    >>> row = ms.IndexedSlices(np.full((1, 3), 2.0), [1])
    >>> weight.scatter_update(row)
    array([[0., 1., 2.],
           [2., 2., 2.]])
    >>> changed = weight.scatter_add(row), weight.scatter_sub(row), weight.scatter_mul(row)
    >>> changed = weight.scatter_div(row), weight.scatter_min(row), weight.scatter_max(row)
    >>> changed = weight.batch_scatter_update(ms.IndexedSlices(np.ones((2, 1)), [[0], [1]]))
    """

    _is_sharded: ClassVar[bool] = False
    _placement: Whole
    """Says which elements this rank stores and updates."""
    _storage: Array
    """The local component, in C order, which optimizers and checkpoints update in place."""

    def __new__(
        cls,
        initial_value: Initial,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        shape: Sequence[int] | None = None,
        split_axis: int | None = None,
    ) -> Variable:
        """Create the variable: in replica context one for all replicas of the rank."""
        modes = Modes(trainable, synchronization, aggregation)
        frame = context.current()

        def make() -> Variable:
            initial = initial_value
            if not isinstance(initial, InitialValue):
                initial = InitialValue(initial, shape, dtype, split_axis)
            extended = _extended_in_scope()
            kind = cls
            if cls is Variable and extended is not None:
                on_read = synchronization is VariableSynchronization.ON_READ
                kind, initial.placement = extended._kind_of_variable(initial, on_read)
            self = object.__new__(kind)
            self._make(initial, name, modes)
            return self

        if frame is None or frame.kind is not context.Kind.REPLICA:
            return _made_in_scope(make)
        made: Variable = frame.strategy.extended._make_together(make, name, modes.text)
        return made

    def __init__(
        self,
        initial_value: Initial,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: npt.DTypeLike | None = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
        shape: Sequence[int] | None = None,
        split_axis: int | None = None,
    ) -> None:
        """Do nothing: Python calls this for each replica, but the first one has created it."""

    def _make(self, initial: InitialValue, name: str | None, modes: Modes) -> None:
        """Set all attributes. **Collective** in a strategy."""
        frame, extended = context.current(), _extended_in_scope()
        self._strategy = None if extended is None or frame is None else frame.strategy
        on_read = modes.synchronization is VariableSynchronization.ON_READ
        self._trainable = not on_read if modes.trainable is None else bool(modes.trainable)
        self._synchronization_given = self._synchronization = modes.synchronization
        if extended is not None and modes.synchronization is VariableSynchronization.AUTO:
            self._synchronization = VariableSynchronization.ON_WRITE
        self._aggregation = modes.aggregation
        collectives = frame.collectives if frame else Collectives.solo(_HOST)
        names = names_of(self._strategy)
        self._name = names.next_default() if name is None else name
        self._num_parts = initial.num_parts
        with collectives.call("Variable", self._name) as call:
            self._split_axis = initial.split_axis(self._name)
            value, shape = self._begin(call, initial)
        # Python reads a counter in each step. On a device, each read would wait for the device.
        device = _HOST if initial.is_replicated else self._placement.device(collectives.device)
        storage = place(value, device)
        names.take(self._name)
        is_merged = extended is not None and not on_read and self._placement.is_here
        self._target = Target(
            self._name, shape, value.dtype, device, modes.aggregation, is_mirrored=is_merged
        )
        self._keep(storage)

    def _keep(self, storage: Array) -> None:
        """Use `storage` as the memory of this variable."""
        self._storage = storage
        register_storage(storage, self)
        if self._strategy is not None:
            self._strategy.extended._note_variable(self)

    def _begin(
        self, call: CollectiveCall, initial: InitialValue
    ) -> tuple[np.ndarray, tuple[int, ...]]:
        """Return the initial local component, and the shape of values. **Collective**."""
        making = Making(self._name, self._strategy, self._split_axis, self._checked_modes)
        self._placement, value, shape = (initial.placement or Whole).make(call, initial, making)
        return value, shape

    def _checked_modes(self, dtype: np.dtype) -> tuple[object, ...]:
        """Return the properties, besides shape and dtype, that must be equal on all ranks."""
        check_modes(self._name, self._synchronization_given, self._aggregation, dtype)
        split = () if self._split_axis is None else (f"split along axis {self._split_axis}",)
        return (self._synchronization_given.name, self._aggregation.name, self._trainable, *split)

    @property
    def _component(self) -> Array:
        return self._storage

    @property
    def _own_storage(self) -> Array:
        """The memory that this rank updates in place."""
        return self._placement.own_storage(self._component)

    @property
    def storage(self) -> Array:
        """The writable memory of the local component. Local.

        Writes to it are not synchronized, so replicas may drift apart. Under
        `CentralStorageStrategy` all ranks share this memory, and nothing orders their writes.
        """
        return self._placement.memory(self._component)

    @property
    def name(self) -> str:
        """Name that was passed, or the default one. Local."""
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value; equal on all ranks unless the variable is split. Local."""
        return self._target.shape

    @property
    def full_shape(self) -> tuple[int, ...]:
        """Shape of the whole variable; differs from `shape` only if it is split. Local."""
        return self._placement.shape

    @property
    def split_axis(self) -> int | None:
        """Axis along which the ranks of a replica hold parts, or ``None``. Local."""
        return self._split_axis

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the value. Local."""
        return self._target.dtype

    @property
    def trainable(self) -> bool:
        """Whether an optimizer is meant to change it. Local."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When components are combined: ON_WRITE, ON_READ, or AUTO for a plain variable. Local."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How components or writes become one value. Local."""
        return self._aggregation

    @property
    def strategy(self) -> Any:
        """Strategy in whose scope it was created, ``None`` outside every scope. Local."""
        return self._strategy

    @property
    def device(self) -> str:
        """Full name of the device that holds the local component. Local."""
        rank: int = 0 if self._strategy is None else self._strategy.rank
        return str(self._target.device.on_task(self._placement.task(rank)))

    @property
    def values(self) -> tuple[Array, ...]:
        """Components on this rank: one read-only view for each of its replicas. Local."""
        view = (Variable.value(self),)
        return view if self._strategy is None else view * len(self._replica_ids)

    @property
    def _replica_ids(self) -> range:
        ids: range = self.strategy.extended.local_replica_ids
        return ids

    def value(self) -> Array:
        """Return the value as a read-only view of the storage, without a copy.

        A later write changes the view as well. CuPy has no read-only arrays: do not write to
        these. **Local**, except for SyncOnRead variables in cross-replica context. Reading those
        is **Collective**, because it aggregates the components, and returns a new array.

        Returns
        -------
        array
            An array of `shape` and `dtype`, on the device of the variable.
        """
        return self._placement.view(self._storage)

    def read_value(self) -> Array:
        """Return a snapshot of `value()`, on the device. **Collective** if `value` is.

        Returns
        -------
        array
            New memory, which later writes do not change.
        """
        value = self.value()
        # A value without a base is new memory already, such as the sum of SyncOnRead components.
        return value.copy() if value.base is not None else value

    def numpy(self) -> npt.NDArray[Any]:
        """Return a snapshot of `value()` in host memory. **Collective** if `value` is.

        Returns
        -------
        numpy.ndarray
            New, writable memory.
        """
        return host_copy(self.value())

    def assign(self, value: Value, read_value: bool = True) -> Array | None:
        """Write `value` in place. No broadcasting: the shapes must be equal.

        The effect depends on the kind of variable, the context and `aggregation`: see the guide's
        page on variables, which also says which values are compared. **Collective** for mirrored
        variables except in update context, and for SyncOnRead ones in cross-replica context. In
        cross-replica context the ranks compare digests of `value`, for which a device array is
        copied to the host.

        Parameters
        ----------
        value : array, number, Variable or distributed value
            The new value, of the same shape; the same on all ranks in cross-replica context.
        read_value : bool
            Whether to return the new value.

        Returns
        -------
        array or None
            The new value as from `value()`; ``None`` with ``read_value=False``.

        Raises
        ------
        ValueError
            If the shape differs, or the kind of variable forbids the write in this context. With
            `read_value`, after the write, if the aggregation NONE forbids reading it there.
        CollectiveMismatchError
            In cross-replica context, if the values differ between ranks.
        TypeError
            If `value` cannot be cast to the variable's dtype within its kind, or for arithmetic
            on bools.
        """
        return self._write(ASSIGN, value, read_value)

    def assign_add(self, delta: Value, read_value: bool = True) -> Array | None:
        """Add `delta` in place. **Collective** or local as `assign`, with the same errors.

        Parameters
        ----------
        delta : array, number, Variable or distributed value
            The value to add, of the same shape.
        read_value : bool
            Whether to return the new value.

        Returns
        -------
        array or None
            As from `assign`.
        """
        return self._write(ASSIGN_ADD, delta, read_value)

    def assign_sub(self, delta: Value, read_value: bool = True) -> Array | None:
        """Subtract `delta` in place. **Collective** or local as `assign`, with the same errors.

        Parameters
        ----------
        delta : array, number, Variable or distributed value
            The value to subtract, of the same shape.
        read_value : bool
            Whether to return the new value.

        Returns
        -------
        array or None
            As from `assign`.
        """
        return self._write(ASSIGN_SUB, delta, read_value)

    def _write(self, write: Write, value: Any, read_value: bool) -> Array | None:
        # Before the write, because reading a variable may itself be a collective.
        self._write_in_context(write, value.value() if isinstance(value, Variable) else value)
        return self._written() if read_value else None

    def _written(self) -> Any:
        return self.value()

    def _write_in_context(self, write: Write, value: Any) -> None:
        context.warn_of_own_write(write.how, self._name)  # a variable of this rank
        self._write_locally(write, value)

    def _write_locally(self, write: Write, value: Any) -> None:
        storage = self._placement.memory(self._component)
        write.apply(storage, write.checked(self._target, value))
        self._placement.note_written()

    def _save_value(self) -> Array | None:
        """Return the array that a checkpoint stores, on rank 0; other ranks may return it too."""
        # It may be the variable's own storage. For SyncOnRead variables this is collective.
        if not self._placement.is_in_parts:
            return self._component_to_save()
        whole = np.empty(self.full_shape, self.dtype) if self._ranks.rank == 0 else None
        begin = 0
        for piece in self._pieces_for_root():
            if whole is not None and piece is not None:
                whole.reshape(-1)[begin : begin + piece.size] = piece
                begin += piece.size
        return whole

    def _component_to_save(self) -> Array | None:
        """Return this rank's part of the saved value. **Collective** for SyncOnRead variables."""
        return self._storage

    def _pieces_for_root(self) -> Iterator[np.ndarray | None]:
        """Yield the elements in order, some at a time, on rank 0. **Collective**."""
        own = self._component_to_save()
        yield from self._placement.pieces(self._ranks, self._name, self.dtype, own)

    def _load_value(self, array: np.ndarray) -> None:
        """Set the variable from the array in a checkpoint. **Local**, the same on every rank."""
        target = self._target
        if self._split_axis is not None:
            # Files hold the whole, so that a different number of ranks can restore it.
            target = dataclasses.replace(target, shape=self.full_shape)
        value = self._own_part(ASSIGN.checked(target, array))
        self._placement.load_all(self._component, value)

    def _load_piece(self, start: int, piece: np.ndarray) -> None:
        """Set a part of the value, like `_load_value`, from element `start` of the flat value."""
        self._placement.load(self._component, start, self._own_part(piece), self._target.device)

    def _own_part(self, array: Any) -> Any:
        """Return this replica's part of a stored value."""
        return array

    @property
    def _ranks(self) -> Collectives:
        """The collectives of all ranks."""
        return context.collectives_of(self.strategy)

    def _in_unit(
        self, what: str, function: Callable[[], Any], writes: bool | Sequence[Variable] = False
    ) -> Any:
        """Return the result of `function`: the public call `what`, also in elastic jobs."""
        return self._ranks.as_unit(what, function, writes)

    @property
    def _collectives_of_writes(self) -> Collectives:
        """Collectives of the ranks that pass the same value in cross-replica context."""
        # The ranks of a replica pass different values for their parts of a split variable.
        return self._ranks if self._split_axis is None else context.replicas_of(self.strategy)

    def _zeros(self, name: str, dtype: np.dtype) -> Variable:
        """Return a new variable of zeros, placed like this one. **Collective** if this one is."""
        zeros = InitialValue.zeros(self.full_shape, dtype, self._num_parts, self._split_axis)
        # A sharded variable may have a single part, which one rank stores. Its slots belong to the
        # same rank, not to all.
        zeros.is_always_cut = self._is_sharded
        return Variable(zeros, trainable=False, name=name)

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        twin = object.__new__(type(self))  # __new__ would choose the kind by the context
        vars(twin).update(vars(self))
        memo[id(self)] = twin
        twin._placement, storage = self._placement.copied(self._name, self._storage)
        twin._keep(storage)
        return twin

    def scatter_add(self, sparse_delta: IndexedSlices, read_value: bool = True) -> Array | None:
        """Add rows in place: ``self[indices[i]] += values[i]`` for each i in order.

        In replica context the slices of all replicas are first joined in rank order; replicas may
        pass different numbers of slices, including none. ONLY_FIRST_REPLICA uses only rank 0's
        slices, and MEAN divides the values by the number of replicas. In cross-replica context
        all ranks pass the same slices. **Collective** or local as `assign`.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            Rows with ``values`` of shape ``(n, *shape[1:])`` and ``indices`` of shape ``(n,)``.
        read_value : bool
            Whether to return the new value.

        Returns
        -------
        array or None
            As from `assign`.

        Raises
        ------
        TypeError
            If `sparse_delta` is not an `IndexedSlices`, or its values do not fit the dtype.
        ValueError
            If the shape of the rows differs, or in replica context under NONE.
        IndexError
            For an index below 0 or past the end; the variable is then unchanged.
        NotImplementedError
            On a SyncOnRead variable.
        """
        return self._write(SCATTER_ADD, sparse_delta, read_value)

    def scatter_sub(self, sparse_delta: IndexedSlices, read_value: bool = True) -> Array | None:
        """Subtract rows in place. **Collective** or local as `scatter_add`, with the same errors.

        Parameters
        ----------
        sparse_delta, read_value : IndexedSlices, bool
            As for `scatter_add`.

        Returns
        -------
        array or None
            As from `assign`.
        """
        return self._write(SCATTER_SUB, sparse_delta, read_value)

    def scatter_mul(self, sparse_delta: IndexedSlices, read_value: bool = True) -> Array | None:
        """Multiply rows in place. **Collective** or local as `scatter_add`, with the same errors.

        Parameters
        ----------
        sparse_delta, read_value : IndexedSlices, bool
            As for `scatter_add`.

        Returns
        -------
        array or None
            As from `assign`.
        """
        return self._write(SCATTER_MUL, sparse_delta, read_value)

    def scatter_div(self, sparse_delta: IndexedSlices, read_value: bool = True) -> Array | None:
        """Divide rows in place; integers are rounded towards zero.

        **Collective** or local as `scatter_add`, with the same errors.

        Parameters
        ----------
        sparse_delta, read_value : IndexedSlices, bool
            As for `scatter_add`.

        Returns
        -------
        array or None
            As from `assign`.
        """
        return self._write(SCATTER_DIV, sparse_delta, read_value)

    def scatter_min(self, sparse_delta: IndexedSlices, read_value: bool = True) -> Array | None:
        """Replace each element of rows by the smaller of the old and the given one.

        **Collective** or local as `scatter_add`.

        Parameters
        ----------
        sparse_delta, read_value : IndexedSlices, bool
            As for `scatter_add`.

        Returns
        -------
        array or None
            As from `assign`.

        Raises
        ------
        NotImplementedError
            On a mirrored variable under SUM or MEAN, and on a SyncOnRead variable.
        TypeError, ValueError, IndexError
            As from `scatter_add`.
        """
        return self._write(SCATTER_MIN, sparse_delta, read_value)

    def scatter_max(self, sparse_delta: IndexedSlices, read_value: bool = True) -> Array | None:
        """Replace each element of rows by the larger of the old and the given one.

        **Collective** or local as `scatter_add`; raises the errors of `scatter_min`.

        Parameters
        ----------
        sparse_delta, read_value : IndexedSlices, bool
            As for `scatter_add`.

        Returns
        -------
        array or None
            As from `assign`.
        """
        return self._write(SCATTER_MAX, sparse_delta, read_value)

    def scatter_update(self, sparse_delta: IndexedSlices, read_value: bool = True) -> Array | None:
        """Replace rows by the given ones; the last of duplicates counts.

        **Collective** or local as `scatter_add`; raises the errors of `scatter_min`.

        Parameters
        ----------
        sparse_delta, read_value : IndexedSlices, bool
            As for `scatter_add`.

        Returns
        -------
        array or None
            As from `assign`.
        """
        return self._write(SCATTER_UPDATE, sparse_delta, read_value)

    def batch_scatter_update(
        self, sparse_delta: IndexedSlices, read_value: bool = True
    ) -> Array | None:
        """Replace rows within batches: ``self[i, ..., indices[i, ..., j]] = values[i, ..., j]``.

        All axes of ``indices`` except the last are batch axes, with the lengths of the variable's
        leading axes. With 1-d ``indices`` this is `scatter_update`. **Collective** or local as
        `scatter_add`; raises the errors of `scatter_min`.

        Parameters
        ----------
        sparse_delta : IndexedSlices
            Rows with ``indices`` of shape ``(*batch, n)`` and ``values`` of shape
            ``(*batch, n, *shape[len(batch) + 1:])``; the variable's shape begins with ``batch``.
        read_value : bool
            Whether to return the new value.

        Returns
        -------
        array or None
            As from `assign`.
        """
        return self._write(BATCH_SCATTER_UPDATE, sparse_delta, read_value)

    @property
    def row_range(self) -> range:
        """Rows that this rank holds: all, except for an `ms.ShardedVariable`. Local.

        Of a variable with `split_axis`, rows count from 0 within this rank's part. Raises
        `TypeError` if the variable is 0-d.
        """
        return range(len(self))

    @property
    def part(self) -> Array:
        """Rows `row_range` of the local component, as a read-only view. Local."""
        return read_only(self._component)

    def lookup(self, ids: npt.ArrayLike) -> Array:
        """Return rows by their numbers, in new memory on the device.

        **Local**, because each rank holds all rows (with `split_axis` those of its part, counted
        from 0); **Collective** for an `ms.ShardedVariable`. For
        a SyncOnRead variable, the rows come from the local component.

        Parameters
        ----------
        ids : array of integers
            Row numbers, in any shape, which may be empty. Order and duplicates are kept.

        Returns
        -------
        array
            Rows of shape ``(*ids.shape, *shape[1:])``.

        Raises
        ------
        TypeError
            If `ids` are not integers, or the variable is 0-d.
        IndexError
            For a number below 0 or past the end.
        """
        rows = self._checked_rows(ids)
        component = self._component
        found: Array = component[namespace_of(component).asarray(rows)]
        return found

    def _checked_rows(self, ids: npt.ArrayLike) -> np.ndarray:
        """Return the row numbers for `lookup` as an array of int64."""
        rows = host_view(ids) if hasattr(ids, "dtype") else np.asarray(ids)
        what = f"lookup of variable {self.name!r}"
        # NumPy turns an empty list into float64, but naming no rows is allowed. Only an array has a
        # dtype of its own.
        if rows.dtype.kind not in "iu" and (rows.size or hasattr(ids, "dtype")):
            raise TypeError(f"{what} takes integers, not an array of dtype {rows.dtype}.")
        span = span_outside(rows, len(self))
        if span is not None:
            raise IndexError(
                f"{what}: the ids go from {span[0]} to {span[1]}, but the variable of shape "
                f"{self.shape} has {len(self)} rows, numbered from 0."
            )
        return rows.astype(np.int64)

    @property
    def ndim(self) -> int:
        """Number of dimensions. Local."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """Number of elements. Local."""
        return math.prod(self.shape)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        value = host_result(self.value())
        if copy:
            return np.array(value, dtype=dtype)
        # NumPy 2 passes copy=False for numpy.asarray(..., copy=False), and expects this error.
        if copy is False and dtype is not None and np.dtype(dtype) != value.dtype:
            raise ValueError(
                f"The variable {self.name!r} of dtype {value.dtype} cannot become {dtype} "
                "without a copy."
            )
        return value if dtype is None else value.astype(dtype, copy=False)

    def __cupy_get_ndarray__(self) -> Any:
        return on_device(self.value())

    __array_priority__ = 101  # higher than the priority of CuPy's arrays

    def __rmatmul__(self, other: Any) -> Any:
        return other @ self.value()

    @ForNumPy
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        # `ufunc.at` writes to its first input. A write past `assign` would reach one replica only,
        # and the replicas would drift apart.
        outputs = inputs[:1] if method == "at" else kwargs.get("out", ())
        if any(isinstance(out, Variable) for out in outputs):
            raise TypeError(
                "A variable cannot be the output of a NumPy function or an operator such as +=. "
                "Write to it with assign, assign_add or assign_sub."
            )
        read = [each.value() if isinstance(each, Variable) else each for each in inputs]
        return getattr(ufunc, method)(*read, **kwargs)

    def __getitem__(self, index: Any) -> Any:
        part = taken(self.value(), index)
        # A view would change with later writes, and on a device the program could write to it.
        return part.copy() if getattr(part, "base", None) is not None else part

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"The variable {self.name!r} is 0-d and has no len().")
        return self.shape[0]

    def __iter__(self) -> NoReturn:
        raise TypeError(f"The variable {self.name!r} is not iterable. Iterate over its value().")

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __complex__(self) -> complex:
        return complex(self.value())

    def __index__(self) -> int:
        return as_index(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __copy__(self) -> NoReturn:
        raise TypeError(
            f"The variable {self.name!r} cannot be copied shallowly: two variables would share "
            "their storage. Use copy.deepcopy, or the variable itself."
        )

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"The variable {self.name!r} cannot be pickled: it belongs to its strategy and its "
            "ranks. Save it with mpistrat.Checkpoint, or pickle its numpy()."
        )

    def _shown_values(self) -> str | None:
        """Return the local component as text, if it is short. Local."""
        return small_values(self._component)

    def __repr__(self) -> str:
        values, axis = self._shown_values(), self._split_axis
        return (
            f"<{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype} "
            f"aggregation={self.aggregation.name} on {self._target.device}"
            + ("" if values is None else f", local component {values}")
            + ("" if axis is None else f", split along axis {axis} of the shape {self.full_shape}")
            + ">"
        )

    def _repr_html_(self) -> str:
        values = self._shown_values()
        rows = [
            ("shape", self.shape),
            ("dtype", self.dtype),
            ("size", readable_size(math.prod(self.shape) * self.dtype.itemsize)),
            ("device", self._target.device),
            ("synchronization", self.synchronization.name),
            ("aggregation", self.aggregation.name),
            ("trainable", self.trainable),
        ]
        rows += [] if values is None else [("local component", values)]
        return html_table(f"{type(self).__name__} {self.name!r}", rows)


# Access to the memory of variables for the rest of the package. Programs do not use it.


def placement_of(variable: Variable) -> Whole:
    """Return the placement, which says which elements of `variable` this rank stores."""
    return variable._placement


def storage_of(variable: Variable) -> Array:
    """Return the memory of `variable` on this rank, for the rank's first replica."""
    return variable._storage


def component_of(variable: Variable) -> Array:
    """Return the memory of `variable` for the replica that runs."""
    return variable._component


def own_storage_of(variable: Variable) -> Array:
    """Return the memory that this rank updates in place. Callers call `settle` afterwards."""
    return variable._own_storage


def settle(variable: Variable) -> None:
    """Complete an update of the memory that `own_storage_of` returned."""
    variable._placement.settle(variable.name)


def device_of(variable: Variable) -> Device:
    """Return the device that holds the memory of `variable`."""
    return variable._target.device
