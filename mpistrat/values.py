"""Distributed values: one component per replica. Each rank holds only its own components."""

from __future__ import annotations

import numbers
import operator
import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from numpy.lib.mixins import NDArrayOperatorsMixin

from mpistrat import nests
from mpistrat.arrays import (
    Array,
    adopted,
    as_index,
    host_result,
    is_array,
    is_foreign,
    is_number,
    on_device,
)
from mpistrat.cuda_api import ForNumPy
from mpistrat.pytorch import is_tensor
from mpistrat.ragged import Ragged
from mpistrat.system.text import brief

_ATTRIBUTES_OF_ARRAYS = frozenset(name for name in dir(np.ndarray) if name[0] != "_") | {
    *("cpu", "cuda", "detach", "get", "numpy")  # of CuPy's arrays and PyTorch's tensors
}


class RefusedOperators:
    """Base of values that look like arrays but do not support arithmetic.

    Each use as an array raises `TypeError`, and each attribute of arrays `AttributeError`, with
    the text of `_why_no_array`.
    """

    __slots__ = ()

    @abstractmethod
    def _why_no_array(self, what: str) -> str:
        """Return the error message for `what`, which takes only arrays."""

    if not TYPE_CHECKING:  # type checkers report an operator that is not defined

        def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
            raise TypeError(self._why_no_array(f"numpy.{ufunc.__name__}"))

        def __array_function__(self, function: Any, types: Any, args: Any, kwargs: Any) -> Any:
            raise TypeError(self._why_no_array(f"numpy.{function.__name__}"))

        def __getattr__(self, name: str) -> Any:
            if name in _ATTRIBUTES_OF_ARRAYS:
                raise AttributeError(self._why_no_array(f".{name}"), name=name, obj=self)
            message = f"{type(self).__name__!r} object has no attribute {name!r}"
            raise AttributeError(message, name=name, obj=self)

        def __format__(self, spec: str) -> str:
            if spec:
                raise TypeError(self._why_no_array(f"The format {spec!r}"))
            return repr(self)

        def __eq__(self, other: object) -> bool:
            # Without this, a comparison with a number would silently be False.
            if isinstance(other, numbers.Number | RefusedOperators) or hasattr(other, "dtype"):
                raise TypeError(self._why_no_array("The operator =="))
            return NotImplemented

        __hash__ = object.__hash__


_ARITHMETIC = "add + sub - mul * matmul @ truediv / floordiv // mod % pow ** lshift << rshift >> "
_ARITHMETIC += "and & or | xor ^"
_OTHERS = "neg - pos + invert ~ lt < le <= gt > ge >= contains in"
_BINARY = dict(zip(_ARITHMETIC.split()[::2], _ARITHMETIC.split()[1::2], strict=True))
_SYMBOLS = {
    **{f"{letter}{name}": _BINARY[name] for name in _BINARY for letter in ("", "r")},
    **{f"i{name}": f"{_BINARY[name]}=" for name in _BINARY},
    **dict(zip(_OTHERS.split()[::2], _OTHERS.split()[1::2], strict=True)),
}
_FUNCTIONS = (
    *("abs", "divmod", "bool", "int", "float", "complex", "round", "len", "iter"),
    *("floor", "ceil", "trunc"),
)
_OPERATORS = {
    **{name: f"The operator {symbol}" for name, symbol in _SYMBOLS.items()},
    **{name: f"{name}()" for name in _FUNCTIONS},
    "rdivmod": "divmod()",
    "index": "An index",
    "getitem": "Indexing",
    **dict.fromkeys(("setitem", "delitem"), "Item assignment"),
}
"""Words of messages for the methods of operators, by name without underscores."""


def _refusal(name: str, what: str) -> Callable[..., Any]:
    def refuse(self: RefusedOperators, *_: object) -> Any:
        raise TypeError(self._why_no_array(what))

    refuse.__name__ = name
    return refuse


for _operator, _what in _OPERATORS.items():
    setattr(RefusedOperators, f"__{_operator}__", _refusal(f"__{_operator}__", _what))


T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Number: TypeAlias = "complex | np.number[Any]"

