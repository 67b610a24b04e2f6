"""Transfer of batches to the device of a replica, during its computation."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from mpistrat import nests
from mpistrat.arrays import Array, Device, host_view, is_array, is_number, is_on_host, place
from mpistrat.cuda_api import Stream, has_device_dtype, pinned_empty
from mpistrat.ragged import Ragged

__all__ = ["transfer_to"]


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
            self._stream, self._consumer = Stream.new(), Stream.current()
        self._under_way: list[_Arrival] = []

    def begin(self, element: Any) -> Any:
        """Queue copies of the arrays in host memory."""
        with self._device.current():
            return nests.map_nest(self._begin, element)

    def _begin(self, leaf: Any) -> Any:
        if isinstance(leaf, Ragged):
            return leaf._map(self._begin)
        if not _is_moved(leaf):
            return leaf
        if not is_on_host(leaf):
            return place(leaf, self._device)
        source = np.asarray(leaf)
        if not has_device_dtype(source):
            return source
        if not source.size:
            return place(source, self._device)
        buffer = pinned_empty(source.size, source.dtype.newbyteorder("="))
        buffer.reshape(source.shape)[...] = source
        target = self._device.namespace().empty(source.shape, dtype=buffer.dtype)
        # The program may have given this memory up before what it has queued is done with it.
        self._stream.wait_event(self._consumer.record())
        self._stream.copy(target, buffer)
        arrival = _Arrival(target, buffer, self._stream.record())
        # The pools of memory know no events: what is still copied may not go back to them.
        self._under_way = [each for each in self._under_way if not each.event.done]
        self._under_way.append(arrival)
        return arrival

    def end(self, leaf: Any) -> Any:
        """Have what the program queues from now on wait for the copy."""
        if isinstance(leaf, Ragged):
            return leaf._map(self.end)
        if not isinstance(leaf, _Arrival):
            return leaf
        with self._device.current():
            Stream.current().wait_event(leaf.event)
        return leaf.target

    def close(self) -> None:
        """Wait for all copies."""
        for each in self._under_way:
            each.event.synchronize()
        self._under_way = []


class _Arrival:
    """An array that is being copied to the device."""

    __slots__ = ("buffer", "event", "target")

    def __init__(self, target: Array, buffer: np.ndarray, event: Any) -> None:
        self.target, self.buffer, self.event = target, buffer, event


def _is_moved(leaf: Any) -> bool:
    return is_array(leaf) or is_number(leaf)


def transfer_to(device: Device | None) -> _Transfer:
    """Return the transfer to `device`, with ``None`` for host memory."""
    if device is not None and device.kind == "gpu":
        return _DeviceTransfer(device)
    return _HostTransfer()
