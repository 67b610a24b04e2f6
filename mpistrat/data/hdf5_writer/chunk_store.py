"""Chunks that this rank owns: their elements until they are written, their encoding, their places.

Every rank computes the place of each chunk of all ranks from the gathered sizes, so the ranks agree
on the end of the file without a message.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat.data.hdf5.filters import DecodingThreads
from mpistrat.data.hdf5_writer.chunk_tree import ChunkEntry
from mpistrat.data.hdf5_writer.dataset_spec import OutputDataset
from mpistrat.data.hdf5_writer.geometry import Piece
from mpistrat.data.hdf5_writer.root_file import (
    Place,
    ReuseList,
    begin_to_flush_large,
    write_all,
)
from mpistrat.errors import DataError
from mpistrat.system.xxh3 import digest_of_values

_PAGE_BYTES = 4096
_MAX_BYTES_IN_MEMORY = 2**28
"""Chunks beyond this number of bytes wait for their missing rows in a temporary file."""


@dataclass
class OpenChunk:
    """A chunk of which not all rows have arrived or are committed."""

    elements: np.ndarray | None
    """``None`` while they are in the temporary file."""
    count: int = 0
    """Number of elements that have arrived."""
    written: np.ndarray | None = None
    """Which elements or rows have arrived, if they may arrive in any order."""
    address: int | None = None
    """Where an unfiltered chunk is in the file."""
    stored_rows: int = 0
    """Number of rows that are in the file at `address`."""
    slot: int | None = None
    """Number of its place in the temporary file."""
    is_stale: bool = False
    """Whether the chunk in the file may have rows behind the last one, which no commit shows.

    If h5py extended the dataset, they would appear in place of the fill value.
    """


@dataclass
class Encoded:
    """A chunk that is to be written."""

    dataset: str
    place: Place
    data: Any
    """The stored bytes."""
    mask: int
    is_final: bool
    """Whether it never changes again."""
    num_bytes: int
    """Number of bytes of the whole chunk in the file."""
    address: int | None
    """Its place; ``None`` if it needs one."""
    offset: int = 0
    """Where in the chunk the data begin."""

    def as_json(self) -> list[Any]:
        """Return what all ranks need to know."""
        return [self.dataset, *self.place, self.num_bytes, self.mask, self.is_final, self.address]


class SharedSpace:
    """The used part of a file, as every rank knows it."""

    def __init__(self, end: int, size: int) -> None:
        self.end = end
        self._is_shared = size > 1
        self._commit = 0
        self._free = [ReuseList() for _ in range(size)]
        self._last: dict[tuple[str, Place], tuple[int, int, int]] = {}
        """Rank, address and reserved bytes of chunks that the next step replaces."""
        self._replaced: list[tuple[int, int, int]] = []

    def reserve(self, num_bytes: int) -> int:
        """Return the place of new bytes at the end."""
        address = self.end + -self.end % 8
        self.end = address + num_bytes
        return address

    def place_chunks(self, reports: list[list[list[Any]]]) -> list[list[int]]:
        """Return the address of each chunk that a rank reports, by rank."""
        found = []
        for rank, chunks in enumerate(reports):
            is_first = True
            addresses = []
            for dataset, block, cell, num_bytes, _, is_final, address in chunks:
                if address is None:
                    # Not two ranks in one page: on several nodes, each flushes whole pages.
                    if is_first and self._is_shared:
                        self.end += -self.end % _PAGE_BYTES
                        is_first = False
                    key = dataset, (block, cell)
                    # The old chunk stays where it is until readers of earlier commits are gone.
                    if key in self._last:
                        self._replaced.append(self._last.pop(key))
                    if is_final:
                        address = self.reserve(num_bytes)
                    else:
                        address = self._place_last(rank, key, num_bytes)
                addresses.append(address)
            found.append(addresses)
        if self._is_shared:
            self.end += -self.end % _PAGE_BYTES
        return found

    def _place_last(self, rank: int, key: tuple[str, Place], num_bytes: int) -> int:
        """Return the place of a chunk that the next step replaces."""
        # Rounded up, so that a later chunk of about the same size fits.
        unit = max(64, 1 << max(num_bytes.bit_length() - 3, 0))
        reserved = num_bytes + -num_bytes % unit
        address = self._free[rank].take(self._commit, reserved)
        if address is None:
            address = self.reserve(reserved)
        self._last[key] = rank, address, reserved
        return address

    def note_commit(self) -> None:
        """Free the places of replaced chunks: the file does not name them any more."""
        self._commit += 1
        for rank, address, num_bytes in self._replaced:
            self._free[rank].add(self._commit, address, num_bytes)
        self._replaced = []

    def note_failure(self) -> None:
        """Keep the places of the last chunks, which the file may still name."""
        # Their places are given up, which only costs space.
        self._last.clear()
        self._replaced = []


@dataclass
class _Column:
    """The open chunks of one dataset."""

    dataset: OutputDataset
    chunks: dict[Place, OpenChunk] = field(default_factory=dict)
    committed: dict[Place, tuple[np.ndarray, int, int | None, int, bool]] = field(
        default_factory=dict
    )
    """State of the open chunks at the last commit."""
    finished: set[Place] = field(default_factory=set)
    """Of a dataset of fixed size: the chunks that are complete."""


class ChunkStore:
    """The chunks of this rank, of all datasets."""

    def __init__(self, folder: str, rank: int, size: int, flushes_early: bool) -> None:
        self._folder = folder
        self._flushes_early = flushes_early
        self.rank = rank
        self.size = size
        self._columns: dict[str, _Column] = {}
        self._threads = DecodingThreads()
        self._spill: Any = None
        self._spilled_bytes = 0
        self._memory_bytes = 0

    def add(self, dataset: OutputDataset) -> None:
        """Accept chunks of a dataset."""
        self._columns[dataset.name] = _Column(dataset)

    def remove(self, name: str) -> None:
        """Forget a dataset."""
        del self._columns[name]

    def owned_last(self, dataset: OutputDataset) -> list[Place]:
        """Return the chunks of this rank in the last block, if that is not full."""
        geometry = dataset.geometry
        block, rest = divmod(dataset.rows, geometry.chunk[0])
        cells = range(geometry.num_cells) if rest else ()
        return [
            (block, cell) for cell in cells if geometry.owner(block, cell, self.size) == self.rank
        ]

    def fill_last(self, dataset: OutputDataset, stored: Any, is_stale: bool) -> None:
        """Read the rows of the last, partial block from the open dataset `stored`.

        With `is_stale`, the next commit writes its chunks to a new place.
        """
        column, geometry = self._columns[dataset.name], dataset.geometry
        for place in self.owned_last(dataset):
            inner = geometry.inner_shape(place[1])
            starts = geometry.offsets(*place)
            num_rows = dataset.rows - starts[0]
            parts = (slice(s, s + n) for s, n in zip(starts[1:], inner, strict=True))
            index = (slice(starts[0], dataset.rows), *parts)
            elements = dataset.blank()
            rows = stored[index]
            own = (slice(num_rows), *(slice(n) for n in inner))
            target = elements[own]
            target[...] = rows.view(dataset.dtype) if dataset.dtype != rows.dtype else rows
            count = num_rows * math.prod(inner)
            # Without the old address, even for an unfiltered chunk: after `cut`, its later rows
            # still belong to commits that readers may have open, so new rows must not replace them
            # in place.
            column.chunks[place] = OpenChunk(elements, count, is_stale=is_stale)
        self._remember(column)

    def take(self, dataset: OutputDataset, place: Place) -> np.ndarray | None:
        """Take out the elements of an open chunk, whose rows are written directly from now on."""
        chunk = self._columns[dataset.name].chunks.pop(place, None)
        return None if chunk is None else chunk.elements

    # Rows that arrive

    def check(self, dataset: OutputDataset, piece: Piece, shape: tuple[int, ...]) -> None:
        """Raise DataError if rows of a dataset of fixed size were written before."""
        column, place = self._columns[dataset.name], (piece.block, piece.cell)
        chunk, height = column.chunks.get(place), dataset.geometry.chunk[0]
        # The owner of a chunk sees all its rows, so no rank has to know what others have written.
        rows = np.arange(height)[piece.rows]
        if place not in column.finished:
            if chunk is None:
                return
            if chunk.written is not None:  # else it is complete
                seen = chunk.written[self._index(piece, shape)]
                rows = rows[seen.reshape(len(rows), -1).any(axis=1)]
        if len(rows):
            raise DataError(
                f"HDF5Writer.write: row {int(rows[0]) + piece.block * height} of dataset "
                f"{dataset.name!r} was written twice. Write each row once."
            )

    def _index(self, piece: Piece, shape: tuple[int, ...]) -> tuple[Any, ...]:
        inner = tuple(slice(s, s + n) for s, n in zip(piece.starts, shape[1:], strict=True))
        return (piece.rows, *inner)

    def put(self, dataset: OutputDataset, piece: Piece, values: np.ndarray) -> None:
        """Store the elements `values` of a piece, in the shape of the piece."""
        column, place = self._columns[dataset.name], (piece.block, piece.cell)
        chunk = column.chunks.get(place)
        if chunk is None and values.shape == dataset.geometry.chunk:
            # The whole chunk, which is written before the call returns: no copy is needed.
            chunk = column.chunks[place] = OpenChunk(np.ascontiguousarray(values), values.size)
            self._memory_bytes += dataset.chunk_bytes
            return
        if chunk is None:
            chunk = column.chunks[place] = OpenChunk(dataset.blank())
            self._memory_bytes += dataset.chunk_bytes
            if not dataset.grows:
                chunk.written = np.zeros(dataset.geometry.chunk, bool)
        elements = self._loaded(dataset, chunk)
        index = self._index(piece, values.shape)
        elements[index] = values
        if chunk.written is not None:
            chunk.written[index] = True
        chunk.count += values.size

    def _is_full(self, dataset: OutputDataset, place: Place, chunk: OpenChunk) -> bool:
        per_row = dataset.geometry.elements_of_row(place[1])
        return chunk.count == dataset.rows_of_block(place[0]) * per_row

    def full(self) -> list[Encoded]:
        """Take out the chunks that are complete, and return them encoded."""
        found = []
        for column in self._columns.values():
            dataset = column.dataset
            ready = [p for p, each in column.chunks.items() if self._is_full(dataset, p, each)]
            for place in sorted(ready):
                found.append((dataset, place, column.chunks[place], True))
        return self._encoded(found)

    def release_full(self) -> None:
        """Forget the chunks that are complete, which are in the file."""
        for column in self._columns.values():
            dataset = column.dataset
            for place in list(column.chunks):
                if self._is_full(dataset, place, column.chunks[place]):
                    chunk = column.chunks.pop(place)
                    if chunk.elements is not None:
                        self._memory_bytes -= dataset.chunk_bytes
                    if not dataset.grows:
                        column.finished.add(place)

    def partial(self) -> list[Encoded]:
        """Return the chunks of growing datasets that have new rows, encoded."""
        found = []
        for column in self._columns.values():
            if column.dataset.grows:
                for place, chunk in sorted(column.chunks.items(), key=lambda each: each[0]):
                    known = column.committed.get(place)
                    is_new = known is None or known[1] != chunk.count or chunk.is_stale
                    if is_new and not self._is_full(column.dataset, place, chunk):
                        found.append((column.dataset, place, chunk, False))
        return self._encoded(found)

    def _encoded(self, found: list[tuple[OutputDataset, Place, OpenChunk, bool]]) -> list[Encoded]:
        results: list[Any] = [None] * len(found)

        def encode(number: int) -> None:
            results[number] = self._encode(*found[number])

        # A thread costs more than it saves for one chunk, or for chunks that are not encoded.
        if len(found) == 1 or not any(dataset.is_filtered for dataset, *_ in found):
            for number in range(len(found)):
                encode(number)
        else:
            for waiting in [self._threads.submit(encode, number) for number in range(len(found))]:
                waiting.result()
        return results

    def _encode(
        self, dataset: OutputDataset, place: Place, chunk: OpenChunk, is_full: bool
    ) -> Encoded:
        elements, size = self._loaded(dataset, chunk), dataset.chunk_bytes
        if dataset.is_filtered:
            data, mask = dataset.encoder.encode(elements)
            return Encoded(dataset.name, place, data, mask, is_full, len(data), None)
        whole = elements.reshape(-1).view(np.uint8).data
        if not dataset.is_chunked:
            # Only rows that exist: behind the last one, a different dataset may begin in the file.
            rows = dataset.rows_of_block(place[0]) * (size // dataset.geometry.chunk[0])
            return Encoded(dataset.name, place, whole[:rows], 0, True, rows, chunk.address)
        # Rows behind those of the last commit may be added in place.
        # The first write covers the whole chunk: if h5py extends the dataset later, the new rows
        # must show the fill value, and not bytes of a step that was never committed.
        start = chunk.stored_rows * (size // dataset.geometry.chunk[0])
        stop = (
            size
            if chunk.address is None or chunk.is_stale
            else self._num_rows(dataset, place, chunk) * (size // dataset.geometry.chunk[0])
        )
        # Final, although rows will follow: the chunk has all its space from the start, so its entry
        # in the tree never changes. Readers see new rows when the first dimension grows.
        return Encoded(dataset.name, place, whole[start:stop], 0, True, size, chunk.address, start)

    def _num_rows(self, dataset: OutputDataset, place: Place, chunk: OpenChunk) -> int:
        return chunk.count // max(dataset.geometry.elements_of_row(place[1]), 1)

    def write(self, handle: int, encoded: list[Encoded], addresses: list[int]) -> None:
        """Write chunks to the file, in threads if they are large."""

        def write_one(each: Encoded, address: int) -> None:
            write_all(handle, address + each.offset, each.data)
            if self._flushes_early:
                begin_to_flush_large(handle, address + each.offset, len(each.data))

        pairs = list(zip(encoded, addresses, strict=True))
        if sum(len(each.data) for each in encoded) < 2**20:
            for each, address in pairs:
                write_one(each, address)
        else:
            for waiting in [self._threads.submit(write_one, *pair) for pair in pairs]:
                waiting.result()
        for each, address in pairs:
            column = self._columns[each.dataset]
            if column.dataset.is_chunked and not column.dataset.is_filtered:
                chunk = column.chunks[each.place]
                chunk.address = address
                chunk.stored_rows = self._num_rows(column.dataset, each.place, chunk)

    # Commits

    def note_commit(self) -> None:
        """Let `undo` return to this state."""
        for column in self._columns.values():
            for chunk in column.chunks.values():
                chunk.is_stale = False
            self._remember(column)

    def _remember(self, column: _Column) -> None:
        if not column.dataset.grows:
            return
        # The arrays themselves, without a copy: steps add rows behind those that are committed.
        column.committed = {
            place: (chunk.elements, chunk.count, chunk.address, chunk.stored_rows, chunk.is_stale)
            for place, chunk in column.chunks.items()
            if chunk.elements is not None
        }

    def undo(self, handle: int) -> None:
        """Return to the state of the last commit."""
        for column in self._columns.values():
            if column.dataset.grows:
                column.chunks = {}
                for place, (elements, count, address, rows, is_stale) in column.committed.items():
                    chunk = OpenChunk(elements, count, None, address, rows, is_stale=is_stale)
                    column.chunks[place] = chunk
                    self._clear(column.dataset, place, chunk, handle)

    def _clear(self, dataset: OutputDataset, place: Place, chunk: OpenChunk, handle: int) -> None:
        """Put the fill value behind the rows that are committed."""
        # Rows of the steps that failed are in the same memory, and perhaps in the file.
        assert chunk.elements is not None
        chunk.elements[self._num_rows(dataset, place, chunk) :] = dataset.fill
        if chunk.address is not None:
            chunk.is_stale = True  # the next commit tries it again
            rest = self._encode(dataset, place, chunk, False)
            with contextlib.suppress(OSError):
                write_all(handle, chunk.address + rest.offset, rest.data)

    def missing(self, dataset: OutputDataset) -> int | None:
        """Return the first row that this rank lacks of a dataset of fixed size, if any."""
        column, geometry = self._columns[dataset.name], dataset.geometry
        if 0 in geometry.inner or not dataset.num_rows:
            return None
        found = []
        for block in range(-(-dataset.num_rows // geometry.chunk[0])):
            for cell in range(geometry.num_cells):
                if geometry.owner(block, cell, self.size) != self.rank:
                    continue
                if (block, cell) in column.finished:
                    continue
                chunk, row = column.chunks.get((block, cell)), 0
                if chunk is not None and chunk.written is not None:
                    inner = (slice(n) for n in geometry.inner_shape(cell))
                    index = (slice(dataset.rows_of_block(block)), *inner)
                    seen = chunk.written[index]
                    row = int(np.argmin(seen.reshape(len(seen), -1).all(axis=1)))
                found.append(block * geometry.chunk[0] + row)
        return min(found, default=None)

    # Memory

    def spill(self) -> None:
        """Move chunks to a temporary file while they need too much memory."""
        if self._memory_bytes <= _MAX_BYTES_IN_MEMORY:
            return
        for column in self._columns.values():
            if column.dataset.grows:
                continue
            for chunk in column.chunks.values():
                if chunk.elements is not None and self._memory_bytes > _MAX_BYTES_IN_MEMORY // 2:
                    self._store(column.dataset, chunk)

    def _store(self, dataset: OutputDataset, chunk: OpenChunk) -> None:
        if self._spill is None:
            # It has no name, so a killed process leaves nothing. It is in the folder of the output,
            # because /tmp may be too small, or in memory.
            self._spill = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115 - until close
        if chunk.slot is None:
            chunk.slot = self._spilled_bytes
            self._spilled_bytes += dataset.chunk_bytes
        assert chunk.elements is not None
        write_all(self._spill.fileno(), chunk.slot, chunk.elements.reshape(-1).view(np.uint8))
        chunk.elements = None
        self._memory_bytes -= dataset.chunk_bytes

    def _loaded(self, dataset: OutputDataset, chunk: OpenChunk) -> np.ndarray:
        if chunk.elements is None:
            assert chunk.slot is not None
            elements = np.empty(dataset.geometry.chunk, dataset.dtype)
            memory = elements.reshape(-1).view(np.uint8).data
            if os.preadv(self._spill.fileno(), [memory], chunk.slot) != len(memory):
                raise OSError("The temporary file of HDF5Writer is too short.")
            chunk.elements = elements
            self._memory_bytes += dataset.chunk_bytes
        return chunk.elements

    def place_contiguous(self, addresses: Mapping[str, int], encoded: list[Encoded]) -> None:
        """Set the place of chunks of contiguous datasets, which begin at `addresses`."""
        for each in encoded:
            dataset = self._columns[each.dataset].dataset
            if not dataset.is_chunked:
                each.address = addresses[dataset.name] + each.place[0] * dataset.chunk_bytes

    def close(self) -> None:
        """End the threads, and remove the temporary file."""
        self._threads.close()
        if self._spill is not None:
            self._spill.close()
        self._columns.clear()


def first_page(encoded: Sequence[Encoded]) -> tuple[int, int, int] | None:
    """Return the offset, length and digest of the first bytes that a rank writes."""
    if not encoded:
        return None
    data = memoryview(encoded[0].data).cast("B")[:_PAGE_BYTES]
    return encoded[0].offset, len(data), digest_of_values(np.frombuffer(data, np.uint8))


def entries_of(
    datasets: Mapping[str, OutputDataset],
    reports: list[list[list[Any]]],
    addresses: list[list[int]],
) -> dict[str, dict[Place, tuple[ChunkEntry, bool]]]:
    """Return the chunks that ranks have reported, for `RootFile.commit`."""
    added: dict[str, dict[Place, tuple[ChunkEntry, bool]]] = {}
    for chunks, places in zip(reports, addresses, strict=True):
        for report, address in zip(chunks, places, strict=True):
            name, block, cell, num_bytes, mask, is_final, known = report
            dataset = datasets[name]
            if dataset.is_chunked and known is None:
                offsets = dataset.geometry.offsets(block, cell)
                entry = ChunkEntry(offsets, num_bytes, mask, address)
                added.setdefault(name, {})[block, cell] = entry, is_final
    return added