_containers: weakref.WeakValueDictionary[int, DistributedValues[Any]]
_containers = weakref.WeakValueDictionary()

_by_storage: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
"""Variables by the id of their memory, which all views of it have as their base."""


class DistributedValues(Generic[T_co]):
    """A value with one component per replica.

    Each rank holds only the components of the replicas that it runs, which is one by default.

    Examples
    --------
    >>> ms.PerReplica(np.arange(2)).values
    (array([0, 1]),)
    """

    __slots__ = ("__weakref__", "_component")

    _component: Any

    def __init__(self, component: T_co) -> None:
        self._component = component
        # The component's id is its own as long as the container keeps it alive.
        _containers[id(component)] = self

    @property
    def values(self) -> tuple[T_co, ...]:
        """Components on this rank: a tuple with one element per replica of the rank. Local."""
        return (self._component,)

    def _own(self) -> Any:
        """Return the component of the replica that runs here."""
        return self._component

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> np.ndarray:
        component = self._own()
        if isinstance(component, Ragged):
            raise TypeError(
                "A Ragged is not an array: its rows differ in length. Use its values and "
                "row_splits, which are arrays."
            )
        return np.array(host_result(component), dtype=dtype, copy=copy)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({brief(self._component)})"


class PerReplica(RefusedOperators, DistributedValues[T_co]):
    """A value that differs between replicas, such as their parts of a batch.

    It has no operators and no attributes of arrays, because outside `Strategy.run` a result would
    be valid on this rank only. All of them raise `TypeError` (attributes `AttributeError`).
    `numpy.asarray` returns this rank's component.

    Examples
    --------
    >>> value = strategy.run(lambda: np.ones(2))
    >>> value
    PerReplica(array([1., 1.]))
    >>> np.asarray(value) + 1
    array([2., 2.])
    """

    __slots__ = ("_batch", "_components", "_turn")

    _batch: tuple[int, int]
    """Epoch and number of a batch from a distributed dataset; otherwise not set."""
    _num_here: ClassVar[ContextVar[int]] = ContextVar("_num_here", default=1)
    """Number of replicas on the rank of the replica that runs here."""

    def __init__(self, component: T_co) -> None:
        self._component = component
        self._components: tuple[T_co, ...] = (component,)
        self._turn: Callable[[], int | None] | None = None
        _containers[id(component)] = self

    def _join(self, components: Sequence[T_co], turn: Callable[[], int | None]) -> None:
        """Store the components of all replicas of this rank: see `join_components`."""
        self._components, self._turn = tuple(components), turn
        for component in components:
            _containers[id(component)] = self

    @property
    def values(self) -> tuple[T_co, ...]:
        """Components on this rank, in the order of the replicas. Local."""
        return self._components

    def _own(self) -> Any:
        turn = self._turn
        if turn is None:  # a program has created it, or there is one replica
            # A context variable: each replica runs in its own context, and threads do not
            # share it.
            expected = self._num_here.get()
            if expected != 1:
                raise ValueError(
                    f"{self!r} holds 1 component, but this rank has {expected} replicas. Use a "
                    "value that strategy.run or distribute_values_from_function "
                    "returns."
                )
            return self._component
        position = turn()
        if position is None:
            if len(self._components) > 1:
                raise ValueError(
                    f"{self!r} holds the components of {len(self._components)} replicas, but only "
                    "one is needed here. Use it in a function that you pass to strategy.run, or "
                    "use its values."
                )
            position = 0
        return self._components[position]

    def __repr__(self) -> str:
        return f"PerReplica({', '.join(map(brief, self._components))})"

    def _why_no_array(self, what: str) -> str:
        """Return the error message for `what`, which was called outside of `Strategy.run`."""
        return (
            f"{what} got a PerReplica: forgot strategy.run? A PerReplica has one part per "
            "replica. Use strategy.reduce(op, value) to combine the parts, "
            "strategy.run(fn, args=(value,)) to compute with each, or numpy.asarray(value) for "
            "this rank's part."
        )


