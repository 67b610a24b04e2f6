"""User sources: any object with a length and examples by number, read ahead by threads."""

from __future__ import annotations

import os
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import arrays, nests
from mpistrat.arguments import as_integer
from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.order import Block, PlainSource
from mpistrat.data.random import PassStream
from mpistrat.data.spec import (
    ArraySpec,
    empty_rows,
    fits,
    fitted,
    known_bytes,
    known_shape,
    spec_of,
)
from mpistrat.errors import DataError
from mpistrat.mpi.launcher import cores_of_rank
from mpistrat.system.background import clean_up

_MAX_THREADS = 8
_PIECE_ROWS = 64
"""Number of examples that a thread reads at a time from a source without chunks."""

_AHEAD_BYTES = 2**25
"""About this many bytes are read ahead."""

_READERS = {
    "h5py": 'ms.data.Dataset.from_hdf5(file.filename, "path/of/the/dataset")',
    "zarr": "ms.data.Dataset.from_source(array)",
    "dask": "ms.data.Dataset.from_source(array)",
    "xarray": "ms.data.Dataset.from_source(array)",
}
"""The call to use in place of from_arrays, by the package of the array."""


def refuse_lazy_arrays(nest: Any) -> None:
    """Raise TypeError for an array in `nest` that `from_arrays` would read whole on each rank."""
    for leaf in nests.flatten(nest)[0]:
        for cls in type(leaf).__mro__:
            package = cls.__module__.partition(".")[0]
            if package in _READERS:
                raise TypeError(
                    f"from_arrays would read the whole {package} object {leaf!r} on every rank. "
                    f"Use {_READERS[package]}, which reads what a rank needs, or "
                    "numpy.asarray(...) if it should be in memory."
                )


