"""Hook for PyTorch: how checkpoints save tensors and objects that keep their state in tensors.

`mpistrat.torch.states` implements it. That module is loaded when a program that has imported
PyTorch passes its first tensor or object of PyTorch, or when a file has tensors. So nothing here
imports PyTorch. `mpistrat.keras.states` adds the objects of Keras, in the same way.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol, cast

import numpy as np

from mpistrat import pytorch
from mpistrat.sharding import Box


@dataclass(frozen=True)
class LoadedShard:
    """The part of an array in a file that one rank needs."""

    box: Box
    values: np.ndarray

    @property
    def dtype(self) -> np.dtype:
        """The dtype in the file."""
        return self.values.dtype


class TensorArray(Protocol):
    """A tensor that is being saved; NumPy converts it to an array, which may need a copy."""

    shape: tuple[int, ...]
    dtype: np.dtype
    """The dtype in the file."""
    tensor_dtype: str
    """The name of the tensor's own dtype."""
    is_view: bool
    """Whether the array is the tensor's memory."""
    num_ranks: int
    """Number of ranks that share its elements, 0 if it is not a DTensor. If not 0, `__array__` is
    collective."""
    is_here: bool
    """Whether this rank is one of those ranks."""

    @property
    def size(self) -> int:
        """How many elements it has."""

    @property
    def mesh(self) -> str:
        """The ranks that share its elements, as a string; empty if no rank can write a part."""

    def shards(self) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield the parts that this rank has, and that no earlier rank of its mesh has."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the values."""


class TensorState:
    """The state of an object of PyTorch, whose dicts keep their keys and whose tuples stay tuples.

    Parameters
    ----------
    target : object with ``state_dict()`` and ``load_state_dict()``
        The object whose state is saved and restored.
    """

    is_mirrored = False
    """Whether replicas hold its tensors: rank 0's are saved, even if the replicas have drifted."""

    def __init__(self, target: Any) -> None:
        self.target = target

    def mirrored_keys(self, keys: Iterable[str]) -> set[str]:
        """Return the `keys` whose tensors must be equal on all ranks."""
        return set(keys) if self.is_mirrored else set()

    @property
    def may_refuse(self) -> bool:
        """Whether it may raise for a state in which `differences` finds nothing."""
        return True

    @property
    def replaces_tensors(self) -> bool:
        """Whether it adopts the tensors of a state, and does not write to its old tensors."""
        return False

    def state_dict(self) -> dict[Any, Any]:
        """Return the state."""
        state: dict[Any, Any] = self.target.state_dict()
        return state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        """Set a state."""
        self.target.load_state_dict(state)

    def differences(self, path: str, state: dict[Any, Any]) -> Iterator[str]:
        """Yield why the object at `path` cannot take a state, whose tensors have no values."""
        yield from ()

    def shards(self, state: dict[Any, Any]) -> Iterator[tuple[Any, Box | None]]:
        """Yield each tensor of a state without values, and the part of it that this rank needs.

        The part is ``None`` for a tensor that the rank needs as a whole. It also needs all tensors
        that are not yielded as a whole.
        """
        yield from ()

    def __repr__(self) -> str:
        return repr(self.target)


class TensorLibrary(Protocol):
    """The functions that a checkpoint needs from PyTorch."""

    def state_of(self, value: object) -> TensorState | None:
        """Return an adapter for an object of PyTorch with state, ``None`` for others."""

    def world_strategy(self) -> Any:
        """Return the strategy of the process group of all ranks, ``None`` without one."""

    def stored(self, tensor: Any) -> TensorArray:
        """Return `tensor` as a file stores it, or raise TypeError that names its kind."""

    def identity(self, tensor: Any) -> Hashable:
        """Return a key that is equal for tied tensors, ``None`` if the tensor cannot be tied."""

    def tensor(self, array: np.ndarray | LoadedShard, dtype: str) -> Any:
        """Return a tensor of `dtype` from the array that a file stored for it, in the same memory.

        For a shard, return the value that `TensorState.load_state_dict` takes in place of the
        tensor.
        """

    def blank(self, array: np.ndarray, dtype: str) -> Any:
        """Return the same tensor as `tensor`, without memory."""


def tensor_library() -> TensorLibrary:
    """Return the library; ValueError if PyTorch is not installed."""
    if pytorch.import_torch() is None:
        raise ValueError("it holds tensors of PyTorch, which is not installed here")
    library: TensorLibrary = pytorch.tensor_library()
    return library


def tensor_state(value: object) -> TensorState | None:
    """Return an adapter for an object on PyTorch with state, ``None`` for others."""
    if not pytorch.is_loaded() or isinstance(value, type):
        return None
    packages = _packages_of(type(value))
    states_of = pytorch.states_of(packages)
    if states_of is not None:
        return cast("TensorState | None", states_of(value))
    is_of_torch = any(each.startswith("torch") for each in packages)
    return tensor_library().state_of(value) if is_of_torch else None


def world_strategy() -> Any:
    """Return the strategy of PyTorch's group of all ranks, ``None`` without one."""
    return tensor_library().world_strategy() if "mpistrat.torch" in sys.modules else None


def _packages_of(kind: type) -> set[str]:
    """Return the packages of a class and of its bases."""
    return {each.__module__.partition(".")[0] for each in kind.__mro__}


def holds_tensors(value: object) -> bool:
    """Return whether nested dicts, lists and tuples contain tensors."""
    if isinstance(value, dict):
        return any(map(holds_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_tensors, value))
    return pytorch.is_tensor(value)
