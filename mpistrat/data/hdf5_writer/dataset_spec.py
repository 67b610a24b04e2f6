"""Output datasets: what h5py's words for them mean, and how their chunks are encoded."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.arguments import as_integer
from mpistrat.data.hdf5_writer.encoders import ChunkEncoder, make_encoder
from mpistrat.data.hdf5_writer.geometry import Geometry, Piece, automatic_chunks
from mpistrat.errors import DataError


@dataclass
class OutputDataset:
    """A dataset that ranks write chunk by chunk."""

    name: str
    shape: tuple[int | None, ...]
    """Its shape, with ``None`` for an axis that grows."""
    dtype: np.dtype
    geometry: Geometry
    """How it is divided among ranks. For contiguous datasets, the chunks are not in the file."""
    encoder: ChunkEncoder
    fill: np.ndarray
    """The fill value, a 0-d array."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of h5py's ``create_dataset``."""
    is_chunked: bool = True
    split_axis: int = 0
    rows: int = 0
    """Number of rows, including those of steps that are not committed."""

    @property
    def grows(self) -> bool:
        """Whether `HDF5Writer.append` adds rows."""
        return bool(self.shape) and self.shape[0] is None

    @property
    def is_filtered(self) -> bool:
        """Whether chunks change their size when they are stored."""
        return bool(self.encoder.filters)

    @property
    def inner(self) -> tuple[int, ...]:
        """Shape of a row."""
        return self.geometry.inner

    @property
    def chunk_bytes(self) -> int:
        """Number of bytes of a chunk before its encoding."""
        return math.prod(self.geometry.chunk) * self.dtype.itemsize

    @property
    def num_rows(self) -> int:
        """Number of rows; a dataset without axes has one."""
        return self.rows if self.grows else (self.shape[0] or 0) if self.shape else 1

    def rows_of_block(self, block: int) -> int:
        """Return the number of rows that a full block has."""
        height = self.geometry.chunk[0]
        return height if self.grows else min(height, self.num_rows - block * height)

    def is_whole(self, piece: Piece) -> bool:
        """Return whether a piece has all elements of its chunk."""
        rows, lengths = piece.rows, self.geometry.inner_shape(piece.cell)
        is_all = isinstance(rows, slice) and rows.stop - rows.start == self.rows_of_block(
            piece.block
        )
        parts = zip(piece.source, lengths, strict=True)
        return is_all and all(part.stop - part.start == length for part, length in parts)

    def blank(self) -> np.ndarray:
        """Return a new chunk with the fill value in all elements."""
        if not self.fill.tobytes().strip(b"\0"):
            return np.zeros(self.geometry.chunk, self.dtype)
        chunk = np.empty(self.geometry.chunk, self.dtype)
        chunk[...] = self.fill
        return chunk

    def describe(self) -> str:
        """Return shape, dtype, chunks and filters, for the agreement of the ranks."""
        number = len(self.encoder.filters)
        return f"{self.name} {self.shape} {self.dtype!r} {self.geometry.chunk} {number} filters"


def canonical(what: str, name: Any) -> str:
    """Return the path of an object in a file without slashes at its ends."""
    if not isinstance(name, str):
        raise TypeError(f"{what}: a name must be a string, not {name!r}.")
    parts = [part for part in name.split("/") if part not in ("", ".")]
    if not parts or "\0" in name:
        raise ValueError(f"{what}: {name!r} is not the name of a dataset or group.")
    return "/".join(parts)


def as_shape(what: str, shape: Any) -> tuple[int | None, ...]:
    """Return a shape, in which the first length may be ``None``."""
    lengths = (shape,) if not isinstance(shape, Sequence) else tuple(shape)
    checked = [
        None if length is None and axis == 0 else as_integer(f"{what}: shape", length, 0)
        for axis, length in enumerate(lengths)
    ]
    return tuple(checked)