class UserSource(PlainSource):
    """The examples of an object that the program passes to `Dataset.from_source`."""

    def __init__(self, source: Any, thread_safe: bool) -> None:
        self._source, self._is_thread_safe = source, thread_safe
        reads_many = callable(getattr(source, "read", None))
        if not hasattr(type(source), "__len__") or not (
            reads_many or hasattr(type(source), "__getitem__")
        ):
            raise TypeError(
                "from_source needs an object with __len__ and either __getitem__(number) or "
                f"read(numbers), not {source!r}."
            )
        self.num_examples = as_integer("The length of the source", len(source), 0)
        self._reads_many = reads_many

    def __repr__(self) -> str:
        return self.kind

    @property
    def kind(self) -> str:
        """The name of the method, with the class of the object."""
        return f"from_source({type(self._source).__qualname__})"

    @property
    def order_entries(self) -> list[str]:
        """A description of the chunks."""
        if self.layout is None:
            return []
        return [f"chunks of at most {self.layout.rows_per_chunk} examples"]

    @cached_property
    def is_read(self) -> bool:
        """Whether the spec is known: from the attribute, or from an example that was read."""
        return hasattr(self._source, "element_spec") or "element_spec" in vars(self)

    @cached_property
    def element_spec(self) -> Any:
        """The attribute `element_spec` of the object, or else the spec of its first example."""
        given = getattr(self._source, "element_spec", None)
        if given is not None:
            for leaf in nests.flatten(given)[0]:
                if not isinstance(leaf, ArraySpec):
                    raise TypeError(f"element_spec must be a nest of ArraySpec, not of {leaf!r}.")
            return given
        if not self.num_examples:
            return None
        leaves, structure = nests.flatten(self._read_raw(np.zeros(1, np.int64)))
        return nests.unflatten(structure, [spec_of(leaf[0]) for leaf in leaves])

    @cached_property
    def layout(self) -> ChunkLayout | None:
        """The chunks that the attribute `chunk_rows` of the object describes."""
        rows = getattr(self._source, "chunk_rows", None)
        if rows is None:
            return None
        if np.ndim(rows):
            starts = np.unique(np.append(np.asarray(rows, np.int64), 0))
            if starts[0] < 0:
                raise ValueError(f"chunk_rows must be first rows of at least 0, not {rows!r}.")
            starts = starts[starts < self.num_examples]
        else:
            starts = np.arange(0, self.num_examples, as_integer("chunk_rows", rows, 1))
        return ChunkLayout(np.append(starts, self.num_examples), self.bytes_per_example)

    @cached_property
    def bytes_per_example(self) -> int:
        """Size of one example, without lengths that its spec leaves open."""
        leaves = nests.flatten(self.element_spec)[0] if self.num_examples else []
        sizes: list[int] = [known_bytes(leaf) for leaf in leaves]
        return max(sum(sizes), 1)

    def open(self, window_rows: int, stream: PassStream) -> UserReader:
        """Return a reader, which starts its own threads."""
        return UserReader(self, window_rows)

    @property
    def num_threads(self) -> int:
        """How many threads may call the object."""
        return min(cores_of_rank(), _MAX_THREADS) if self._is_thread_safe else 1

    def read_rows(self, numbers: np.ndarray) -> Any:
        """Return the nest of columns of the examples `numbers`."""
        leaves, structure = nests.flatten(self._read_raw(numbers))
        specs, expected = nests.flatten(self.element_spec)
        if structure != expected:
            raise DataError(
                f"{self.kind}: examples {_span(numbers)} are {structure}, but the first one is "
                f"{expected}."
            )
        return nests.unflatten(
            structure,
            [self._column(leaf, spec, numbers) for leaf, spec in zip(leaves, specs, strict=True)],
        )

    def _read_raw(self, numbers: np.ndarray) -> Any:
        """Return the nest that the object returns for `numbers`, with one row per number."""
        if not self._reads_many:
            rows = [nests.flatten(self._source[number]) for number in numbers.tolist()]
            columns = [list(column) for column in zip(*(leaves for leaves, _ in rows), strict=True)]
            return nests.unflatten(rows[0][1], map(_as_column, columns))
        nest = nests.map_nest(arrays.host_view, self._source.read(numbers))
        for path, leaf in zip(*nests.flatten_with_paths(nest)[:2], strict=True):
            if not np.ndim(leaf) or len(leaf) != len(numbers):
                raise DataError(
                    f"{self.kind}: read() gave an array of shape {np.shape(leaf)} at "
                    f"{path or 'the top'!r} for {len(numbers)} numbers. Its first dimension must "
                    "be the examples."
                )
        return nest

    def _column(self, column: np.ndarray, spec: ArraySpec, numbers: np.ndarray) -> np.ndarray:
        if None in spec.shape:
            ragged = np.empty(len(numbers), object)
            for place, row in enumerate(column):
                ragged[place] = self._fitted(np.asarray(row), spec, numbers[place : place + 1])
            return ragged
        if column.dtype == object:  # examples of different shapes
            column = np.stack([self._fitted(np.asarray(c), spec, numbers) for c in column])
        shape = known_shape(spec)
        if column.shape[1:] != shape:
            raise self._misfit(column[0], spec, numbers)
        return self._fitted(column, ArraySpec((len(column), *shape), spec.dtype), numbers)

    def _fitted(self, array: np.ndarray, spec: ArraySpec, numbers: np.ndarray) -> np.ndarray:
        cast = fitted(array, spec.dtype)
        if cast is None or not fits(spec, cast):
            raise self._misfit(array, spec, numbers)
        return cast

    def _misfit(self, array: np.ndarray, spec: ArraySpec, numbers: np.ndarray) -> DataError:
        return DataError(
            f"{self.kind}: examples {_span(numbers)} have the shape {array.shape} and the dtype "
            f"{array.dtype}, but the first one is {spec}. Define an attribute "
            "element_spec of the source, with None for lengths that differ."
        )


def _span(numbers: np.ndarray) -> str:
    return f"{int(numbers.min())} to {int(numbers.max())}"


def _as_column(rows: list[Any]) -> np.ndarray:
    """Return the values of several examples as one array, of dtype object if shapes differ."""
    found = [arrays.host_view(row) for row in rows]
    if len({row.shape for row in found}) == 1:
        return np.stack(found)
    column = np.empty(len(found), object)
    for place, row in enumerate(found):
        column[place] = row
    return column


