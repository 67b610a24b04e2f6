"""Cache: a source that keeps elements in memory shared by the ranks of a node."""

from __future__ import annotations

import dataclasses
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import nests
from mpistrat.comm.shared_memory import NodeFile
from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.order import Block, Example, Source, span_of
from mpistrat.data.pipeline import Pipeline
from mpistrat.data.random import PassKey, PassStream
from mpistrat.data.spec import (
    ArraySpec,
    has_open_shape,
    is_open_text,
    known_bytes,
    known_shape,
    object_column,
)
from mpistrat.data.transformations.batch import columns_of, rows_of
from mpistrat.system.text import readable_size

if TYPE_CHECKING:
    from mpistrat.collectives.collectives import Collectives

_ALIGNMENT = 8
_HEADER = 8
"""Number of integers before the index. The first one is the number of bytes of all records."""

_CLAIMED = -1
"""Entry of the index for an element that a rank is writing, or was writing when it was killed."""


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


class Record:
    """Layout of an element in bytes: its length, the shapes that may differ, the leaves."""

    def __init__(self, specs: Sequence[ArraySpec], is_mapped: bool) -> None:
        self.specs = list(specs)
        self._is_open = [
            has_open_shape(spec) or is_open_text(spec) or (is_mapped and bool(spec.shape))
            for spec in specs
        ]
        self._num_integers = 1 + sum(
            len(spec.shape) + 1
            for spec, is_open in zip(specs, self._is_open, strict=True)
            if is_open
        )

    @property
    def num_bytes(self) -> int | None:
        """The size of every record; ``None`` if sizes differ."""
        if any(self._is_open):
            return None
        leaves = [known_bytes(spec) for spec in self.specs]
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
                found.append((known_shape(spec), spec.dtype))
                continue
            num_axes = len(spec.shape)
            shape = tuple(int(length) for length in header[place : place + num_axes])
            width = int(header[place + num_axes]) // np.dtype("U1").itemsize
            found.append((shape, np.dtype(f"U{width}") if is_open_text(spec) else spec.dtype))
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
    """Elements of one dataset: one rank of the node writes each element, and all ranks read it."""

    # The system provides memory only when it is written to, so a file of this size costs nothing.

    def __init__(self, file: NodeFile, record: Record, limit: int, num_elements: int) -> None:
        self._file, self._record, self._limit = file, record, limit
        integers = file.memory[: _ALIGNMENT * (_HEADER + num_elements)].view(np.int64)
        self._state, self._index = integers[:_HEADER], integers[_HEADER:]
        self._records = file.memory[_ALIGNMENT * (_HEADER + num_elements) :]
        self._lock = threading.Lock()
        self.token = file.token
        """A token that is equal only for stores that share the memory."""

    @property
    def num_bytes(self) -> int:
        """How many bytes the elements take."""
        return int(self._state[0])

    def __len__(self) -> int:
        return len(self._index)

    @property
    def is_complete(self) -> bool:
        """Whether all elements are in the store."""
        return bool((self._index > 0).all())

    def has(self, numbers: np.ndarray) -> np.ndarray:
        """Return for each element whether it is in the store."""
        return np.asarray(self._index[numbers] > 0)

    def columns(self, numbers: np.ndarray) -> list[np.ndarray]:
        """Return copies of the columns of elements that are in the store."""
        # The index is the place of the record plus 1, because 0, the value of new memory, means
        # absent.
        return self._record.columns(self._records, (self._index[numbers] - 1).tolist())

    def add(self, number: int, leaves: Sequence[np.ndarray]) -> None:
        """Keep an element, unless a different rank has been faster."""
        size = self._record.size_of([leaf.nbytes for leaf in leaves])
        # flock excludes other processes, but not the threads of this one, which share its
        # descriptor.
        with self._lock, self._file.lock():
            if self._index[number]:
                return
            start = self.num_bytes
            if start + size > self._limit:
                raise MemoryError(
                    f"cache: with element {number} this node would keep "
                    f"{readable_size(start + size)} ({start + size} bytes), but memory is "
                    f"{readable_size(self._limit)}. Allow more with cache(memory=...), or "
                    "cache before the map that makes elements large."
                )
            # A rank reserves space under the lock and fills it without the lock, so ranks can copy
            # at the same time. If a rank is killed in between, its claim stays, and that element is
            # created again in each epoch.
            self._index[number] = _CLAIMED
            self._state[0] = start + size
        self._record.write(leaves, self._records[start : start + size])
        with self._lock:  # other ranks must see the record before its index
            self._index[number] = start + 1


_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
_LEAST_RECORD = 16
"""Bytes of the smallest element. It limits the number of elements of a stream."""


