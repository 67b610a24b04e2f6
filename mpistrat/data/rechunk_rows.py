"""The rows of one data set written anew in another: decoded and encoded in threads."""

from __future__ import annotations

import itertools
import math
import operator
import threading
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.data.encoders import make_encoder
from mpistrat.data.field_access import FieldAccess
from mpistrat.errors import DataError
from mpistrat.sharding import ceil_div

__all__ = ["RowCopy"]

_UNIT_BYTES = 4 * 2**20
"""Rows are copied at least this much at a time, so that few old chunks are decoded twice."""

_UNITS_PER_WORKER = 2
"""Units under way for each thread; they bound the memory."""


class _RowReader:
    """Reads rows of a data set; threads may share it."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._access = FieldAccess(dataset)
        self._rows_per_chunk = dataset.chunks[0] if dataset.chunks else 0
        self._lock = threading.Lock()

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the rows as they are stored. Local."""
        step = self._rows_per_chunk
        if not step:
            return self.read_by_hdf5(start, stop)
        rows = self._zeros(stop - start)
        for first in range(start // step * step, stop, step):
            last = min(first + step, self._dataset.shape[0])
            is_inside = start <= first and last <= stop
            chunk = rows[first - start : last - start] if is_inside else self._zeros(last - first)
            self._read_chunk(first, chunk)
            if not is_inside:
                begin, end = max(first, start), min(last, stop)
                rows[begin - start : end - start] = chunk[begin - first : end - first]
        return rows

    def read_by_hdf5(self, start: int, stop: int) -> np.ndarray:
        """Return the rows as HDF5 itself reads them, one thread at a time. Local."""
        rows = self._zeros(stop - start)
        with self._lock:
            self._access.read(start, rows)
        return rows

    def _read_chunk(self, first: int, rows: np.ndarray) -> None:
        with self._lock:
            stored = self._access.fetch(first)
        if stored is None or not stored.decode(rows):
            with self._lock:
                self._access.read(first, rows)

    def _zeros(self, num_rows: int) -> np.ndarray:
        # Not empty: what lies between the fields of a compound type is compared too.
        return np.zeros((num_rows, *self._dataset.shape[1:]), self._dataset.dtype)


@dataclass
class _Unit:
    """Some rows, ready to be written."""

    start: int
    checksum: int
    rows: np.ndarray
    chunks: list[tuple[tuple[int, ...], bytes]]
    """First element and content of each chunk."""
    is_encoded: bool
    """Whether `chunks` has all of them; else HDF5 shall encode `rows`."""


class RowCopy:
    """Copies all rows of `source` to `target`, which has the same shape and type.

    Parameters
    ----------
    source, target : h5py.Dataset
        The second one has chunks.
    pool : Executor
        Threads.
    num_workers : int
        Of the pool.
    """

    def __init__(self, source: Any, target: Any, pool: Executor, num_workers: int) -> None:
        self._source, self._target, self._pool = source, target, pool
        self._max_under_way = _UNITS_PER_WORKER * num_workers
        is_plain = hdf5.is_stored_as(target, target.dtype)
        self._encoder = make_encoder(hdf5.filters_of(target)) if is_plain else None
        self._checksums: dict[int, int] = {}

    def _units(self) -> Iterator[tuple[int, int]]:
        rows_per_chunk = self._target.chunks[0]
        row_bytes = math.prod(self._target.shape[1:]) * self._target.dtype.itemsize
        at_least = max(_UNIT_BYTES // max(row_bytes, 1), (self._source.chunks or (1,))[0])
        step = rows_per_chunk * ceil_div(at_least, rows_per_chunk)
        num_rows = self._target.shape[0]
        for start in range(0, num_rows, step):
            yield start, min(start + step, num_rows)

    def write(self, on_rows: Callable[[int], object]) -> None:
        """Write all rows, and tell `on_rows` of their bytes as they are done. Local."""
        reader = _RowReader(self._source)

        def prepared(start: int, stop: int) -> _Unit:
            rows = reader.read(start, stop)
            chunks = self._encoded(start, rows)
            return _Unit(start, _checksum(rows), rows, chunks or [], chunks is not None)

        for unit in self._in_order(prepared):
            self._checksums[unit.start] = unit.checksum
            for origin, content in unit.chunks:
                self._target.id.write_direct_chunk(origin, content)
            if not unit.is_encoded:
                self._target[unit.start : unit.start + len(unit.rows)] = unit.rows
            on_rows(unit.rows.nbytes)

    def _encoded(self, start: int, rows: np.ndarray) -> list[tuple[tuple[int, ...], bytes]] | None:
        """Return first element and content of each chunk of `rows`; ``None`` where HDF5 must."""
        if self._encoder is None:
            return None
        chunks = []
        for origin, chunk in self._cut(rows):
            content = self._encoder.encode(chunk)
            if content is None:
                return None
            chunks.append(((start + origin[0], *origin[1:]), content))
        return chunks

    def _cut(self, rows: np.ndarray) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
        """Yield the first element in `rows` and the elements of each chunk."""
        shape = self._target.chunks
        for origin in itertools.product(*map(range, itertools.repeat(0), rows.shape, shape)):
            part = rows[tuple(map(slice, origin, map(operator.add, origin, shape)))]
            if part.shape != shape:  # at the edge of the data set
                whole = np.zeros(shape, rows.dtype)
                whole[tuple(map(slice, part.shape))] = part
                part = whole
            yield origin, part

    def check(self, on_rows: Callable[[int], object]) -> None:
        """Read everything back, and compare it with what was read from the source. Local.

        Raises
        ------
        DataError
            If there is a difference.
        """
        reader = _RowReader(self._target)

        def read_back(start: int, stop: int) -> tuple[int, int, int]:
            # A part is read by HDF5 itself, so that it is certain that other programs can.
            rows = (reader.read if start else reader.read_by_hdf5)(start, stop)
            return start, _checksum(rows), rows.nbytes

        for start, checksum, num_bytes in self._in_order(read_back):
            if checksum != self._checksums[start]:
                raise DataError(
                    f"The rows from {start} on of {self._target.name!r} are not what was written: "
                    "the disk or the memory of this machine is at fault, or the source has "
                    "changed meanwhile."
                )
            on_rows(num_bytes)

    def _in_order(self, work: Callable[[int, int], Any]) -> Iterator[Any]:
        """Yield ``work(start, stop)`` of each unit, a few of which are under way in the pool."""
        under_way: deque[Future[Any]] = deque()
        try:
            for start, stop in self._units():
                under_way.append(self._pool.submit(work, start, stop))
                if len(under_way) >= self._max_under_way:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


def _checksum(rows: np.ndarray) -> int:
    return zlib.crc32(rows.reshape(-1).view(np.uint8).data)
