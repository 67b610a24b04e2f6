"""Hook for PyTorch: how checkpoints take tensors and objects that keep their state in them.

`mpistrat.torch.states` fills it. It is loaded when a program that has imported PyTorch brings the
first tensor or object of it, or when a file has tensors; so nothing here imports PyTorch.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

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
    """A tensor on its way into a file; NumPy makes an array of it, which may need a copy."""

    shape: tuple[int, ...]
    dtype: np.dtype
    """As it is stored."""
    tensor_dtype: str
    """The name of the tensor's own dtype."""
    is_view: bool
    """Whether the array is the tensor's memory."""
    num_ranks: int
    """How many ranks share its elements, 0 where it is no DTensor; for others `__array__` is
    collective."""
    is_here: bool
    """Whether this rank is one of them."""

    @property
    def size(self) -> int:
        """How many elements it has."""

    @property
    def mesh(self) -> str:
        """The ranks that share its elements, as a text; empty where no rank can write a part."""

    def shards(self) -> Iterator[tuple[Box, np.ndarray]]:
        """Yield the parts that this rank has, and no rank of its mesh before it."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        """Return the values."""


class TensorState:
    """The state of an object of PyTorch, whose dicts keep their keys and whose tuples stay such.

    Parameters
    ----------
    target : object with ``state_dict()`` and ``load_state_dict()``
    """

    is_mirrored = False
    """Whether its tensors are those of replicas: rank 0's are saved, also if they have drifted."""

    def __init__(self, target: Any) -> None:
        self._target = target

    def mirrored_keys(self, keys: Iterable[str]) -> set[str]:
        """Return those of `keys` whose tensors are to be equal on all ranks."""
        return set(keys) if self.is_mirrored else set()

    @property
    def may_refuse(self) -> bool:
        """Whether it may raise for a state in which `differences` finds nothing."""
        return True

    @property
    def replaces_tensors(self) -> bool:
        """Whether it takes over the tensors of a state, and leaves those that it had."""
        return False

    def state_dict(self) -> dict[Any, Any]:
        """Return the state."""
        state: dict[Any, Any] = self._target.state_dict()
        return state

    def load_state_dict(self, state: dict[Any, Any]) -> None:
        """Take over a state."""
        self._target.load_state_dict(state)

    def differences(self, path: str, state: dict[Any, Any]) -> Iterator[str]:
        """Yield why the object at `path` cannot take a state, whose tensors have no values."""
        yield from ()

    def shards(self, state: dict[Any, Any]) -> Iterator[tuple[Any, Box | None]]:
        """Yield each tensor of a state without values, and the part that this rank needs of it.

        ``None`` is for a tensor that it needs as a whole. What is not yielded is needed so too.
        """
        yield from ()

    def __repr__(self) -> str:
        return repr(self._target)


class TensorLibrary(Protocol):
    """What a checkpoint asks of PyTorch."""

    def state_of(self, value: object) -> TensorState | None:
        """Return an adapter for an object of PyTorch with state, ``None`` for others."""

    def world_strategy(self) -> Any:
        """Return the strategy that carries the process group of all ranks, ``None`` without one."""

    def stored(self, tensor: Any) -> TensorArray:
        """Return `tensor` as a file holds it, or raise TypeError with what it is instead."""

    def identity(self, tensor: Any) -> Hashable:
        """Return what tied tensors have in common, ``None`` where nothing can be."""

    def tensor(self, array: np.ndarray | LoadedShard, dtype: str) -> Any:
        """Return an array that was stored for a tensor of `dtype` as one, with its memory.

        Of a shard it is what `TensorState.load_state_dict` takes in its place.
        """

    def blank(self, array: np.ndarray, dtype: str) -> Any:
        """Return what `tensor` does, without memory."""


def tensor_library() -> TensorLibrary:
    """Return the library; ValueError where PyTorch is not installed."""
    if pytorch.import_torch() is None:
        raise ValueError("it holds tensors of PyTorch, which is not installed here")
    library: TensorLibrary = pytorch.tensor_library()
    return library


def tensor_state(value: object) -> TensorState | None:
    """Return an adapter for an object of PyTorch with state, ``None`` for others."""
    if not pytorch.is_loaded() or isinstance(value, type) or not _is_of_torch(type(value)):
        return None
    return tensor_library().state_of(value)


def world_strategy() -> Any:
    """Return the strategy that carries PyTorch's group of all ranks, ``None`` without one."""
    return tensor_library().world_strategy() if "mpistrat.torch" in sys.modules else None


def _is_of_torch(kind: type) -> bool:
    return any(each.__module__.partition(".")[0].startswith("torch") for each in kind.__mro__)


def holds_tensors(value: object) -> bool:
    """Return whether there are tensors in nested dicts, lists and tuples."""
    if isinstance(value, dict):
        return any(map(holds_tensors, value.values()))
    if isinstance(value, list | tuple):
        return any(map(holds_tensors, value))
    return pytorch.is_tensor(value)