def size_in_bytes(memory: int | str) -> int:
    """Return a size such as ``"4 GiB"`` in bytes."""
    if isinstance(memory, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?\s*", memory, re.IGNORECASE)
        size = int(float(match[1]) * _UNITS[match[2].upper()]) if match else 0
    elif isinstance(memory, int) and not isinstance(memory, bool):
        size = memory
    else:
        raise TypeError(f"cache: memory must be a number of bytes or a size, not {memory!r}.")
    if size < 1:
        raise ValueError(f'cache: memory must be a size such as "4 GiB", not {memory!r}.')
    return size


class Cached:
    """The examples of a pipeline without its order, each created once and kept by its number."""

    # Items are the items of the source below. So order, chunks and shuffles do not change, and the
    # cache replaces only the creation of an example.

    def __init__(self, child: Pipeline, limit: int, num_inherited: int) -> None:
        self.child, self._limit = child, limit
        self.num_inherited = num_inherited
        """Number of transformations of the order that were called before `cache`."""
        self.store: CacheStore | None = None
        self.num_maps = child.num_maps
        self.num_ranks = 1
        """Number of ranks that share the work of a pass."""

    def __repr__(self) -> str:
        return f"{self.child.calls}.cache()"

    @property
    def _source(self) -> Source:
        return self.child.source

    @property
    def children(self) -> tuple[Pipeline, ...]:
        """The dataset below, whose filters are evaluated first."""
        return (self.child,)

    @property
    def kind(self) -> str:
        """The name of the method, with the kind of the dataset."""
        return f"{self.child.kind}.cache()"

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one example; ``None`` if there is no example to find it."""
        return self.child.found_spec

    @property
    def num_examples(self) -> int:
        """The number of examples of the source below."""
        return self._source.num_examples

    @property
    def layout(self) -> ChunkLayout | None:
        """The chunks of the source below."""
        return self._source.layout

    def layout_of(self, key: PassKey) -> ChunkLayout | None:
        """Return the chunks of the source below in the pass `key`."""
        return self._source.layout_of(key)

    @property
    def order_entries(self) -> list[str]:
        """Everything that decides the order of the source below."""
        return self._source.order_entries

    @property
    def file_starts(self) -> np.ndarray:
        """The first examples of files in the source below."""
        return self._source.file_starts

    @property
    def is_read(self) -> bool:
        """Whether the source below knows its length and spec."""
        return self._source.is_read

    @property
    def is_stream(self) -> bool:
        """Whether items are examples, as for a generator."""
        return self._source.is_stream

    @property
    def is_in_order(self) -> bool:
        """Whether the items of a pass are 0, 1, 2 and so on."""
        return self._source.is_in_order

    @property
    def is_of_files(self) -> bool:
        """Whether examples are stored in files."""
        return self._source.is_of_files

    @property
    def is_steady(self) -> bool:
        """True: a number must mean the same example in each pass; `record` checks it."""
        return True

    def only(self, fields: tuple[Any, ...]) -> Source | None:
        """Return ``None``: an element is kept as a whole."""
        return None

    def row_lengths(self) -> np.ndarray | None:
        """Return ``None``: a map may have changed the lengths."""
        return None

    def blocks(self, key: PassKey, batch_size: int | None, start: int) -> Iterator[Block]:
        """Return the items of the source below."""
        return self._source.blocks(key, batch_size, start)

    @cached_property
    def record(self) -> Record:
        """The layout of elements in memory."""
        self._check_steady()
        if self.element_spec is None:  # there is no element to be kept
            return Record([], False)
        specs, _ = nests.flatten(self.element_spec)
        record = Record(specs, self.child.num_maps > 0)
        size = record.num_bytes
        if size is not None and self.num_examples > 0:
            # The program may use only a part of the dataset.
            lengths = [self.num_examples]
            if self.child.length >= 0:
                lengths.append(self.child.known_length)
            total = size * min(lengths)
            if total > self._limit:
                raise MemoryError(
                    f"cache: {min(lengths)} elements of {size} bytes need {readable_size(total)} "
                    f"({total} bytes), but memory is {readable_size(self._limit)}. Allow "
                    "more with cache(memory=...)."
                )
        return record

    def _check_steady(self) -> None:
        if not self._source.is_steady:
            raise ValueError(
                f"cache keeps elements by their number, but {self._source!r} has other elements in "
                "each pass. Call cache before sample, and before zip of shuffled data."
            )

    @property
    def num_slots(self) -> int:
        """The largest possible number of elements."""
        return self.num_examples if self.num_examples >= 0 else self._limit // _LEAST_RECORD

    def tolerant(self) -> Cached:
        """Return this source, with the spec of the first example that raises no error."""
        self.child = self.child.tolerant()
        return self

    def make_store(self, file: NodeFile | None = None) -> CacheStore:
        """Return the store, in `file` or in memory of this process."""
        if file is not None or self.store is None:
            num_bytes = record_bytes(self._limit, self.num_slots)
            file = NodeFile.of_process(num_bytes) if file is None else file
            self.store = CacheStore(file, self.record, self._limit, self.num_slots)
        return self.store

    @property
    def file_bytes(self) -> int:
        """The size of the file of the store."""
        return record_bytes(self._limit, self.num_slots)

    def open(self, window_rows: int, stream: PassStream) -> CachedReader:
        """Return a reader that creates elements that are not kept yet."""
        # Random maps always get the random numbers of the first epoch, because the result must not
        # depend on which rank creates an element, or when.
        first_pass = dataclasses.replace(stream, key=(0,), repeats=(), is_fixed=False)
        return CachedReader(self, window_rows, first_pass)


_TRIMS_PER_PASS = 64
"""How often memory is released while a whole dataset is read for the first time."""


class CachedReader:
    """Reads examples from the store, and creates those that are missing."""

    def __init__(self, cached: Cached, window_rows: int, stream: PassStream) -> None:
        child = cached.child
        self._store = cached.make_store()
        self._span = span_of(cached)
        self._spec = cached.element_spec
        # Several ranks need a part of each chunk of a window. Two windows of chunks would take as
        # much memory as many examples.
        window_rows = window_rows if cached.num_ranks == 1 else -(-window_rows // 2)
        self._reader = child.source.open(window_rows, stream)
        self._maker = child.maker(self._reader, stream)
        self._announced: Counter[int] = Counter()
        self._num_made = 0
        self._trim: Callable[[bool], None] | None = getattr(self._reader, "trim", None)
        self.lookahead_rows = self._reader.lookahead_rows

    def expect(self, block: Block) -> None:
        """Announce the items of `block` that must be read."""
        items, numbers = self._first_repetition(block)
        missing = ~self._store.has(numbers)
        if missing.any():
            self._announced.update(numbers[missing].tolist())
            self._reader.expect(items[missing])

    def _first_repetition(self, block: Block) -> tuple[Block, np.ndarray]:
        """Return the items of `block` in the first repetition, and their numbers."""
        if block.dtype != object:
            numbers = np.asarray(block, np.int64) % self._span
            return numbers, numbers
        items = np.empty_like(block)
        for place, item in enumerate(block):
            items[place] = Example(item)
            items[place].number = item.number % self._span
        return items, np.array([item.number for item in items], np.int64)

    def read(self, block: Block) -> Any:
        """Return the nest of columns of `block`."""
        items, numbers = self._first_repetition(block)
        is_made = ~self._store.has(numbers)
        # The reader below holds a chunk until all of its announced rows have been read. So these
        # rows are read even if a different rank was faster, or the chunk would stay in memory.
        if self._announced:
            for place, number in enumerate(numbers.tolist()):
                if self._announced[number] > 0:
                    is_made[place] = True
                    self._announced[number] -= 1
        _, structure = nests.flatten(self._spec)
        if not is_made.any():
            return nests.unflatten(structure, self._store.columns(numbers))
        places = np.flatnonzero(is_made)
        made: dict[int, list[Any]] = {}
        with closing(self._maker.examples(items[places])) as examples:
            for place, example in zip(places.tolist(), examples, strict=True):
                made[place] = rows_of(example, self._spec)
                self._store.add(int(numbers[place]), made[place])
        self._trim_at_times(len(places))
        rows = [
            made[place] if place in made else self._kept(numbers[place : place + 1])
            for place in range(len(numbers))
        ]
        elements = (nests.unflatten(structure, row) for row in rows)
        return columns_of(elements, self._spec, len(rows))

    def _trim_at_times(self, num_made: int) -> None:
        """Release pages of files now and then, or examples would be in memory twice."""
        self._num_made += num_made
        share = len(self._store) // _TRIMS_PER_PASS
        if self._num_made > share and self._trim is not None:
            self._num_made = 0
            self._trim(False)

    def _kept(self, number: np.ndarray) -> list[np.ndarray]:
        return [column[0] for column in self._store.columns(number)]

    def close(self) -> None:
        """Release files and the memory for further reading, and end threads."""
        self._maker.close()
        self._reader.close()
        if self._trim is not None:
            self._trim(self._store.is_complete)


def share_cache(source: Cached, collectives: Collectives, kind: str) -> None:
    """Let the ranks of each node share one store. **Collective**."""
    num_bytes = 0
    with collectives.all_or_none(kind):
        if source.element_spec is not None:
            source.record  # noqa: B018, checks the sizes
            num_bytes = source.file_bytes
    source.num_ranks = collectives.size
    if source.element_spec is None or collectives.size == 1:
        return
    with collectives.call(kind) as call:
        call.agree("cache", num_bytes)
        with call.communicator() as comm:
            # Without it, the first replica of this rank has done this, or the ranks cannot share.
            if comm is not None:
                token = None if source.store is None else source.store.token
                file = NodeFile.of_node(comm, num_bytes, token)
                if file is not None:
                    source.make_store(file)
