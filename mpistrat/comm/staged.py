"""Reduction of device arrays in host memory, where MPI may not see that of the device.

Three buffers in page-locked memory go round: while one comes from the device, the ranks reduce the
second, and the third goes back. So the copies cost little more than the longest of the three.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol

import numpy as np

from mpistrat.arrays import Array
from mpistrat.comm.message import Message
from mpistrat.comm.pool import Pool
from mpistrat.comm.reducer import Reducer
from mpistrat.options import ReduceOp
from mpistrat.sharding import cut

__all__ = ["Copier", "StagedReducer", "part_bytes", "plan_parts"]

_NUM_BUFFERS = 3
_MAX_PART_BYTES = 4 * 2**20
_MIN_PART_BYTES = 2**18
"""Below, it costs more to begin a copy than to do it."""


class _Event(Protocol):
    """The end of a copy."""

    def synchronize(self) -> object:
        """Wait for it. Local."""


class Copier(Protocol):
    """Copies between the host and a device, beside what the program does there. Local."""

    def buffer(self, size: int, dtype: np.dtype) -> np.ndarray:
        """Return a 1-d host array with anything in it, from which copies are fast."""

    def begin(self) -> None:
        """Have each `fetch` that follows wait for what the program has queued on the device.

        What is `put` after it has waited for one, so it needs no more.
        """

    def fetch(self, target: np.ndarray, source: Array, after: _Event | None = None) -> _Event:
        """Begin to copy `source`, on the device, to the host; not before `after`, a `put`."""

    def put(self, target: Array, source: np.ndarray) -> _Event:
        """Begin to copy `source`, part of a `buffer`, to `target` on the device."""

    def end(self) -> None:
        """Have what the program queues from now on wait for all that was `put`."""


def part_bytes(num_bytes: int) -> int:
    """Return the size of the parts in which a message of `num_bytes` is reduced. Local."""
    return min(max(num_bytes // 4, _MIN_PART_BYTES), _MAX_PART_BYTES)


def plan_parts(num_elements: int, itemsize: int) -> list[slice]:
    """Divide a message into parts that go through the buffers one behind the other. Local."""
    return cut(num_elements, part_bytes(num_elements * itemsize) // itemsize)


class StagedReducer:
    """Copies messages to the host in parts, has `reducer` reduce them there, and copies them back.

    Parameters
    ----------
    copier : Copier
    reducer : Reducer
        For messages in host memory.
    """

    def __init__(self, copier: Copier, reducer: Reducer) -> None:
        self._copier = copier
        self._reducer = reducer
        self._pool = Pool()

    def all_reduce(self, op: ReduceOp, message: Message) -> None:
        """Reduce the array of `message`. **Collective**."""
        self._in_parts(message, lambda part: self._reducer.all_reduce(op, part))

    def reduce(self, op: ReduceOp, message: Message, root: int) -> None:
        """Reduce the array of `message` to `root`. **Collective**."""
        self._in_parts(message, lambda part: self._reducer.reduce(op, part, root))

    def start_all_reduce(self, op: ReduceOp, message: Message) -> Callable[[], object]:
        """Copy the array of `message` to the host, and begin to reduce it. **Collective**."""
        source, target = message.sources[0].reshape(-1), message.targets[0].reshape(-1)
        if not source.size:
            return bool
        copier = self._copier
        copier.begin()
        host = copier.buffer(source.size, source.dtype)
        copier.fetch(host, source).synchronize()
        wait = self._reducer.start_all_reduce(op, Message([host], [host], self._pool))

        def end() -> None:
            wait()
            copier.put(target, host)
            copier.end()

        return end

    def _in_parts(self, message: Message, reduce_part: Callable[[Message], None]) -> None:
        source, target = message.sources[0].reshape(-1), message.targets[0].reshape(-1)
        parts = plan_parts(source.size, source.itemsize)
        copier = self._copier
        copier.begin()
        lengths = [part.stop - part.start for part in parts[:_NUM_BUFFERS]]
        buffers = [copier.buffer(length, source.dtype) for length in lengths]
        puts: list[_Event] = []

        def fetch(number: int) -> tuple[np.ndarray, _Event]:
            part, round_ = parts[number], len(buffers)
            host = buffers[number % round_][: part.stop - part.start]
            after = puts[number - round_] if number >= round_ else None
            return host, copier.fetch(host, source[part], after)

        ahead = len(buffers) - 1
        coming = deque(fetch(number) for number in range(ahead))
        for number, part in enumerate(parts):
            if number + ahead < len(parts):
                coming.append(fetch(number + ahead))
            host, arrival = coming.popleft()
            arrival.synchronize()
            reduce_part(Message([host], [host], self._pool))
            puts.append(copier.put(target[part], host))
        copier.end()
