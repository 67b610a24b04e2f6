"""Layouts: where the rows of a file are stored, and how the arrays of examples are read."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import hdf5, nests
from mpistrat.data.hdf5.fields import Field, shown
from mpistrat.data.hdf5.filters import ChunkDecoder, Codec, find_codec, make_decoder
from mpistrat.data.hdf5.listing import Listing
from mpistrat.data.hdf5.locate import Kind, Located
from mpistrat.data.hdf5.types import Form, Leaf, dtype_of, subset
from mpistrat.data.spec import ArraySpec, known_bytes
from mpistrat.native import native_library


@dataclass(frozen=True)
class Storage:
    """The places of the rows of a dataset in its file, which are stored as they are in memory."""

    starts: np.ndarray
    """The offset of each chunk, of shape (chunks,); one entry for data without chunks."""
    rows_per_chunk: int
    dtype: np.dtype
    """The stored dtype, perhaps in foreign byte order."""
    row_bytes: int
    """Distance from one row to the next in a chunk, in bytes."""

    @cached_property
    def is_contiguous(self) -> bool:
        """Whether all rows are stored one after the other."""
        return len(self.starts) == 1

    @cached_property
    def _begin(self) -> int:
        return int(self.starts[0])

    def offsets(self, rows: np.ndarray) -> np.ndarray:
        """Return the offset of each of `rows` in the file."""
        if self.is_contiguous:
            found: np.ndarray = rows * self.row_bytes
            found += self._begin
        elif self.rows_per_chunk == 1:
            found = self.starts[rows]
        else:
            chunks = rows // self.rows_per_chunk  # several times faster than divmod
            within = rows - chunks * self.rows_per_chunk
            found = self.starts[chunks] + within * self.row_bytes
        return found

    def are_in_one_piece(self, firsts: np.ndarray, length: int) -> np.ndarray:
        """Return for each run of `length` rows whether it is stored in one piece."""
        if self.is_contiguous:
            return np.ones(len(firsts), np.bool_)
        within: np.ndarray = firsts % self.rows_per_chunk + length <= self.rows_per_chunk
        return within

    def read(self, descriptor: int, start: int, rows: np.ndarray) -> bool:
        """Fill `rows` from row `start` on; return False if they must be read by HDF5."""
        if rows.dtype.names:  # only some of the members
            return False
        if not self.is_contiguous:
            return self._read_each(descriptor, start, rows)
        offset = int(self.starts[0]) + start * self.row_bytes
        if os.preadv(descriptor, [rows.data], offset) != rows.nbytes:
            return False
        if not self.dtype.isnative:
            rows.byteswap(inplace=True)
        return True

    def _read_each(self, descriptor: int, start: int, rows: np.ndarray) -> bool:
        """Fill `rows` one by one if each is a dataset; otherwise return False."""
        if self.rows_per_chunk > 1 or not self.dtype.isnative:
            return False
        flat = rows.reshape(len(rows), -1).view(np.uint8)
        starts = self.starts[start : start + len(rows)].tolist()
        return all(
            os.preadv(descriptor, [row.data], offset) == self.row_bytes
            for row, offset in zip(flat, starts, strict=True)
        )


@dataclass(frozen=True)
class CompressedChunks:
    """Chunks of whole rows with a single filter, which compiled code decodes into their place."""

    places: np.ndarray
    """Offset, size in the file and filter mask of each chunk, of shape (chunks, 3)."""
    rows_per_chunk: int
    codec: Codec

    def decode(
        self, mapped: np.ndarray, starts: Sequence[int], targets: Sequence[np.ndarray]
    ) -> int:
        """Fill `targets` with the chunks that begin with the rows `starts` of a mapped file.

        Returns the number of chunks before the first one that this code cannot decode.
        """
        rows = self.rows_per_chunk
        # A target may be shorter than a chunk, for example for the last chunk of a cached field.
        have_room = itertools.takewhile(lambda target: len(target) >= rows, targets)
        whole = [target[:rows] for target in have_room]
        places = self.places[np.array(starts[: len(whole)], np.intp) // rows]
        done: int = native_library().decode_chunks(*self.codec, mapped, places, whole)
        return done


@dataclass(frozen=True)
class FilteredChunks:
    """Chunks of whole rows with other filters, which Python decodes once they are read."""

    places: np.ndarray
    """The places of the chunks, as in `CompressedChunks`."""
    dtype: np.dtype
    """The stored dtype, perhaps in foreign byte order."""
    chunk_shape: tuple[int, ...]
    filters: tuple[tuple[int, tuple[int, ...]], ...]
    """Number and client data of each filter, in the order in which they were applied."""

    @cached_property
    def decoder(self) -> ChunkDecoder:
        """The decoder of the chunks."""
        decoder = make_decoder(self.filters)
        if decoder is None:
            raise RuntimeError("only HDF5 knows the filters of these chunks")
        return decoder

    def read(self, descriptor: int, start: int) -> tuple[int, bytes]:
        """Return the filter mask and the content of the chunk that begins with row `start`."""
        offset, size, mask = self.places[start // self.chunk_shape[0]].tolist()
        content = os.pread(descriptor, size, offset)
        if len(content) != size:
            raise OSError("the file has become shorter")
        return mask, content


Chunks = CompressedChunks | FilteredChunks
"""Chunks whose places are known."""


def find_contiguous(dataset: Any, path: str) -> Storage | None:
    """Return the storage of a contiguous dataset in the file `path`; ``None`` for others."""
    dtype = dtype_of(dataset)
    is_here = hdf5.is_in_file(dataset, path)
    offset = hdf5.contiguous_offset(dataset, dtype) if is_here else None
    if offset is None:
        return None
    row_bytes = dataset.nbytes // max(len(dataset), 1)
    return Storage(np.array([offset]), max(len(dataset), 1), dtype, row_bytes)


def find_chunks(dataset: Any, path: str) -> Storage | Chunks | None:
    """Return the places of chunks of whole rows; ``None`` if they must be read by HDF5."""
    filters = hdf5.filters_of(dataset)
    # Chunks that hold only parts of rows are left to HDF5, which joins rows from several chunks.
    if dataset.chunks[1:] != dataset.shape[1:]:
        return None
    codec = find_codec(filters[0][0]) if len(filters) == 1 else None
    if codec is None and filters and make_decoder(filters) is None:
        return None
    if not hdf5.is_in_file(dataset, path):
        return None
    dtype = dtype_of(dataset)
    if not hdf5.is_stored_as(dataset.id, dtype):
        return None
    num_chunks = -(-len(dataset) // dataset.chunks[0])
    if filters and codec is None and num_chunks > _MAX_FILTERED_CHUNKS:
        return None
    # This check is the last one, because HDF5 lists every chunk for it.
    found = hdf5.places_of_chunks(dataset)
    if found is None:
        return None
    places = np.array(found, np.int64).reshape(-1, 3)
    rows_per_chunk = dataset.chunks[0]
    if not filters:
        starts = np.ascontiguousarray(places[:, 0])
        row_bytes = dataset.nbytes // max(len(dataset), 1)
        return Storage(starts, rows_per_chunk, dtype, row_bytes)
    # Otherwise the chunks at the edge are stored without filters (H5Pset_chunk_opts), and cannot be
    # told from chunks with filters.
    if not hdf5.filters_edge_chunks(dataset):
        return None
    if codec is not None and native_library() is not None and dtype.isnative:
        return CompressedChunks(places, rows_per_chunk, codec)
    # A codec that only compiled code can call, and that cannot be used here, for example because
    # of a foreign byte order.
    if make_decoder(filters) is None:
        return None
    return FilteredChunks(places, dtype, dataset.chunks, tuple(filters))


_MAX_FILTERED_CHUNKS = 2**16
"""Listing more chunks than this takes HDF5 longer than reading a few."""

_MIN_BLOCK_BYTES, _MAX_BLOCK_BYTES = 2**15, 2**18
"""Limits of the blocks in which data without chunks are read: long reads are fast, and short reads
mix small files well."""

_BLOCKS_PER_FILE = 512

_MIN_RUN_BYTES, _MAX_STRIDED_BYTES = 2**10, 2**24
"""If examples are counted along a later axis, one row is stored in many pieces. A block has enough
rows to make pieces of `_MIN_RUN_BYTES`, unless it would exceed `_MAX_STRIDED_BYTES`."""


@dataclass(frozen=True)
class ColumnLayout:
    """The layout of one column in one file."""

    spec: ArraySpec
    """Shape and dtype of one row, in native byte order."""
    rows_per_chunk: int
    """Number of rows that are read together."""
    is_chunked: bool
    """Whether a whole chunk must be decoded to read one row of it."""
    storage: Storage | None
    """The places of the rows, if nothing needs decoding."""
    chunks: Chunks | None
    """The places of the chunks, if they can be decoded without HDF5."""
    decoded_row_bytes: int = 0
    """Size of one decoded row, including members of compound rows that are not kept."""

    @property
    def row_bytes(self) -> int:
        """Size of one row in memory."""
        return known_bytes(self.spec)


def layout_of(dataset: Any, path: str, axis: int, dtype: np.dtype, is_live: bool) -> ColumnLayout:
    """Return the layout of a dataset of the file `path`, read as `dtype` along `axis`."""
    others = dataset.shape[:axis] + dataset.shape[axis + 1 :]
    spec = ArraySpec(others + dtype.shape, dtype.base)
    row_bytes = max(dtype.itemsize * math.prod(others), 1)
    # Places may change in a file that is being written.
    has_places = not axis and not is_live
    if dataset.chunks:
        found = find_chunks(dataset, path) if has_places else None
        storage = found if isinstance(found, Storage) else None
        chunks = None if isinstance(found, Storage) else found
        if dtype != dtype_of(dataset) and isinstance(chunks, CompressedChunks):
            chunks = None  # compiled code fills whole rows
        decoded_bytes = row_bytes // max(dtype.itemsize, 1) * dataset.dtype.itemsize
        return ColumnLayout(spec, dataset.chunks[axis], True, storage, chunks, decoded_bytes)
    length = dataset.shape[axis]
    rows = _rows_of_block(length, row_bytes)
    if axis:
        run_bytes = dtype_of(dataset).itemsize * math.prod(dataset.shape[axis + 1 :])
        long_enough = min(_MIN_RUN_BYTES // max(run_bytes, 1), _MAX_STRIDED_BYTES // row_bytes)
        rows = max(rows, min(long_enough, length))
    storage = find_contiguous(dataset, path) if has_places else None
    return ColumnLayout(spec, rows, False, storage, None)


def _rows_of_block(length: int, row_bytes: int) -> int:
    """Return how many rows of a dataset of `length` rows without chunks are read together."""
    share = length * row_bytes // _BLOCKS_PER_FILE
    block_bytes = min(max(share, _MIN_BLOCK_BYTES), _MAX_BLOCK_BYTES)
    return max(block_bytes // row_bytes, 1)


def contiguous_layout(spec: ArraySpec, length: int, storage: Storage) -> ColumnLayout:
    """Return the layout of `length` rows of `spec` that are in one piece in `storage`."""
    row_bytes = max(known_bytes(spec), 1)
    return ColumnLayout(spec, _rows_of_block(length, row_bytes), False, storage, None)


def layout_of_matches(
    listings: Sequence[Listing | None], leaves: Any, shape: tuple[int | None, ...]
) -> list[ColumnLayout] | None:
    """Return the layout of datasets of one shape as rows; ``None`` if one is not in one piece."""
    if native_library() is None or None in shape or not isinstance(leaves, Leaf):
        return None
    if leaves.members or leaves.form is not Form.FIXED:
        return None
    spec = leaves.spec(shape)
    layouts = []
    for listing in listings:
        if listing is None or (listing.offsets < 0).any():
            return None
        row_bytes = known_bytes(spec)
        if not row_bytes or listing.width != spec.dtype.itemsize:
            return None
        storage = Storage(listing.offsets, 1, spec.dtype, row_bytes)
        layouts.append(ColumnLayout(spec, 1, False, storage, None))
    return layouts


@dataclass(frozen=True)
class Column:
    """A dataset, or members of a compound one, whose rows are read many at a time."""

    name: str
    """The name for error messages."""
    path: str
    """The path of the dataset, or the pattern if each row is a match."""
    axis: int
    dtype: np.dtype
    """The dtype in memory: for compound rows, only the needed members, packed."""
    is_matches: bool = False
    """Whether each row is a dataset whose place in the file is known."""


@dataclass(frozen=True)
class Single:
    """A field that is read one example at a time: text, rows of any length, matches, attributes."""

    field: Field
    kind: Kind
    path: str
    axis: int
    dtype: np.dtype
    """The dtype in memory, as h5py uses it."""
    bytes_per_example: int
    """The average size, as far as it is known."""


@nests.leaf_type
@dataclass(frozen=True)
class Output:
    """One array of an example."""

    spec: ArraySpec
    leaf: Leaf
    """The place of the array in the value that is read."""
    column: int | None
    """The number of the column that has the array, or ``None``."""
    single: int | None
    """The number of the single that has the array, or ``None``."""


def row_columns(located: Sequence[Located]) -> list[Column]:
    """Return the columns of fields that are rows: one per field, or per compound dataset."""
    columns: list[Column] = []
    compound: dict[tuple[str, int], int] = {}
    for each in located:
        fixed = _leaves(each, Form.FIXED) if each.kind is Kind.ROWS else []
        if not fixed:
            continue
        if not each.dtype.names:
            dtype = each.dtype.newbyteorder("=")
            columns.append(Column(shown(each.field), each.path, each.axis, dtype))
            continue
        key = each.path, each.axis
        if key not in compound:
            compound[key] = len(columns)
            together = [e for e in located if e.kind is Kind.ROWS and (e.path, e.axis) == key]
            members = dict.fromkeys(m.members for e in together for m in _leaves(e, Form.FIXED))
            dtype = subset(each.dtype, members)
            columns.append(Column(repr(each.path), each.path, each.axis, dtype))
    return columns


def _leaves(located: Located, *forms: Form) -> list[Leaf]:
    leaves: list[Leaf] = nests.flatten(located.leaves)[0]
    return [leaf for leaf in leaves if leaf.form in forms]


def compose(
    located: Sequence[Sequence[Located]],
    columns: Sequence[Column],
    structure: nests.Structure,
    may_be_placed: bool,
) -> _Composition:
    """Return how the fields are read that were `located` in all files.

    `columns` are the columns of fields that are rows. `structure` is the nest of the fields, each
    of which is a nest of leaves.
    """
    composer = _Composer(located, columns)
    nest = [composer.outputs(of_files, may_be_placed) for of_files in zip(*located, strict=True)]
    outputs, whole = nests.flatten(nests.unflatten(structure, nest))
    return _Composition(
        tuple(composer.columns), tuple(composer.singles), tuple(outputs), whole, composer.layouts
    )


@dataclass(frozen=True)
class _Composition:
    """How the arrays of an example are read."""

    columns: tuple[Column, ...]
    singles: tuple[Single, ...]
    outputs: tuple[Output, ...]
    structure: nests.Structure
    layouts: list[list[ColumnLayout]]
    """For each column of matches, its layout in each file."""


class _Composer:
    """Finds the column or the single of each field."""

    def __init__(self, located: Sequence[Sequence[Located]], columns: Sequence[Column]) -> None:
        self._located = located[0]
        self.columns = list(columns)
        self.singles: list[Single] = []
        self.layouts: list[list[ColumnLayout]] = []
        self._numbers = {(column.path, column.axis): n for n, column in enumerate(columns)}
        self._plain = iter([n for n, column in enumerate(columns) if not column.dtype.names])
        self._single_numbers: dict[tuple[str, int], int] = {}

    def outputs(self, of_files: Sequence[Located], may_be_placed: bool) -> Any:
        """Return the nest of outputs of a field, as it was located in each file."""
        first, leaves, shape = of_files[0], _united_leaves(of_files), _united_shape(of_files)
        column: int | None = None
        if first.kind is Kind.ROWS and _leaves(first, Form.FIXED):
            is_compound = first.dtype.names
            column = self._numbers[first.path, first.axis] if is_compound else next(self._plain)
        elif first.kind is Kind.MATCHES and may_be_placed:
            layouts = layout_of_matches([each.listing for each in of_files], leaves, shape)
            if layouts is not None:
                column = len(self.columns)
                dtype = layouts[0].spec.dtype
                self.columns.append(Column(shown(first.field), first.field.path, 0, dtype, True))
                self.layouts.append(layouts)
        single: int | None = None
        if column is None or _leaves(first, Form.TEXT, Form.RAGGED):
            single = self._single(of_files, leaves)
        return nests.map_nest(lambda leaf: _output(leaf, shape, column, single), leaves)

    def _single(self, of_files: Sequence[Located], leaves: Any) -> int:
        """Return the number of the single of a field; members of one dataset share a single."""
        first = of_files[0]
        are_rows = first.kind is Kind.ROWS
        key = (first.path, first.axis) if are_rows else (shown(first.field), -1)
        if key not in self._single_numbers:
            self._single_numbers[key] = len(self.singles)
            rows = [each for each in self._located if each.kind is Kind.ROWS]
            together = [each for each in rows if key == (each.path, each.axis)]
            self.singles.append(_single(together or [first], of_files, leaves))
        return self._single_numbers[key]


def _output(
    leaf: Leaf, shape: tuple[int | None, ...], column: int | None, single: int | None
) -> Output:
    is_in_column = column is not None and leaf.form is Form.FIXED
    return Output(
        leaf.spec(shape), leaf, column if is_in_column else None, None if is_in_column else single
    )


def _united_leaves(of_files: Sequence[Located]) -> Any:
    """Return the leaves of a field, with strings of the width that all files need."""
    columns = zip(*(nests.flatten(each.leaves)[0] for each in of_files), strict=True)
    widest = [max(leaves, key=lambda leaf: leaf.dtype.itemsize) for leaves in columns]
    return nests.unflatten(nests.flatten(of_files[0].leaves)[1], widest)


def _united_shape(of_files: Sequence[Located]) -> tuple[int | None, ...]:
    lengths = zip(*(each.shape for each in of_files), strict=True)
    return tuple(each[0] if len(set(each)) == 1 else None for each in lengths)


def _single(together: Sequence[Located], of_files: Sequence[Located], leaves: Any) -> Single:
    first = together[0]
    of_rows = first.kind is Kind.ROWS
    widths = [leaf.dtype.itemsize for leaf in nests.flatten(leaves)[0]]
    dtype = first.dtype
    if dtype.names:
        forms = (Form.TEXT, Form.RAGGED) if of_rows else tuple(Form)
        members = dict.fromkeys(leaf.members for e in together for leaf in _leaves(e, *forms))
        dtype = subset(dtype, members)
    elif dtype.kind == "S":
        dtype = np.dtype(f"S{widths[0]}")
    elif not dtype.hasobject:
        dtype = dtype.newbyteorder("=")
    num_bytes = dtype.itemsize
    listings = [each.listing for each in of_files if each.listing is not None]
    if listings:
        elements = sum(int(each.shapes.prod(axis=1).sum()) for each in listings)
        num_bytes = -(-elements * dtype.itemsize // sum(len(each.names) for each in listings))
    return Single(first.field, first.kind, first.path, first.axis, dtype, num_bytes)