class UserReader:
    """Reads chunks or pieces of a user source, in threads, in the announced order."""

    def __init__(self, source: UserSource, window_rows: int) -> None:
        self._source = source
        self._layout = source.layout if source.num_examples else None
        num_threads = source.num_threads
        ahead = max(_AHEAD_BYTES // source.bytes_per_example, 1)
        self.lookahead_rows = min(ahead, 4 * num_threads * _PIECE_ROWS)
        if self._layout is not None:
            # There is memory for two windows: the one in use and the next one.
            window_chunks = -(-2 * window_rows // self._layout.rows_per_chunk)
            self._capacity = max(window_chunks, 2 * num_threads, 2)
            self.lookahead_rows = max(window_rows, num_threads * self._layout.rows_per_chunk)
        self._pool: ThreadPoolExecutor | None = None
        self._num_threads, self._pid = num_threads, os.getpid()
        self._announced: deque[tuple[np.ndarray, Future[Any]]] = deque()
        self._chunks: OrderedDict[int, Future[Any]] = OrderedDict()
        self._wanted: Counter[int] = Counter()

    def expect(self, block: Block) -> None:
        """Have threads read the examples `block`, or their chunks."""
        if self._layout is None:
            for start in range(0, len(block), _PIECE_ROWS):
                piece = block[start : start + _PIECE_ROWS]
                self._announced.append((piece, self._submit(self._source.read_rows, piece)))
            return
        for chunk, count in zip(*_counted(self._chunks_of(block)), strict=True):
            self._wanted[chunk] += count
            # Otherwise the chunk is read when it is needed: reading it now would drop a chunk that
            # is needed earlier.
            if len(self._chunks) < self._capacity or self._unwanted() is not None:
                self._chunk(chunk)

    def read(self, block: Block) -> Any:
        """Return the nest of columns of the examples `block`."""
        if not len(block):
            return nests.map_nest(_empty_column, self._source.element_spec)
        if self._layout is not None:
            return self._from_chunks(block)
        parts = []
        while len(block):
            if not self._announced or self._announced[0][0][0] != block[0]:
                # The order is not the announced one, so nothing that follows in the queue will
                # match.
                self._announced.clear()
                parts.append((block, self._source.read_rows(block)))
                break
            piece, future = self._announced.popleft()
            count = min(len(piece), len(block))
            if (piece[:count] != block[:count]).any():
                continue
            nest = future.result()
            parts.append((block[:count], _rows(nest, slice(count))))
            if count < len(piece):
                rest: Future[Any] = Future()
                rest.set_result(_rows(nest, slice(count, None)))
                self._announced.appendleft((piece[count:], rest))
            block = block[count:]
        flat = [nests.flatten(nest) for _, nest in parts]
        columns = zip(*(leaves for leaves, _ in flat), strict=True)
        return nests.unflatten(flat[0][1], map(np.concatenate, columns))

    def _from_chunks(self, block: Block) -> Any:
        assert self._layout is not None
        chunks = self._chunks_of(block)
        specs, structure = nests.flatten(self._source.element_spec)
        outputs = [
            np.empty(len(block), object) if None in spec.shape else empty_rows(spec, len(block))
            for spec in specs
        ]
        for chunk, count in zip(*_counted(chunks), strict=True):
            places = np.flatnonzero(chunks == chunk)
            leaves = nests.flatten(self._chunk(chunk).result())[0]
            rows = block[places] - self._layout.starts[chunk]
            for output, leaf in zip(outputs, leaves, strict=True):
                output[places] = leaf[rows]
            # Rows that were never announced are not counted.
            self._wanted[chunk] = max(self._wanted[chunk] - count, 0)
        return nests.unflatten(structure, outputs)

    def _chunks_of(self, block: Block) -> np.ndarray:
        assert self._layout is not None
        return np.searchsorted(self._layout.starts, block, "right") - 1

    def _chunk(self, chunk: int) -> Future[Any]:
        """Return the columns of a chunk, as the future of the thread that reads it."""
        assert self._layout is not None
        found = self._chunks.get(chunk)
        if found is None:
            if len(self._chunks) >= self._capacity:
                unwanted = self._unwanted()
                self._chunks.pop(next(iter(self._chunks)) if unwanted is None else unwanted)
            first, stop = self._layout.starts[chunk : chunk + 2].tolist()
            found = self._chunks[chunk] = self._submit(
                self._source.read_rows, np.arange(first, stop)
            )
        return found

    def _unwanted(self) -> int | None:
        """Return a chunk in memory that no announced example needs, or ``None``."""
        return next((each for each in self._chunks if not self._wanted[each]), None)

    def _submit(self, function: Callable[..., Any], *args: Any) -> Future[Any]:
        if os.getpid() != self._pid:
            raise DataError(
                f"The iterator was begun in process {self._pid} and is used in {os.getpid()}: its "
                "threads do not outlive a fork. Begin a new one there with iter(...)."
            )
        if self._pool is None:
            self._pool = ThreadPoolExecutor(
                self._num_threads, "mpistrat-source", arrays.Device.for_threads()
            )
        return self._pool.submit(function, *args)

    def close(self) -> None:
        """End the threads."""
        if self._pool is not None and os.getpid() == self._pid:
            pool = self._pool
            clean_up(lambda: pool.shutdown(cancel_futures=True))


def _rows(nest: Any, part: slice) -> Any:
    return nests.map_nest(lambda column: column[part], nest)


def _empty_column(spec: ArraySpec) -> np.ndarray:
    if None in spec.shape:
        return np.empty(0, object)
    return empty_rows(spec)


def _counted(chunks: np.ndarray) -> tuple[list[int], list[int]]:
    """Return each chunk once, in the order of its first row, and its number of rows."""
    counts = Counter(chunks.tolist())
    return list(counts), list(counts.values())
