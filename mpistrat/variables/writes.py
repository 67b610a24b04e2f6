"""Writes to variables: the values they accept, how replicas merge these, and their effect."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np

from mpistrat.arrays import Array, Device, adopted, host_view, is_foreign, place
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.operations.broadcast import broadcast
from mpistrat.comm.wire import is_floating, named_dtype, wire_dtype
from mpistrat.options import ReduceOp, VariableAggregation, VariableSynchronization
from mpistrat.pytorch import host_array, is_bfloat16, is_tensor
from mpistrat.values import DistributedValues, IndexedSlices, PerReplica

_KINDS = "biufc"


def numeric(name: str, value: Any, dtype: Any) -> np.ndarray:
    """Return the initial `value` of the variable `name` as a host array."""
    if not isinstance(name, str):
        raise TypeError(f"The name of a variable must be a string, not {name!r}.")
    if isinstance(value, np.ma.MaskedArray):
        raise ValueError(
            f"The variable {name!r} cannot hold a masked array. Fill it first: array.filled(value)."
        )
    if isinstance(value, PerReplica):
        raise ValueError(value._why_no_array(f"The variable {name!r}"))
    if is_foreign(value):
        value = adopted(f"The variable {name!r}", value)
    array = _array_of_tensor(value) if is_tensor(value) else host_view(value)
    if dtype is not None:
        dtype = np.dtype(dtype)
        if array.dtype.kind == "c" and dtype.kind != "c":
            raise ValueError(
                f"The variable {name!r} of dtype {dtype} cannot hold a complex initial value."
            )
        array = _exact(value, array)
        if not hasattr(value, "dtype") and not _holds(dtype, array):
            raise ValueError(
                f"The variable {name!r} of dtype {dtype} cannot hold the initial value {value!r} "
                "exactly. Pass a different dtype, or a NumPy array, which is cast."
            )
        if wraps_around(array, dtype):
            raise ValueError(
                f"The variable {name!r} of dtype {dtype} cannot hold the initial value: its "
                f"integers from {int(array.min())} to {int(array.max())} would wrap around. Create "
                "the variable with a wider dtype."
            )
        array = array.astype(dtype)
    if array.dtype.kind not in "biuc" and not is_floating(array.dtype):
        raise ValueError(
            f"The variable {name!r} cannot hold a value of dtype {array.dtype}: "
            "pass an array of bools, integers, floats or complex numbers."
        )
    # Data from a file may have the opposite byte order, which MPI's datatypes and the compiled code
    # do not support.
    return array.astype(array.dtype.newbyteorder("="), copy=False)


def _array_of_tensor(tensor: Any) -> np.ndarray:
    """Return a tensor as an array of the same dtype, also bfloat16."""
    array = host_array(tensor)
    return array.astype(named_dtype("bfloat16")) if is_bfloat16(tensor) else array


def _as_given(what: str, value: Any) -> tuple[Array, bool]:
    """Return the value of a write as an array, and whether it was plain Python."""
    if isinstance(value, DistributedValues):
        value = value.values[0]
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{what} does not take masked arrays. Fill it first: array.filled(value).")
    if isinstance(value, IndexedSlices):
        raise TypeError(
            f"{what} takes a whole value, not IndexedSlices. Use scatter_update, scatter_add or "
            "scatter_sub."
        )
    if is_tensor(value):
        value = _array_of_tensor(value)
    elif is_foreign(value):
        value = adopted(what, value)
    is_plain = not hasattr(value, "dtype")
    return (_exact(value, np.asarray(value)) if is_plain else value), is_plain


def _exact(value: Any, array: np.ndarray) -> np.ndarray:
    """Return Python integers as uint64 if they need 64 bits, which NumPy converts to floats."""
    # 2**64 is included, because 2**64 - 1 is rounded to 2**64 as a float64.
    if array.dtype.kind != "f" or not array.size or not 2**63 <= array.max() <= 2**64:
        return array
    exact = np.asarray(value, object)
    is_exact = all(isinstance(each, int) and 0 <= each < 2**64 for each in exact.flat)
    return exact.astype(np.uint64) if is_exact else array


def cast_to(what: str, array: Array, is_plain: bool, dtype: np.dtype, device: Device) -> Array:
    """Return `array` in `dtype` on `device`; `array` itself if both already match."""
    if not (_holds(dtype, array) if is_plain else can_cast(array.dtype, dtype)):
        raise TypeError(
            f"{what}: a value of dtype {array.dtype} does not fit into {dtype}. Cast it first."
        )
    if wraps_around(array, dtype):
        raise TypeError(
            f"{what}: the value of dtype {array.dtype} has integers from {int(array.min())} to "
            f"{int(array.max())}, which do not fit into {dtype} and would wrap around. Create the "
            "variable with a wider dtype."
        )
    return place(array, device).astype(dtype, copy=False)


def can_cast(source: np.dtype, target: np.dtype) -> bool:
    """Return whether arrays of dtype `source` may be written to an array of dtype `target`."""
    # They may if the kind is the same or wider, as in NumPy's `same_kind`.
    if target.name == "bfloat16":
        return source.name == "bfloat16" or source.kind in "biuf"
    if source.name == "bfloat16":
        return target.kind in "fc"
    return np.can_cast(source, target, "same_kind")


def wraps_around(array: Array, dtype: np.dtype) -> bool:
    """Return whether an integer in `array` is out of range for the integer type `dtype`."""
    are_integers = array.dtype.kind in "iu" and dtype.kind in "iu"
    if not are_integers or np.can_cast(array.dtype, dtype) or 0 in array.shape:
        return False
    info = np.iinfo(dtype)
    return int(array.min()) < info.min or int(array.max()) > info.max


def _holds(dtype: np.dtype, numbers: np.ndarray) -> bool:
    """Return whether Python numbers, converted to the array `numbers`, fit into `dtype`."""
    # As in NumPy's promotion, only their kind and range count, not their own dtype.
    if dtype.kind not in _KINDS or numbers.dtype.kind not in _KINDS:
        return can_cast(numbers.dtype, dtype)
    if dtype.kind in "iu" and numbers.dtype.kind in "biu" and numbers.size:
        info = np.iinfo(dtype)
        return info.min <= int(numbers.min()) and int(numbers.max()) <= info.max
    order = {"b": 0, "i": 1, "u": 1, "f": 2, "c": 3}
    return order[numbers.dtype.kind] <= order[dtype.kind]


class Modes(NamedTuple):
    """Arguments of a variable besides its value."""

    trainable: bool | None
    synchronization: VariableSynchronization
    aggregation: VariableAggregation

    @property
    def text(self) -> str:
        """The modes as text, which must be equal on replicas that create a variable together."""
        default = Modes(None, VariableSynchronization.AUTO, VariableAggregation.NONE)
        named = self._asdict().items()
        return "".join(f", {n}={each}" for n, each in named if each != getattr(default, n))


def check_modes(name: str, synchronization: Any, aggregation: Any, dtype: np.dtype) -> None:
    """Raise an error for modes that a variable of `dtype` cannot have."""
    for mode, cls in (
        (synchronization, VariableSynchronization),
        (aggregation, VariableAggregation),
    ):
        if not isinstance(mode, cls):
            raise ValueError(
                f"The variable {name!r} was given {mode!r}, but a {cls.__name__} was expected: "
                f"one of {', '.join(cls.__members__)}."
            )
    if synchronization is VariableSynchronization.NONE:
        raise ValueError(
            f"The variable {name!r} was given VariableSynchronization.NONE, which a distributed "
            "variable cannot have. Use AUTO, ON_WRITE or ON_READ."
        )
    if aggregation is VariableAggregation.MEAN and (
        dtype.kind in "biu" or wire_dtype(ReduceOp.MEAN, dtype).kind not in "fc"
    ):
        raise ValueError(
            f"The variable {name!r} of dtype {dtype} cannot have VariableAggregation.MEAN: "
            "the mean needs a floating dtype. Use SUM, or a floating dtype."
        )


@dataclass(frozen=True)
class Target:
    """The properties of a variable that a write needs to know."""

    name: str
    """Name of the variable, for messages."""
    shape: tuple[int, ...]
    """Shape of the value."""
    dtype: np.dtype
    """Dtype of the value."""
    device: Device
    """Device of the storage."""
    aggregation: VariableAggregation
    """How the replicas' writes are combined."""
    is_mirrored: bool
    """Whether it belongs to a strategy that keeps it equal on all replicas."""


