"""Collective operations: one file each, with its check, forward and backward pass on arrays.

The replica context, its groups and the process group of PyTorch all use them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np

from mpistrat.arrays import Array
from mpistrat.collectives.collectives import CollectiveCall
from mpistrat.collectives.reduction import dtype_name


class Operation(ABC):
    """A collective of arrays with its arguments; one object per call."""

    verbs = "moves", "Move"
    """Verbs for errors: what it does to arrays, and what users should do with parts of others."""

    @property
    def has_gradient(self) -> bool:
        """Whether it can be differentiated."""
        return True

    @abstractmethod
    def forward(
        self, call: CollectiveCall, arrays: Sequence[Array], structure: object = ()
    ) -> list[Array]:
        """Return the results for `arrays`, in fresh memory on their device. **Collective**."""

    @abstractmethod
    def backward(
        self, call: CollectiveCall, leaves: Sequence[int], gradients: Sequence[np.ndarray]
    ) -> list[np.ndarray]:
        """Return the gradients of some `leaves` from their results' gradients. **Collective**."""


def described(arrays: Sequence[Array]) -> tuple[object, ...]:
    """Return dtypes and shapes, which ranks compare."""
    return tuple((dtype_name(array.dtype), tuple(array.shape)) for array in arrays)


def check_sendable(kind: str, arrays: Sequence[Array]) -> None:
    """Raise for arrays of Python objects."""
    for array in arrays:
        if array.dtype.hasobject:
            raise TypeError(f"{kind}: an array of dtype object cannot be sent.")


def axis_of(call: CollectiveCall, name: str, axis: int, array: Array) -> int:
    """Return the position of `axis` in the shape of `array`."""
    ndim, shape = len(array.shape), tuple(array.shape)
    if ndim == 0:
        raise ValueError(
            f"{call.kind} divides arrays along an axis, but the value is 0-d on "
            f"{call.channel.place()}. Add an axis, as in array[None]."
        )
    if not -ndim <= axis < ndim:
        raise ValueError(
            f"{call.kind}: {name} {axis} is out of range for the array of shape {shape} on "
            f"{call.channel.place()}. Use an axis in [{-ndim}, {ndim - 1}]."
        )
    return axis % ndim