def make_dataset(
    name: str,
    shape: tuple[int | None, ...],
    dtype: Any,
    *,
    split_axis: int = 0,
    fast_gzip: bool = False,
    chunks: Any = None,
    **options: Any,
) -> OutputDataset:
    """Return the dataset for arguments of ``create_dataset``, or raise what h5py raises."""
    what = f"HDF5Writer: dataset {name!r}"
    dtype = np.dtype("f4" if dtype is None else dtype)
    if dtype.hasobject:
        raise DataError(
            f"{what} has the dtype {dtype}, whose elements differ in length. Store the elements of "
            "all rows in one dataset, and the number of elements of each row in a second one, "
            'such as "count".'
        )
    options = {
        key: value for key, value in options.items() if value is not None and value is not False
    }
    grows = bool(shape) and shape[0] is None
    is_filtered = any(key != "fillvalue" for key in options)
    if chunks is True or (chunks is None and (grows or (is_filtered and shape))):
        chunks = automatic_chunks(shape, dtype.itemsize)
    if chunks:
        options["chunks"] = tuple(chunks) if isinstance(chunks, Sequence) else (chunks,)
    if grows:
        options["maxshape"] = shape
    if 0 in shape[1:]:
        raise DataError(f"{what} has the shape {shape}, so its rows have no elements.")
    split_axis = as_integer(f"{what}: split_axis", split_axis, 0, max(len(shape) - 1, 0))
    if split_axis and not grows:
        raise ValueError(f"{what} has a fixed size, and split_axis is for datasets that grow.")
    # In memory: h5py checks the arguments, and completes the data of the filters. So each rank
    # raises what h5py raises, and all ranks have the filters as the file will have them.
    with hdf5.h5py().File(io.BytesIO(), "w", libver=("earliest", "latest")) as file:
        initial = tuple(length or 0 for length in shape)
        stored = file.create_dataset("x", initial, dtype, **options)
        return _from_h5py(name, shape, dtype, stored, options, split_axis, fast_gzip)


def existing_dataset(name: str, stored: Any, fast_gzip: bool) -> OutputDataset:
    """Return the dataset for an open dataset of h5py, which grows."""
    shape = (None, *stored.shape[1:])
    found = _from_h5py(name, shape, stored.dtype, stored, {}, 0, fast_gzip)
    found.rows = stored.shape[0]
    return found


def _from_h5py(
    name: str,
    shape: tuple[int | None, ...],
    dtype: np.dtype,
    stored: Any,
    options: Mapping[str, Any],
    split_axis: int,
    fast_gzip: bool,
) -> OutputDataset:
    inner = tuple(length or 0 for length in shape[1:])
    if stored.chunks:
        chunk = stored.chunks
    else:
        # Whole rows, so that the elements of each "chunk" are contiguous in the file.
        row_bytes = max(math.prod(inner) * dtype.itemsize, 1)
        chunk = (min(max(2**20 // row_bytes, 1), max(shape[0] or 0, 1)) if shape else 1, *inner)
    # A key of the B-tree has only 32 bits for the number of bytes.
    if math.prod(chunk) * dtype.itemsize >= 2**32:
        raise DataError(f"HDF5Writer: chunks of dataset {name!r} have 4 GiB or more.")
    filters = hdf5.filters_of(stored)
    if filters and not hdf5.filters_edge_chunks(stored):
        raise DataError(f"HDF5Writer: dataset {name!r} does not filter its edge chunks.")
    fill = np.asarray(stored.fillvalue if stored.fillvalue is not None else 0)
    if fill.dtype != dtype:  # NumPy lacks the stored type, or h5py returns a different one
        is_same = dtype.kind in "biufcS" and fill.dtype.kind in "biufcS"
        fill = fill.astype(dtype) if is_same else np.zeros((), dtype)
    return OutputDataset(
        name,
        shape,
        dtype,
        Geometry(tuple(chunk), inner),
        make_encoder(name, filters, fast_gzip),
        fill.reshape(()),
        options,
        bool(stored.chunks),
        split_axis,
    )


def is_same_type(one: np.dtype, two: np.dtype) -> bool:
    """Return whether elements of two dtypes have the same bytes in a file."""
    if one == two:
        return True
    if one.itemsize != two.itemsize or one.hasobject or two.hasobject:
        return False
    # NumPy reads a type that it lacks, such as bfloat16, as opaque bytes.
    return "V" in (one.kind, two.kind) and not (one.names or two.names)