class Write(Protocol):
    """One kind of write."""

    @property
    def how(self) -> str:
        """Name of the method, for messages."""

    def checked(self, target: Target, value: Any) -> Any:
        """Check `value`, and return it in the form that the other methods need."""

    def signature(self, value: Any) -> tuple[Any, ...]:
        """Return the properties, besides the values, that must be equal on all ranks."""

    def arrays(self, value: Any) -> list[Array]:
        """Return the arrays of a checked `value`, to compare them."""

    def merged(self, call: CollectiveCall, target: Target, value: Any) -> Any:
        """Return the combined value of all replicas. **Collective**."""

    def apply(self, storage: Array, value: Any) -> None:
        """Write to `storage` in place."""


@dataclass(frozen=True)
class DenseWrite:
    """A write of a whole value."""

    how: str
    apply_to: Callable[[Array, Array], None]
    is_arithmetic: bool = True

    def checked(self, target: Target, value: Any) -> Array:
        """Return `value` as an array of the variable's shape and dtype on its device."""
        if target.shape == () and _NUMBERS.get(type(value)) == target.dtype.char:
            # A shortcut for counters and sums of metrics, which are written many times in a step.
            number = np.asarray(value)
            # An integer beyond 63 bits gets a different dtype, and the checks below decide.
            if number.dtype == target.dtype and target.device.kind == "cpu":
                return number
        what = f"{self.how} of variable {target.name!r}"
        if self.is_arithmetic:
            check_arithmetic(what, target)
        array, is_plain = _as_given(what, value)
        if tuple(array.shape) != target.shape:
            raise ValueError(
                f"{what}: the value has the shape {tuple(array.shape)}, but the variable has "
                f"the shape {target.shape}. Values are not broadcast: pass one of the same shape."
            )
        return cast_to(what, array, is_plain, target.dtype, target.device)

    def signature(self, value: Array) -> tuple[Any, ...]:
        """Return dtype and shape."""
        return (str(value.dtype), tuple(value.shape))

    def arrays(self, value: Array) -> list[Array]:
        """Return the value."""
        return [value]

    def merged(self, call: CollectiveCall, target: Target, value: Array) -> Array:
        """Return rank 0's value, or the sum or mean. **Collective**."""
        if target.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return broadcast(call, value)
        (merged,) = call.all_reduce(ReduceOp[target.aggregation.name], [value])
        return merged

    def apply(self, storage: Array, value: Array) -> None:
        """Write to `storage` in place."""
        self.apply_to(storage, value)


_NUMBERS = {float: "d", np.float64: "d", int: "l"}
"""Dtypes to which NumPy converts numbers, if they fit."""


def check_arithmetic(what: str, target: Target) -> None:
    """Raise an error for arithmetic on bools."""
    if target.dtype.kind == "b":
        raise TypeError(
            f"{what}: the variable is of dtype bool, which has no arithmetic. Use assign with "
            "the new value, or a variable of an integer dtype."
        )


def _copy(storage: Array, array: Array) -> None:
    storage[...] = array


def _add(storage: Array, array: Array) -> None:
    storage += array


def _subtract(storage: Array, array: Array) -> None:
    storage -= array


ASSIGN: Write = DenseWrite("assign", _copy, is_arithmetic=False)
ASSIGN_ADD: Write = DenseWrite("assign_add", _add)
ASSIGN_SUB: Write = DenseWrite("assign_sub", _subtract)