class Mirrored(DistributedValues[T_co], NDArrayOperatorsMixin):
    """A value that is the same on all replicas, such as the result of a reduction.

    It has the operators of arrays, and NumPy functions accept it. Their results are plain arrays.

    Examples
    --------
    >>> strategy.extended.broadcast_to(np.ones(2), "cpu:0") * 2
    array([2., 2.])
    """

    __slots__ = ()
    __array_priority__ = 101  # higher than the priority of CuPy's arrays

    def __rmatmul__(self, other: Any) -> Any:
        return unwrap_mirrored(other) @ self._component

    @ForNumPy
    def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:
        if any(isinstance(out, Mirrored) for out in kwargs.get("out", ())):
            raise TypeError(
                "A Mirrored value cannot be the output of a NumPy function. Use its result."
            )
        return getattr(ufunc, method)(*map(unwrap_mirrored, inputs), **kwargs)

    def __cupy_get_ndarray__(self) -> Any:
        return on_device(self._component)

    def _not_in_place(self, other: Any) -> Any:
        return NotImplemented  # so that ``m += 1`` creates a new value, as for numbers

    __iadd__ = __isub__ = __imul__ = __itruediv__ = __ifloordiv__ = __imod__ = _not_in_place
    __ipow__ = __ilshift__ = __irshift__ = __iand__ = __ixor__ = __ior__ = _not_in_place
    __imatmul__ = _not_in_place

    def __getitem__(self, index: Any) -> Any:
        return self._component[index]

    def __len__(self) -> int:
        return len(self._component)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._component)

    def __float__(self) -> float:
        return float(self._component)

    def __int__(self) -> int:
        return int(self._component)

    def __complex__(self) -> complex:
        return complex(self._component)

    def __index__(self) -> int:
        return as_index(self._component)

    def __bool__(self) -> bool:
        return bool(self._component)


@nests.leaf_type
@dataclass(frozen=True, eq=False)
class IndexedSlices:
    """Rows of a larger array: ``dense[indices[i]] = values[i]``.

    Sequences are converted to arrays; arrays and tensors are stored unchanged. Only for
    `Variable.batch_scatter_update`, indices may have batch axes in front.

    Raises
    ------
    ValueError
        If the lengths of `values` and `indices` differ, or `dense_shape` does not match.
    TypeError
        If `indices` are not integers, or `values` are not numbers.

    Examples
    --------
    >>> ms.IndexedSlices(np.ones((2, 8)), [4, 1], (10, 8))
    IndexedSlices(float64 (2, 8), indices=array([4, 1]), dense_shape=(10, 8))
    """

    values: Array
    """Rows of shape ``(n, *dense_shape[1:])``, after the batch axes if there are any."""
    indices: Array
    """Integer row numbers of shape ``(n,)`` or ``(*batch, n)``; duplicates add up."""
    dense_shape: tuple[int, ...] | None = None
    """Shape of the array that the rows belong to, if known."""

    if TYPE_CHECKING:  # the arguments may have more general types than the fields

        def __init__(
            self,
            values: npt.ArrayLike,
            indices: npt.ArrayLike,
            dense_shape: Sequence[int] | None = None,
        ) -> None: ...

    def __post_init__(self) -> None:
        given_indices: object = self.indices
        values, indices = _as_rows(self.values), _as_rows(given_indices)
        if indices.shape == (0,) and isinstance(given_indices, list | tuple):
            indices = np.zeros(0, np.int64)  # an empty sequence has no dtype
        if _kind(indices) not in "iu":
            raise TypeError(
                f"IndexedSlices needs integer indices, not {self.indices!r} of dtype "
                f"{indices.dtype}."
            )
        if _kind(values) in "OSUMm":
            raise TypeError(f"IndexedSlices needs numbers as values, not {self.values!r}.")
        values_shape, indices_shape = tuple(values.shape), tuple(indices.shape)
        axes = len(indices_shape)
        if axes == 0 or values_shape[:axes] != indices_shape:
            raise ValueError(
                f"IndexedSlices needs one index for each row of values: values have the shape "
                f"{values_shape}, indices {indices_shape}."
            )
        object.__setattr__(self, "values", values)
        object.__setattr__(self, "indices", indices)
        if self.dense_shape is not None:
            dense_shape = tuple(operator.index(length) for length in self.dense_shape)
            without_rows = (*dense_shape[: axes - 1], *dense_shape[axes:])
            if len(dense_shape) < axes or without_rows != (
                *values_shape[: axes - 1],
                *values_shape[axes:],
            ):
                raise ValueError(
                    f"IndexedSlices: rows of the shape {values_shape[axes:]} do not fit into "
                    f"dense_shape {dense_shape}."
                )
            object.__setattr__(self, "dense_shape", dense_shape)

    def __repr__(self) -> str:
        values, indices = brief(self.values), brief(self.indices)
        return f"IndexedSlices({values}, indices={indices}, dense_shape={self.dense_shape})"


