"""Copies between page-locked host memory and a GPU, on streams of their own."""

from __future__ import annotations

from typing import Any

import numpy as np

from mpistrat.arrays import (
    Array,
    Device,
    copy_on,
    current_stream,
    new_stream,
    on_device,
    pinned_empty,
    record,
)

__all__ = ["DeviceCopier"]


class DeviceCopier:
    """The `mpistrat.comm.staged.Copier` of a GPU.

    Parameters
    ----------
    device : Device
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        with on_device(device):
            self._fetching, self._putting = new_stream(), new_stream()
        self._leaving: list[tuple[Any, np.ndarray]] = []

    def buffer(self, size: int, dtype: np.dtype) -> np.ndarray:
        """Return a 1-d array in page-locked memory. Local."""
        with on_device(self._device):
            return pinned_empty(size, dtype)

    def begin(self) -> None:
        """Have every `fetch` that follows wait for the current stream. Local."""
        with on_device(self._device):
            self._fetching.wait_event(record(current_stream()))

    def fetch(self, target: np.ndarray, source: Array, after: Any = None) -> Any:
        """Begin to copy `source` to the host. Local."""
        with on_device(self._device):
            if after is not None:
                self._fetching.wait_event(after)
            copy_on(self._fetching, target, source)
            return record(self._fetching)

    def put(self, target: Array, source: np.ndarray) -> Any:
        """Begin to copy `source` to the device. Local."""
        with on_device(self._device):
            copy_on(self._putting, target, source)
            done = record(self._putting)
        # The pool of page-locked memory knows no events: what is still read may not go back to it.
        self._leaving = [each for each in self._leaving if not each[0].done]
        self._leaving.append((done, source))
        return done

    def end(self) -> None:
        """Have the current stream wait for every `put`. Local."""
        with on_device(self._device):
            current_stream().wait_event(record(self._putting))
