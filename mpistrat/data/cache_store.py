"""Store of a cache: elements by number, in memory that the ranks of a node may share."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from mpistrat.comm.node_file import NodeFile
from mpistrat.data.spec import ArraySpec, object_column
from mpistrat.system.text import readable_size

_ALIGNMENT = 8
_HEADER = 8
"""Integers before the index, of which the first is the number of bytes that records take."""

_CLAIMED = -1
"""In the index: an element that some rank is writing, or was when it was killed."""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class Record:
    """How an element is laid out in bytes: its length, the shapes that may differ, the leaves."""

    def __init__(self, specs: Sequence[ArraySpec], is_mapped: bool) -> None:
        self.specs = list(specs)
        self._is_open = [
            spec._is_ragged or spec._is_open_text or (is_mapped and bool(spec.shape))
            for spec in specs
        ]
        self._num_integers = 1 + sum(
            len(spec.shape) + 1
            for spec, is_open in zip(specs, self._is_open, strict=True)
            if is_open
        )

    @property
    def num_bytes(self) -> int | None:
        """The size of every record; ``None`` where they differ."""
        if any(self._is_open):
            return None
        leaves = [spec.dtype.itemsize * int(np.prod(spec._known_shape)) for spec in self.specs]
        return self.size_of(leaves)

    def size_of(self, leaf_sizes: Sequence[int]) -> int:
        """Return the size of the record with leaves of these sizes."""
        return _ALIGNMENT * self._num_integers + sum(map(_aligned, leaf_sizes))

    def write(self, leaves: Sequence[np.ndarray], target: np.ndarray) -> None:
        """Write the leaves of an element to `target`, which has their size."""
        integers = [len(target)]
        for leaf, is_open in zip(leaves, self._is_open, strict=True):
            if is_open:
                integers += [*leaf.shape, leaf.dtype.itemsize]
        place = _ALIGNMENT * self._num_integers
        target[:place].view(np.int64)[:] = integers
        for leaf in leaves:
            if leaf.nbytes:
                content = np.ascontiguousarray(leaf).reshape(-1).view(np.uint8)
                target[place : place + leaf.nbytes] = content
            place += _aligned(leaf.nbytes)

    def columns(self, memory: np.ndarray, places: Sequence[int]) -> list[np.ndarray]:
        """Return the columns of the elements whose records begin at `places` of `memory`."""
        header_bytes = _ALIGNMENT * self._num_integers
        headers = np.empty((len(places), self._num_integers), np.int64)
        for number, place in enumerate(places):
            headers[number] = memory[place : place + header_bytes].view(np.int64)
        if len(places) and (headers != headers[0]).any():
            return self._ragged_columns(memory, places, headers)
        columns, offset = [], header_bytes
        for shape, dtype in self._layout(headers[0] if len(places) else None):
            num_bytes = dtype.itemsize * int(np.prod(shape))
            column = np.empty((len(places), *shape), dtype)
            if num_bytes and len(places):
                rows = column.reshape(-1).view(np.uint8).reshape(len(places), num_bytes)
                for row, place in zip(rows, places, strict=True):
                    row[:] = memory[place + offset : place + offset + num_bytes]
            columns.append(column)
            offset += _aligned(num_bytes)
        return columns

    def _layout(self, header: Any) -> list[tuple[tuple[int, ...], np.dtype]]:
        """Return shape and dtype of each leaf of an element."""
        found, place = [], 1
        for spec, is_open in zip(self.specs, self._is_open, strict=True):
            if not is_open or header is None:
                found.append((spec._known_shape, spec.dtype))
                continue
            num_axes = len(spec.shape)
            shape = tuple(int(length) for length in header[place : place + num_axes])
            width = int(header[place + num_axes]) // np.dtype("U1").itemsize
            found.append((shape, np.dtype(f"U{width}") if spec._is_open_text else spec.dtype))
            place += num_axes + 1
        return found

    def _ragged_columns(
        self, memory: np.ndarray, places: Sequence[int], headers: np.ndarray
    ) -> list[np.ndarray]:
        rows: list[list[np.ndarray]] = [[] for _ in self.specs]
        for place, header in zip(places, headers, strict=True):
            offset = place + _ALIGNMENT * self._num_integers
            for column, (shape, dtype) in zip(rows, self._layout(header), strict=True):
                num_bytes = dtype.itemsize * int(np.prod(shape))
                row = np.empty(shape, dtype)
                if num_bytes:
                    row.reshape(-1).view(np.uint8)[:] = memory[offset : offset + num_bytes]
                column.append(row)
                offset += _aligned(num_bytes)
        return [
            np.stack(column) if len({row.shape for row in column}) == 1 else object_column(column)
            for column in rows
        ]


def record_bytes(limit: int, num_elements: int) -> int:
    """Return the size of the file of a store."""
    return _ALIGNMENT * (_HEADER + num_elements) + _aligned(limit)


class CacheStore:
    """Elements of one data set; a rank of the node writes each of them, and all read it."""

    # Memory takes space once it is written to, so a file as large as the limit costs nothing.

    def __init__(self, file: NodeFile, record: Record, limit: int, num_elements: int) -> None:
        self._file, self._record, self._limit = file, record, limit
        integers = file.memory[: _ALIGNMENT * (_HEADER + num_elements)].view(np.int64)
        self._state, self._index = integers[:_HEADER], integers[_HEADER:]
        self._records = file.memory[_ALIGNMENT * (_HEADER + num_elements) :]
        self._lock = threading.Lock()
        self.token = file.token
        """The same for all that share the memory, and for no other store."""

    @property
    def num_bytes(self) -> int:
        """How many bytes the elements take."""
        return int(self._state[0])

    def __len__(self) -> int:
        return len(self._index)

    @property
    def is_complete(self) -> bool:
        """Whether all elements are there."""
        return bool((self._index > 0).all())

    def has(self, numbers: np.ndarray) -> np.ndarray:
        """Return whether each element is there."""
        return np.asarray(self._index[numbers] > 0)

    def columns(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return the columns of elements that are there, in memory of their own."""
        return self._record.columns(self._records, (self._index[numbers] - 1).tolist())

    def add(self, number: int, leaves: Sequence[np.ndarray]) -> None:
        """Keep an element, unless another rank has been faster."""
        size = self._record.size_of([leaf.nbytes for leaf in leaves])
        with self._lock, self._file.lock():
            if self._index[number]:
                return
            start = self.num_bytes
            if start + size > self._limit:
                raise MemoryError(
                    f"cache: with element {number} this node would keep "
                    f"{readable_size(start + size)} ({start + size} bytes), but memory is "
                    f"{readable_size(self._limit)}. Give cache(memory=...) more, or cache before "
                    "the map that makes elements large."
                )
            self._index[number] = _CLAIMED
            self._state[0] = start + size
        self._record.write(leaves, self._records[start : start + size])
        with self._lock:  # what was written is seen before the index
            self._index[number] = start + 1