def _as_rows(value: Any) -> Any:
    if isinstance(value, PerReplica):
        raise TypeError(value._why_no_array("IndexedSlices"))
    if is_foreign(value):
        return adopted("IndexedSlices", value)
    return value if is_array(value) or is_tensor(value) else np.asarray(value)


def _kind(array: Any) -> str:
    """Return the kind of dtype of an array or tensor, as NumPy's letter."""
    if not is_tensor(array):
        return str(array.dtype.kind)
    name = str(array.dtype).removeprefix("torch.")
    return "i" if name.startswith(("int", "uint")) else "b" if name == "bool" else "f"


def join_components(components: Sequence[T], turn: Callable[[], int | None]) -> PerReplica[T]:
    """Return the `PerReplica` of the components of several replicas on this rank.

    `turn` returns the position of the replica that runs, or ``None`` outside of replicas.
    """
    joined = PerReplica(components[0])
    joined._join(components, turn)
    return joined


def is_value(leaf: object) -> bool:
    """Return whether `leaf` is an array, of any library, a number, `IndexedSlices` or `Ragged`."""
    known = is_array(leaf) or is_number(leaf) or is_tensor(leaf)
    return known or isinstance(leaf, IndexedSlices | Ragged) or is_foreign(leaf)


def local_component(leaf: Any) -> Any:
    """Return this rank's component of a distributed value, and anything else unchanged."""
    return leaf._own() if isinstance(leaf, DistributedValues) else leaf


def batches_of(nest: Any) -> Sequence[tuple[int, int]]:
    """Return epoch and number of each batch in `nest` that is from a distributed dataset."""
    if isinstance(nest, PerReplica):
        batch = getattr(nest, "_batch", None)
        return () if batch is None else (batch,)
    if isinstance(nest, dict):
        nest = nest.values()
    elif not isinstance(nest, tuple | list):
        return ()
    return [batch for each in nest for batch in batches_of(each)]


def localize(nest: Any) -> Any:
    """Return `nest` with this rank's component of each distributed value."""
    if type(nest) is np.ndarray:
        return nest
    return nests.map_nest(local_component, nest)


def per_replica(nest: Any) -> Any:
    """Return `nest` with each array or number wrapped in a `PerReplica`."""
    return nests.map_nest(lambda leaf: PerReplica(leaf) if is_value(leaf) else leaf, nest)


def mirror(nest: Any) -> Any:
    """Return `nest` with each array or number wrapped in a `Mirrored`."""
    return nests.map_nest(lambda leaf: Mirrored(leaf) if is_value(leaf) else leaf, nest)


def register_storage(storage: Array, variable: Any) -> None:
    """Let `container_of` return `variable` for views of its `storage`."""
    # The base of a NumPy view is always the owner of the memory, even for views of views.
    memory = storage if storage.base is None else storage.base
    _by_storage[id(memory)] = variable


def container_of(value: Any) -> Any:
    """Return the variable or distributed value that `value` is a component of, or `value`."""
    storage = getattr(value, "base", None)
    variable = _by_storage.get(id(storage)) if storage is not None else None
    return _containers.get(id(value), value) if variable is None else variable


def unwrap_mirrored(leaf: Any) -> Any:
    """Return the component of a `Mirrored` value, and anything else unchanged."""
    return leaf.values[0] if isinstance(leaf, Mirrored) else leaf
