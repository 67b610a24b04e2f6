"""Transfer of batches to the device of a replica, during its computation."""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np

from mpistrat import nests
from mpistrat.arrays import Array, Device, host_view, is_array, is_number, is_on_host, place
from mpistrat.cuda_api import Stream, has_device_dtype, pinned_empty
from mpistrat.ragged import Ragged


class _Transfer(Protocol):
    """Brings elements to a device in two steps; others may begin in between."""

    def begin(self, element: Any) -> Any:
        """Begin to bring an element, in any thread."""

    def end(self, leaf: Any) -> Any:
        """Return a leaf of what `begin` has returned, once it is there."""

    def close(self) -> None:
        """Wait for elements that nobody will ask for."""


class _HostTransfer:
    """To host memory, where elements are made already."""

    def begin(self, element: Any) -> Any:
        """Return the element."""
        return element

    def end(self, leaf: Any) -> Any:
        """Return the array in host memory."""
        if isinstance(leaf, Ragged):
            return leaf._map(host_view)
        return host_view(leaf) if _is_moved(leaf) else leaf

    def close(self) -> None:
        """Nothing is under way."""


class _DeviceTransfer:
    """To a GPU, through page-locked memory and its own stream, beside what the program computes."""

    # Made in the thread that uses the elements, whose current stream is the one of their use.

    def __init__(self, device: Device) -> None:
        self._device = device
        with device.current():
            self._namespace = device.namespace()
            self._stream, self._consumer = Stream.new(), Stream.current()
        self._under_way: deque[_Arrival] = deque()

    def begin(self, element: Any) -> Any:
        """Queue copies of the arrays in host memory."""
        begun: list[_Arrival] = []
        with self._device.current():
            element = nests.map_nest(functools.partial(self._prepare, begun), element)
            if begun:
                # The program may have given the memory of the targets up before what it has queued
                # is done with it.
                self._stream.wait_event(self._consumer.record())
                for each in begun:
                    self._stream.copy(each.target, each.source)
                event = self._stream.record()
                for each in begun:
                    each.event = event
        # The pools of memory know no events: what is still copied may not go back to them.
        while self._under_way and self._under_way[0].event.done:
            self._under_way.popleft()
        self._under_way += begun
        return element

    def _prepare(self, begun: list[_Arrival], leaf: Any) -> Any:
        """Return what arrives for a leaf, and add it to `begun` if it is to be copied."""
        if isinstance(leaf, Ragged):
            return leaf._map(functools.partial(self._prepare, begun))
        if not _is_moved(leaf):
            return leaf
        if not is_on_host(leaf):
            return place(leaf, self._device)
        source = np.asarray(leaf)
        if not has_device_dtype(source):
            return source
        if not source.size:
            return place(source, self._device)
        if not (source.flags.c_contiguous and source.dtype.isnative and _is_for_transfer(source)):
            # Only page-locked memory is copied while the program continues. This buffer also keeps
            # the values, if the program writes to its array before the copy ends.
            buffer = pinned_empty(source.size, source.dtype.newbyteorder("="))
            buffer = buffer.reshape(source.shape)
            buffer[...] = source
            source = buffer
        target = self._namespace.empty(source.shape, dtype=source.dtype)
        begun.append(_Arrival(target, source))
        return begun[-1]

    def end(self, leaf: Any) -> Any:
        """Have what the program queues from now on wait for the copy."""
        if isinstance(leaf, Ragged):
            return leaf._map(self.end)
        if not isinstance(leaf, _Arrival):
            return leaf
        with self._device.current():
            # The stream of the program waits for the copy, not this thread.
            Stream.current().wait_event(leaf.event)
        return leaf.target

    def close(self) -> None:
        """Wait for all copies."""
        while self._under_way:
            self._under_way[0].event.synchronize()
            self._under_way.popleft()


class _Arrival:
    """An array that is being copied to the device, once it has an event."""

    __slots__ = ("event", "source", "target")

    def __init__(self, target: Array, source: np.ndarray) -> None:
        self.target, self.source = target, source
        self.event: Any = None


def _is_moved(leaf: Any) -> bool:
    return is_array(leaf) or is_number(leaf)


def transfer_to(device: Device | None) -> _Transfer:
    """Return the transfer to `device`, with ``None`` for host memory."""
    if device is not None and device.kind == "gpu":
        return _DeviceTransfer(device)
    return _HostTransfer()


_MAX_STAGED_BYTES = 2**26
"""Page-locked memory is scarce, and takes long to get."""


def memory_for(device: Device | None) -> Callable[[tuple[int, ...], np.dtype], np.ndarray] | None:
    """Return what makes arrays from which `transfer_to` copies without another copy on the host.

    ``None`` if usual memory does. Nobody may write to such an array once it has been transferred.
    """
    if device is None or device.kind != "gpu":
        return None

    def empty(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        size = math.prod(shape)
        if dtype.hasobject or not 0 < size * dtype.itemsize <= _MAX_STAGED_BYTES:
            return np.empty(shape, dtype)
        with device.current():
            memory = _ReadMemory(pinned_empty(size * dtype.itemsize, np.dtype(np.uint8)))
        return np.asarray(memory).view(dtype).reshape(shape)

    return empty


class _ReadMemory:
    """Owns page-locked memory that nobody writes to once it has been transferred."""

    # A program may have page-locked arrays of its own, and write to them again at once.

    def __init__(self, memory: np.ndarray) -> None:
        self._memory = memory
        self.__array_interface__ = memory.__array_interface__


def _is_for_transfer(array: np.ndarray) -> bool:
    """Return whether the memory of `array` comes from what `memory_for` returns."""
    owner: object = array
    while isinstance(owner, np.ndarray):
        owner = owner.base
    return isinstance(owner, _ReadMemory)
