"""The ways to write to a variable: what each accepts, how replicas merge it, what it does."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from mpistrat.arrays import Array, Device
from mpistrat.collectives import CollectiveCall
from mpistrat.options import ReduceOp, VariableAggregation
from mpistrat.variables.checks import as_given, cast_to

__all__ = [
    "ASSIGN",
    "ASSIGN_ADD",
    "ASSIGN_SUB",
    "DenseWrite",
    "Target",
    "Write",
    "check_arithmetic",
]


@dataclass(frozen=True)
class Target:
    """What a write needs to know about its variable."""

    name: str
    """For messages."""
    shape: tuple[int, ...]
    """Shape of the value."""
    dtype: Any
    """Dtype of the value."""
    device: Device
    """Where the storage lies."""
    aggregation: VariableAggregation
    """How the replicas' writes become one."""
    is_mirrored: bool
    """Whether it belongs to a strategy that keeps it equal on all replicas."""


class Write(Protocol):
    """One way to write."""

    @property
    def how(self) -> str:
        """Name of the method, for messages."""

    def checked(self, target: Target, value: Any) -> Any:
        """Return `value` in the form that the other methods take. Local."""

    def words(self, value: Any) -> tuple[Any, ...]:
        """Return what ranks that give one value for all must agree on. Local."""

    def merged(self, call: CollectiveCall, target: Target, value: Any) -> Any:
        """Return the one value that the replicas' values amount to. **Collective**."""

    def apply(self, storage: Array, value: Any) -> None:
        """Write to `storage` in place. Local."""


@dataclass(frozen=True)
class DenseWrite:
    """A write of a whole value."""

    how: str
    apply_to: Callable[[Array, Array], None]
    is_arithmetic: bool = True

    def checked(self, target: Target, value: Any) -> Array:
        """Return `value` as an array of the variable's shape and dtype on its device. Local."""
        if target.shape == () and _NUMBERS.get(type(value)) == target.dtype.char:
            # What counters and sums of metrics take, many times in a step.
            number = np.asarray(value)
            if number.dtype == target.dtype and target.device.kind == "cpu":
                return number
        what = f"{self.how} of variable {target.name!r}"
        if self.is_arithmetic:
            check_arithmetic(what, target)
        array, is_plain = as_given(what, value)
        if tuple(array.shape) != target.shape:
            raise ValueError(
                f"{what}: the value has the shape {tuple(array.shape)}, but the variable "
                f"{target.shape}. Values are not broadcast: give one of its shape."
            )
        return cast_to(what, array, is_plain, target.dtype, target.device)

    def words(self, value: Array) -> tuple[Any, ...]:
        """Return dtype and shape. Local."""
        return (str(value.dtype), tuple(value.shape))

    def merged(self, call: CollectiveCall, target: Target, value: Array) -> Array:
        """Return rank 0's value, or the sum or mean. **Collective**."""
        if target.aggregation is VariableAggregation.ONLY_FIRST_REPLICA:
            return call.broadcast(value)
        (merged,) = call.all_reduce(ReduceOp[target.aggregation.name], [value])
        return merged

    def apply(self, storage: Array, value: Array) -> None:
        """Write to `storage` in place. Local."""
        self.apply_to(storage, value)


_NUMBERS = {float: "d", np.float64: "d", int: "l"}
"""The dtypes that NumPy makes of numbers, where they fit."""


def check_arithmetic(what: str, target: Target) -> None:
    """Refuse arithmetic on bools.

    Raises
    ------
    TypeError
        Naming the variable.
    """
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
