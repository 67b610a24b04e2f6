"""What every variable has: storage on the replica's device, reads and writes in place."""

from __future__ import annotations

import itertools
import weakref
from typing import Any, ClassVar

import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpistrat import context
from mpistrat.arrays import Array, Device, host_copy, host_view, is_on_host, place
from mpistrat.collectives import Collectives
from mpistrat.options import VariableAggregation, VariableSynchronization
from mpistrat.tensors import host_array, is_tensor
from mpistrat.values import DistributedValues, container_of_component
from mpistrat.variables.checks import can_cast, check_modes, holds, numeric

__all__ = ["Variable", "container_of"]

_HOST = Device("cpu")
_numbers = itertools.count()
_by_storage: weakref.WeakValueDictionary[int, Variable] = weakref.WeakValueDictionary()


class Variable(NDArrayOperatorsMixin):
    """A named array that a program writes in place, distributed by the strategy in scope.

    In a strategy's scope this makes a *mirrored* variable, or a *SyncOnRead* variable where
    `synchronization` is ON_READ. Outside every scope it makes a plain one.

    **Collective** in a strategy: every rank makes the variable, with the same name, shape and
    dtype. The initial value of rank 0 is used on all.

    Parameters
    ----------
    initial_value : array, number, or callable that returns one
        Copied.
    trainable : bool, optional
        By default true for mirrored and plain variables, false for SyncOnRead ones.
    name : str, optional
        By default a unique name that is equal on all ranks.
    dtype : dtype, optional
        By default that of the initial value, as NumPy sees it.
    synchronization : VariableSynchronization
    aggregation : VariableAggregation
        How writes in replica context (mirrored) or components (SyncOnRead) become one value.

    Raises
    ------
    ValueError
        For `synchronization` NONE, an unknown mode, MEAN on a dtype that is not floating, or a
        value that is no numeric array.
    EpochMismatchError
        If the ranks disagree on name, shape, dtype or modes.
    """

    _kinds: ClassVar[dict[bool, type[Variable]]] = {}
    """The kinds of distributed variables, by whether they are read across replicas."""
    _storage: Array

    def __init_subclass__(cls, *, on_read: bool) -> None:
        super().__init_subclass__()
        Variable._kinds[on_read] = cls

    def __new__(
        cls,
        initial_value: Any = None,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: Any = VariableSynchronization.AUTO,
        aggregation: Any = VariableAggregation.NONE,
    ) -> Variable:
        """Choose the kind of variable that the context and `synchronization` ask for."""
        frame = context.current()
        distributed = frame is not None and frame.strategy.extended.distributes_variables
        if cls is Variable and distributed:
            cls = Variable._kinds[synchronization is VariableSynchronization.ON_READ]
        return object.__new__(cls)

    def __init__(
        self,
        initial_value: Any,
        trainable: bool | None = None,
        name: str | None = None,
        dtype: Any = None,
        synchronization: VariableSynchronization = VariableSynchronization.AUTO,
        aggregation: VariableAggregation = VariableAggregation.NONE,
    ) -> None:
        frame = context.current()
        distributed = frame is not None and frame.strategy.extended.distributes_variables
        self._strategy = frame.strategy if frame is not None and distributed else None
        on_read = synchronization is VariableSynchronization.ON_READ
        self._trainable = not on_read if trainable is None else bool(trainable)
        self._synchronization = synchronization
        self._aggregation = aggregation
        collectives = frame.collectives if frame else Collectives.solo(_HOST)
        self._name = _default_name(self._strategy) if name is None else name
        with collectives.call("Variable", self._name) as call:
            value = initial_value() if callable(initial_value) else initial_value
            value = numeric(self._name, value, dtype)
            check_modes(self._name, synchronization, aggregation, value.dtype)
            modes = (synchronization.name, aggregation.name, self._trainable)
            self._storage = place(call.broadcast(value, 0, modes), collectives.device)
        _by_storage[id(self._storage)] = self

    @property
    def name(self) -> str:
        """The name that was given, or the default one. Local."""
        return self._name

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the value, equal on all ranks. Local."""
        return tuple(self._storage.shape)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the value. Local."""
        dtype: np.dtype = self._storage.dtype
        return dtype

    @property
    def ndim(self) -> int:
        """Number of dimensions. Local."""
        return int(self._storage.ndim)

    @property
    def size(self) -> int:
        """Number of elements. Local."""
        return int(self._storage.size)

    @property
    def trainable(self) -> bool:
        """Whether an optimizer is meant to change it. Local."""
        return self._trainable

    @property
    def synchronization(self) -> VariableSynchronization:
        """When the components are brought together. Local."""
        return self._synchronization

    @property
    def aggregation(self) -> VariableAggregation:
        """How components or writes become one value. Local."""
        return self._aggregation

    @property
    def strategy(self) -> Any:
        """The strategy whose scope it was made in, ``None`` outside every scope. Local."""
        return self._strategy

    @property
    def values(self) -> tuple[Array, ...]:
        """The components on this rank: a tuple with one read-only view. Local."""
        return (self._view(),)

    @property
    def storage(self) -> Array:
        """The local component itself, in C order, for code that updates it in place. Local.

        What is written to a mirrored variable must be the same on every rank, as in update
        context.
        """
        return self._storage

    def _view(self) -> Array:
        view = self._storage.view()
        if is_on_host(view):
            view.flags.writeable = False
        return view

    def value(self) -> Array:
        """Return the value as a read-only view of the storage, without a copy.

        A later write shows through. CuPy arrays cannot be read-only: do not write to theirs.
        **Local**, but for SyncOnRead variables in cross-replica context: there the components
        are aggregated, which is **Collective**, and the result is an array of its own.
        """
        return self._view()

    def read_value(self) -> Array:
        """Return a snapshot of `value()`, on the device. Collective where that is."""
        value = self.value()
        return value.copy() if value.base is not None else value

    def numpy(self) -> np.ndarray:
        """Return a snapshot of `value()` in host memory. Collective where that is."""
        return host_copy(self.value())

    def assign(self, value: Any, read_value: bool = True) -> Array | None:
        """Write `value` in place. No broadcasting: the shapes must be equal.

        What that means depends on the kind of variable, the context and `aggregation`
        (see the guide's page on variables). **Collective** for mirrored variables but in the
        update context, and for SyncOnRead ones in cross-replica context.

        Returns
        -------
        array or None
            The new value as by `value()`; ``None`` with ``read_value=False``.

        Raises
        ------
        ValueError
            For another shape, or where the kind of variable forbids the write in this context.
        TypeError
            If `value` cannot be cast to the variable's dtype within its kind.
        """
        return self._write("assign", value, read_value)

    def assign_add(self, delta: Any, read_value: bool = True) -> Array | None:
        """Add `delta` in place. **Collective** or local as `assign`, and otherwise like it."""
        return self._write("assign_add", delta, read_value)

    def assign_sub(self, delta: Any, read_value: bool = True) -> Array | None:
        """Subtract `delta` in place. **Collective** or local as `assign`, and otherwise like it."""
        return self._write("assign_sub", delta, read_value)

    def _write(self, how: str, value: Any, read_value: bool) -> Array | None:
        self._write_in_context(how, value)
        return self.value() if read_value else None

    def _write_in_context(self, how: str, value: Any) -> None:
        """Do the write that the current context calls for."""
        self._apply(how, self._checked(how, value))

    def _checked(self, how: str, value: Any) -> Array:
        """Return `value` as an array of this variable's shape and dtype on its device."""
        if isinstance(value, DistributedValues):
            value = value.values[0]
        elif isinstance(value, Variable):
            value = value.value()
        if is_tensor(value):
            value = host_array(value)
        is_plain = not hasattr(value, "dtype")
        array = np.asarray(value) if is_plain else value
        if tuple(array.shape) != self.shape:
            raise ValueError(
                f"{how} of variable {self.name!r}: the value has the shape {tuple(array.shape)}, "
                f"but the variable {self.shape}. Values are not broadcast: give one of its shape."
            )
        fits = holds(self.dtype, array) if is_plain else can_cast(array.dtype, self.dtype)
        if not fits:
            raise TypeError(
                f"{how} of variable {self.name!r}: a value of dtype {array.dtype} does not fit "
                f"into {self.dtype}. Cast it first."
            )
        device = self._strategy.extended.device if self._strategy is not None else _HOST
        return place(array, device).astype(self.dtype, copy=False)

    def _apply(self, how: str, array: Array) -> None:
        """Write to the local component, in place."""
        if how == "assign":
            self._storage[...] = array
        elif how == "assign_add":
            self._storage += array
        else:
            self._storage -= array

    def save_value(self) -> np.ndarray | None:
        """Return what a checkpoint stores: a host array on rank 0, ``None`` elsewhere.

        **Collective** for SyncOnRead variables, else **Local**.
        """
        return host_copy(self._storage)

    def load_value(self, array: np.ndarray) -> None:
        """Set the variable from what a checkpoint has stored. **Local**, on every rank alike."""
        self._apply("assign", self._checked("restore", array))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        value = host_view(self.value())
        if copy:
            return np.array(value, dtype=dtype)
        if copy is False and dtype is not None and np.dtype(dtype) != value.dtype:
            raise ValueError(
                f"The variable {self.name!r} of dtype {value.dtype} cannot become {dtype} "
                "without a copy."
            )
        return value if dtype is None else value.astype(dtype, copy=False)

    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(out, Variable) for out in kwargs.get("out", ())):
            raise TypeError(
                "A variable cannot be the output of a NumPy function or an operator such as +=. "
                "Write to it with assign, assign_add or assign_sub."
            )
        read = [each.value() if isinstance(each, Variable) else each for each in inputs]
        return getattr(ufunc, method)(*read, **kwargs)

    def __getitem__(self, index: Any) -> Array:
        return self.value()[index]

    def __len__(self) -> int:
        if not self.shape:
            raise TypeError(f"The variable {self.name!r} is 0-d and has no len().")
        return self.shape[0]

    def __iter__(self) -> Any:
        raise TypeError(f"The variable {self.name!r} is not iterable. Iterate over its value().")

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __copy__(self) -> Variable:
        raise TypeError(
            f"The variable {self.name!r} cannot be copied shallowly: two variables would share "
            "their storage. Use copy.deepcopy, or the variable itself."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            f"The variable {self.name!r} cannot be pickled: it belongs to its strategy and its "
            "ranks. Save it with mpistrat.Checkpoint, or pickle its numpy()."
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Variable:
        # Without __new__, which would choose the kind by the context of the copy.
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        twin._storage = self._storage.copy()
        _by_storage[id(twin._storage)] = twin
        memo[id(self)] = twin
        return twin

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.name!r} shape={self.shape} dtype={self.dtype} "
            f"aggregation={self.aggregation.name}, local component {self._storage!r}>"
        )


def container_of(value: Any) -> Any:
    """Return the variable or distributed value that `value` is a component of. Local.

    Itself where it belongs to none that still exists.
    """
    storage = getattr(value, "base", None)
    variable = _by_storage.get(id(storage)) if storage is not None else None
    return container_of_component(value) if variable is None else variable


def _default_name(strategy: Any) -> str:
    number = next(_numbers if strategy is None else strategy.extended.variable_numbers)
    return f"Variable_{number}" if number else "Variable"
