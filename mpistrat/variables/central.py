"""Central variables: one storage for all ranks of a node, of which each rank writes a part."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from mpistrat.arrays import Array, Device, place
from mpistrat.collectives.collectives import CollectiveCall, Collectives
from mpistrat.collectives.reduction import dtype_name
from mpistrat.comm.node_file import share_memory_file
from mpistrat.system.text import readable_size
from mpistrat.values import IndexedSlices
from mpistrat.variables.divided import DividedElements
from mpistrat.variables.initial import InitialValue
from mpistrat.variables.kinds import MirroredVariable
from mpistrat.variables.routing import Partition, scatter_rows
from mpistrat.variables.variable import read_only
from mpistrat.variables.writes import Write


class CentralVariable(DividedElements, MirroredVariable, kind="central"):
    """A variable of `CentralStorageStrategy`: its memory is the same on all ranks.

    Writes mean what they do for a mirrored variable. Each rank writes some of the elements, and
    returns when all have: no rank reads half of a write.
    """

    def _begin(
        self, call: CollectiveCall, initial: InitialValue
    ) -> tuple[np.ndarray, tuple[int, ...]]:
        whole = None if initial.is_zero else initial.whole(self._name)
        shape = initial.shape or () if whole is None else whole.shape
        dtype = initial.dtype if whole is None else whole.dtype
        call.agree((dtype_name(dtype), shape), self._checked_modes(dtype))
        size = math.prod(shape)
        self._partition = Partition(size, max(1, min(size, call.channel.size)), call.channel.size)
        what = f"The variable {self._name!r}"
        self._on_device: Array | None = None
        storage = take_node_memory(call, size * dtype.itemsize, what).view(dtype).reshape(shape)
        if whole is not None:
            own = self._partition.ranges[call.channel.rank]
            flat = scatter_rows(call, self._partition, whole.reshape(-1))
            storage.reshape(-1)[own.start : own.stop] = flat
            call.agree("with its initial value")
        self._stage: list[np.ndarray] | None = None
        self.strategy.extended._note_central(self)
        return storage, shape

    def _home(self, collectives: Collectives) -> Device:
        return Device("cpu")

    @property
    def device(self) -> str:
        """The full string of the device that holds it: the host of rank 0. Local."""
        return str(self._target.device.on_task(0))

    @property
    def _own_elements(self) -> range:
        return self._partition.ranges[self._collectives.rank]

    @property
    def _own_storage(self) -> np.ndarray:
        own = self._own_elements
        flat: np.ndarray = self._storage.reshape(-1)
        return flat[own.start : own.stop]

    def _own(self, value: Any) -> Any:
        return self._own_elements_of(value, self._own_elements)

    @property
    def storage(self) -> Array:
        """The memory itself, writable, the same on all ranks. Local.

        What is written there, all ranks see at once, and nothing keeps them in step.
        """
        self._check_is_there()
        return self._storage

    def value(self) -> Array:
        """Return the value: a read-only view of the memory of all ranks. Local.

        A later write shows through. On a GPU it is a copy, made once after each write.
        """
        self._check_is_there()
        device = self._collectives.device
        if device.kind == "cpu":
            return read_only(self._storage)
        if self._on_device is None:
            self._on_device = place(self._storage, device)
        return self._on_device

    def _check_is_there(self) -> None:
        collectives = self._collectives
        if collectives.is_closed and collectives.channel.closed is not None:
            raise collectives.channel.closed

    def _lose_storage(self) -> None:
        """Give the memory up when the strategy is closed."""
        self._storage = np.empty(0, self.dtype)
        self._on_device = self._stage = None

    @property
    def stage(self) -> list[np.ndarray] | None:
        """The gradient buffers of all ranks, flat, if there are any."""
        return self._stage

    def _set_stage(self, memory: list[np.ndarray]) -> None:
        self._stage = [of_rank.view(self.dtype) for of_rank in memory]

    def _apart(self, value: Any) -> Any:
        """Return a checked `value`, copied if it is in the memory that the ranks are to write."""
        if isinstance(value, IndexedSlices):
            return IndexedSlices(self._apart(value.values), self._apart(value.indices))
        is_ours = isinstance(value, np.ndarray) and np.may_share_memory(value, self._storage)
        return value.copy() if is_ours else value

    def _merge(self, call: CollectiveCall, write: Write, value: Any) -> Any:
        return self._own(super()._merge(call, write, value))

    def _write_locally(self, write: Write, value: Any) -> None:
        """Write in update context, where one rank acts for all."""
        self._check_is_there()
        super()._write_locally(write, value)
        self._note_written()

    def _settle(self) -> None:
        """Wait until every rank has written its part. **Collective**."""
        self._note_written()
        if self._collectives.size > 1:
            with self._collectives.call("write of central variable", self.name) as call:
                call.agree()

    def _note_written(self) -> None:
        self._on_device = None

    def _load_piece(self, start: int, piece: np.ndarray) -> None:
        own = self._own_elements
        first, last = max(start, own.start), min(start + piece.size, own.stop)
        if first < last:
            self._storage.reshape(-1)[first:last] = piece[first - start : last - start]
        self._note_written()

    def __deepcopy__(self, memo: dict[int, Any]) -> CentralVariable:
        """Return a copy in memory of its own. **Collective**."""
        twin = object.__new__(type(self))
        vars(twin).update(vars(self))
        memo[id(self)] = twin
        twin._on_device = twin._stage = None
        with self._collectives.call("copy of central variable", self.name) as call:
            call.agree()
            memory = take_node_memory(call, self._storage.nbytes, f"A copy of {self.name!r}")
            twin._storage = memory.view(self.dtype).reshape(self.shape)
            twin._own_storage[...] = self._own_storage
            call.agree("written")
        self.strategy.extended._note_central(twin)
        return twin


def take_node_memory(call: CollectiveCall, num_bytes: int, what: str) -> np.ndarray:
    """Return zeros that all ranks share, for `what`. **Collective**, once agreed."""
    if call.channel.size == 1:
        return np.zeros(num_bytes, np.uint8)
    with call.communicator() as comm:
        memory = share_memory_file(comm, num_bytes)
    if memory is None:
        raise ValueError(
            f"{what} needs {readable_size(num_bytes)} ({num_bytes} bytes) of memory that all ranks "
            "of the node share, which the system does not give: too much for its memory or for the "
            "limits of a process (ulimit -v, -n, -f), or no memfd_create. Use MPIStrategy, which "
            "keeps a copy on each rank."
        )
    return memory
