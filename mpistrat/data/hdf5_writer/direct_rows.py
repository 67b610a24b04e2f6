"""Direct writes: each rank writes its rows to the file itself, without an owner of the chunk.

That needs no encoding, so datasets without filters, and ranks on one node: on different nodes, two
ranks must not write to the same page. All ranks know the places of all parts, so they compute the
same addresses without a message.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from mpistrat.data.hdf5_writer.chunk_store import ChunkStore, SharedSpace
from mpistrat.data.hdf5_writer.chunk_tree import ChunkEntry
from mpistrat.data.hdf5_writer.coverage import Box, Coverage
from mpistrat.data.hdf5_writer.dataset_spec import OutputDataset
from mpistrat.data.hdf5_writer.exchange import PlacedPart, pieces_of
from mpistrat.data.hdf5_writer.geometry import Geometry, Piece
from mpistrat.data.hdf5_writer.root_file import Place, begin_to_flush_large, write_all
from mpistrat.errors import DataError
from mpistrat.sharding import ceil_div

_MIN_RUN_BYTES = 4096
"""Shorter runs are collected by the owner of their chunk: one write each costs more."""

Entries = dict[str, dict[Place, tuple[ChunkEntry, bool]]]
"""New chunks, as `RootFile.commit` takes them."""


@dataclass
class _Fill:
    """A chunk whose other rows must be written, by its owner, before readers may see it."""

    dataset: OutputDataset
    place: Place
    address: int
    first: int
    """The step has the rows ``first:stop`` of the chunk."""
    stop: int
    is_new: bool
    """Whether the rows before `first` are not in the file at `address`."""
    elements: np.ndarray | None
    """Their values, if they come from a file that was resumed."""


@dataclass
class _Fixed:
    """A dataset of fixed size. All ranks know what was written to it."""

    address: int | None
    """``None`` if rows go to the owners of chunks."""
    coverage: Coverage = field(default_factory=Coverage)


class DirectRows:
    """The direct writes of one rank. All methods are local, and called alike on all ranks."""

    def __init__(
        self,
        store: ChunkStore,
        space: SharedSpace,
        contiguous: Mapping[str, int],
        is_possible: bool,
        flushes_early: bool,
    ) -> None:
        self._flushes_early = flushes_early
        self._rank, self._size = store.rank, store.size
        self._store = store
        self._space = space
        self._contiguous = contiguous
        """Addresses of contiguous datasets."""
        self.is_possible = is_possible
        """Whether ranks may write directly; equal on all of them."""
        self._open: dict[str, tuple[int, dict[int, int]]] = {}
        """Number of the last, partial block of a dataset, and addresses of its chunks by cell."""
        self._committed: dict[str, tuple[int, dict[int, int]]] = {}
        self._datasets: dict[str, OutputDataset] = {}
        self._stale: dict[str, OutputDataset] = {}
        """Datasets whose open block may have rows of a step that failed."""
        self._fixed: dict[str, _Fixed] = {}
        self._with_owners: set[str] = set()
        """Datasets of fixed size whose first rows went to the owners of their chunks."""
        self._fills: list[_Fill] = []
        self._parts: list[PlacedPart] = []
        self._addresses: dict[str, dict[Place, int]] = {}
        """Addresses of the chunks that `_parts` belong to."""
        self.has_waiting = False
        """Whether some rank may have rows that `write` writes."""

    # Datasets that grow

    def takes_steps(self, dataset: OutputDataset) -> bool:
        """Return whether the rows of steps are written directly."""
        if not self.is_possible or dataset.is_filtered or not dataset.grows:
            return False
        chunk, axis = dataset.geometry.chunk, dataset.split_axis
        # Without padding, ranks write every byte of a chunk; and each part of a row is one run.
        is_even = not any(n % size for n, size in zip(dataset.inner, chunk[1:], strict=True))
        return is_even and (axis < 2 or math.prod(chunk[1:axis]) == 1)

    def add_rows(
        self, dataset: OutputDataset, first: int, count: int, parts: Iterable[PlacedPart]
    ) -> Entries:
        """Accept the rows from `first` of a step, and return the chunks that are new.

        `parts` are those of this rank.
        """
        if not count:
            return {}
        name, geometry, height = dataset.name, dataset.geometry, dataset.geometry.chunk[0]
        addresses, new = self._addresses.setdefault(name, {}), {}
        self._datasets[name] = dataset
        for block in range(first // height, ceil_div(first + count, height)):
            number, known = self._open.get(name, (-1, {}))
            cells = dict(known) if number == block else {}
            is_stale = number == block and name in self._stale
            begin = max(first - block * height, 0)
            end = min(first + count - block * height, height)
            for cell in range(geometry.num_cells):
                is_new = cell not in cells
                if is_new:
                    cells[cell] = self._space.reserve(dataset.chunk_bytes)
                    new[block, cell] = cells[cell]
                addresses[block, cell] = cells[cell]
                if geometry.owner(block, cell, self._size) == self._rank:
                    elements = self._store.take(dataset, (block, cell)) if begin else None
                    if (is_new and (begin or end < height)) or is_stale:
                        place = block, cell
                        each = _Fill(dataset, place, cells[cell], begin, end, is_new, elements)
                        self._fills.append(each)
            self._stale.pop(name, None)
            self._open[name] = block, cells
        if not (first + count) % height:
            del self._open[name]
        self._parts += parts
        self.has_waiting = True
        return self._entries(dataset, new)

    def _entries(self, dataset: OutputDataset, new: dict[Place, int]) -> Entries:
        if self._rank or not new:
            return {}
        size, geometry = dataset.chunk_bytes, dataset.geometry
        return {
            dataset.name: {
                place: (ChunkEntry(geometry.offsets(*place), size, 0, address), True)
                for place, address in new.items()
            }
        }

    def note_chunk(self, dataset: OutputDataset, place: Place, address: int) -> None:
        """Remember a chunk that its owner has written, to which later steps may add rows."""
        if self.takes_steps(dataset) and place[0] == dataset.rows // dataset.geometry.chunk[0]:
            number, cells = self._open.get(dataset.name, (-1, {}))
            known = cells if number == place[0] else {}
            self._datasets[dataset.name] = dataset
            self._open[dataset.name] = place[0], {**known, place[1]: address}

    # Datasets of fixed size

    def knows_rows(self, dataset: OutputDataset) -> bool:
        """Return whether all ranks know which rows of a dataset of fixed size were written."""
        return dataset.name in self._fixed

    def takes_boxes(self, dataset: OutputDataset, boxes: Sequence[Box] | None) -> Entries | None:
        """Return the chunks that are new, or ``None`` if rows go to the owners of chunks.

        The first `boxes` of all ranks decide; ``None`` are rows in any order.
        """
        if dataset.name in self._fixed:
            return None if self._fixed[dataset.name].address is None else {}
        if boxes and all(box.is_empty for box in boxes):
            return None
        if dataset.name in self._with_owners or not self._is_suitable(dataset, boxes):
            height = dataset.geometry.chunk[0]
            # Rows of whole chunks are known to all ranks, so that the rank that holds a chunk can
            # encode it: no owner has to see whether another rank has written it before.
            if dataset.is_chunked and any(box.stop - box.start >= height for box in boxes or ()):
                self._fixed[dataset.name] = _Fixed(None)
            else:
                self._with_owners.add(dataset.name)
            return None
        geometry, new = dataset.geometry, {}
        num_chunks = ceil_div(dataset.num_rows, geometry.chunk[0]) * geometry.num_cells
        if dataset.is_chunked:
            address = self._space.reserve(num_chunks * dataset.chunk_bytes)
            for number in range(num_chunks):
                place = divmod(number, geometry.num_cells)
                new[place] = address + number * dataset.chunk_bytes
        else:
            address = self._contiguous[dataset.name]
        self._fixed[dataset.name] = _Fixed(address)
        return self._entries(dataset, new)

    def _is_suitable(self, dataset: OutputDataset, boxes: Sequence[Box] | None) -> bool:
        if not self.is_possible or dataset.is_filtered or dataset.grows or not boxes:
            return False
        if dataset.is_chunked:
            shape, chunk = (dataset.num_rows, *dataset.inner), dataset.geometry.chunk
            has_padding = any(n % size for n, size in zip(shape, chunk, strict=True))
            # Nobody writes the padding, which is 0 in a new file.
            if has_padding and dataset.fill.tobytes().strip(b"\0"):
                return False
        runs = [_run_length(dataset.geometry, box) for box in boxes if not box.is_empty]
        return min(runs) * dataset.dtype.itemsize >= _MIN_RUN_BYTES

    def covered(self, dataset: OutputDataset, boxes: Iterable[Box]) -> Coverage:
        """Return the coverage with more boxes, or raise DataError if rows are written twice."""
        coverage = self._fixed[dataset.name].coverage.copy()
        for box in boxes:
            row = coverage.add(box)
            if row is not None:
                raise DataError(
                    f"HDF5Writer.write: row {row} of dataset {dataset.name!r} was written twice. "
                    "Write each row once."
                )
        return coverage

    def add_boxes(
        self, dataset: OutputDataset, coverage: Coverage, parts: Iterable[PlacedPart]
    ) -> None:
        """Accept rows, which `coverage` has, and of them the parts that this rank writes itself."""
        self._fixed[dataset.name].coverage = coverage
        for part in parts:
            # What all ranks hold is written by one of them.
            if not part.is_shared or self._rank == 0:
                self._parts.append(replace(part, is_shared=False))
        self.has_waiting = True

    def missing(self, dataset: OutputDataset) -> int | None:
        """Return the first row of a dataset of fixed size that is not complete, if any."""
        coverage = self._fixed[dataset.name].coverage
        return coverage.first_missing(dataset.num_rows, dataset.inner)

    # The file

    def write(self, handle: int) -> None:
        """Write all rows that wait."""
        fills, parts = self._fills, self._parts
        self._fills, self._parts, self.has_waiting = [], [], False
        for each in [*fills, *self._stale_fills()]:
            self._write_fill(handle, each)
        self._stale = {}
        for part in parts:
            for dataset, piece, elements in self._pieces(part):
                address = self._address(dataset, piece)
                _write_piece(handle, address, dataset, piece, elements)
                if self._flushes_early and elements.nbytes >= dataset.chunk_bytes // 2:
                    begin_to_flush_large(handle, address, dataset.chunk_bytes)
        self._addresses.clear()

    def _pieces(self, part: PlacedPart) -> Iterator[tuple[OutputDataset, Piece, np.ndarray]]:
        """Yield the pieces of a part that this rank writes."""
        geometry, rows, array = part.dataset.geometry, part.rows, part.array
        if len(rows) == 1 and geometry.num_cells == 1 and type(array) is np.ndarray:
            # Most small steps: one row, or a part of it, in one chunk.
            block, row = divmod(int(rows[0]), geometry.chunk[0])
            if not part.is_shared or geometry.owner(block, 0, self._size) == self._rank:
                piece = Piece(block, 0, slice(row, row + 1), slice(0, 1), part.starts, ())
                yield part.dataset, piece, array
            return
        for dataset, piece, elements, _ in pieces_of([part], self._rank, self._size):
            yield dataset, piece, elements

    def _address(self, dataset: OutputDataset, piece: Piece) -> int:
        if dataset.grows:
            return self._addresses[dataset.name][piece.block, piece.cell]
        number = piece.block * dataset.geometry.num_cells + piece.cell
        address = self._fixed[dataset.name].address
        assert address is not None
        return address + number * dataset.chunk_bytes

    def _stale_fills(self) -> list[_Fill]:
        """Return the fills that no step has brought since rows were dropped."""
        fills = []
        for name, dataset in self._stale.items():
            number, cells = self._open[name]
            rows = dataset.rows % dataset.geometry.chunk[0]
            fills += [
                _Fill(dataset, (number, cell), address, rows, rows, False, None)
                for cell, address in cells.items()
                if dataset.geometry.owner(number, cell, self._size) == self._rank
            ]
        return fills

    def _write_fill(self, handle: int, fill: _Fill) -> None:
        """Write what a step leaves out of a chunk: its earlier rows, and the fill value behind."""
        height = fill.dataset.geometry.chunk[0]
        row_bytes = fill.dataset.chunk_bytes // height
        if fill.is_new and fill.first:
            assert fill.elements is not None
            write_all(handle, fill.address, _bytes_of(fill.elements[: fill.first]))
        if fill.stop < height:
            # If h5py extends the dataset later, its new rows must show the fill value, and not
            # bytes of a step that was never committed.
            rest = fill.dataset.blank()[fill.stop :]
            write_all(handle, fill.address + fill.stop * row_bytes, _bytes_of(rest))

    def note_commit(self) -> None:
        """Let `undo` return to this state."""
        self._committed = dict(self._open)

    def undo(self) -> None:
        """Return to the state of the last commit."""
        self._open = dict(self._committed)
        self._stale = {name: self._datasets[name] for name in self._open}
        self._fills, self._parts, self.has_waiting = [], [], False
        self._addresses.clear()

    def forget(self, name: str) -> None:
        """Forget where the last block of a dataset is."""
        for blocks in (self._open, self._committed):
            blocks.pop(name, None)
        self._stale.pop(name, None)


def _run_length(geometry: Geometry, box: Box) -> int:
    """Return the number of elements of a box that lie side by side in a chunk."""
    length = 1
    for own, whole in zip(reversed(box.lengths), reversed(geometry.chunk[1:]), strict=True):
        length *= min(own, whole)
        if own < whole:
            return length
    return length * min(box.stop - box.start, geometry.chunk[0])


def _write_piece(
    handle: int, address: int, dataset: OutputDataset, piece: Piece, values: np.ndarray
) -> None:
    """Write a piece of a chunk that is at `address`, with one call for each run of its bytes."""
    if not values.size:
        return
    chunk, lengths, item_bytes = dataset.geometry.chunk, values.shape[1:], dataset.dtype.itemsize
    strides = [item_bytes * each for each in dataset.geometry.strides]
    # The last axis along which the piece is shorter than the chunk: a run has all axes after it.
    axis = len(lengths)
    while axis and lengths[axis - 1] == chunk[axis]:
        axis -= 1
    address += sum(map(operator.mul, piece.starts, strides[1:]))
    rows = piece.rows
    if isinstance(rows, slice) and axis < 2 and (not axis or len(values) == 1):
        write_all(handle, address + rows.start * strides[0], _bytes_of(values))
        return
    numbers = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else np.asarray(rows)
    places = numbers * strides[0]
    for number in range(1, axis):
        places = places[..., None] + np.arange(lengths[number - 1]) * strides[number]
    memory = _bytes_of(values).reshape(places.size, -1)
    run = memory.shape[1]
    # Runs that are neighbours in the file and in memory are written together.
    flat = places.reshape(-1)
    bounds = [0, *(np.flatnonzero(np.diff(flat) != run) + 1).tolist(), flat.size]
    for begin, end in itertools.pairwise(bounds):
        write_all(handle, address + int(flat[begin]), memory[begin:end].reshape(-1))


def _bytes_of(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
