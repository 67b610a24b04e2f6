"""Files with the same fields as the first one, of which there may be thousands.

Only their lengths and the places of their chunks are read, or received from a rank that has read
them.
"""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.data.hdf5.fields import encoded, parts_of
from mpistrat.data.hdf5.layouts import (
    Chunks,
    Column,
    ColumnLayout,
    Storage,
    contiguous_layout,
    layout_of,
)
from mpistrat.data.hdf5.locate import Kind, Located


@dataclass(frozen=True)
class _Dataset:
    """The properties that a dataset must have in all files."""

    place: str
    links: tuple[bytes, ...]
    """The beginnings of `place`, up to all of it: each must be a hard link to an object."""
    type: Any
    """The HDF5 type."""
    row_shape: tuple[int, ...]
    layout: int
    """The HDF5 layout, such as ``h5d.CONTIGUOUS``."""
    filters: tuple[int, ...]

    @classmethod
    def of(cls, file: Any, place: str) -> _Dataset | None:
        """Return the properties of a dataset; ``None`` if others cannot be compared with it."""
        dataset, names = file[place], parts_of(place)
        node = dataset.id
        kind = node.get_type()
        # Types of variable-length text and named types belong to their file.
        if node.dtype.hasobject or kind.committed():
            return None
        properties = node.get_create_plist()
        links = tuple(encoded("/".join(names[: n + 1])) for n in range(len(names)))
        filters = tuple(n for n, _ in hdf5.filters_of(dataset))
        return cls(place, links, kind, node.shape[1:], properties.get_layout(), filters)

    def open(self, file: Any) -> Any:
        """Return the low-level dataset of a different open file; ``None`` if it differs."""
        h5py, links = hdf5.h5py(), file.id.links
        try:
            # A soft or external link may lead to a different place in each file.
            if any(links.get_info(link).type != h5py.h5l.TYPE_HARD for link in self.links):
                return None
            node = h5py.h5d.open(file.id, self.links[-1])
        except (KeyError, OSError, RuntimeError, ValueError):  # `locate` raises the error
            return None
        properties, shape = node.get_create_plist(), node.shape
        is_same = (
            bool(shape)
            and shape[1:] == self.row_shape
            and node.get_type().equal(self.type)
            and properties.get_layout() == self.layout
            and not properties.get_external_count()
            and properties.get_nfilters() == len(self.filters)
            and all(properties.get_filter(i)[0] == each for i, each in enumerate(self.filters))
        )
        return node if is_same else None


@dataclass(frozen=True)
class Template:
    """The fields of the first file, if they are plain rows, to compare other files with."""

    columns: tuple[Column, ...]
    layouts: tuple[ColumnLayout, ...]
    """The layouts of the columns in the first file."""
    datasets: tuple[_Dataset, ...]

    @classmethod
    def of(
        cls,
        file: Any,
        located: Sequence[Located],
        columns: Sequence[Column],
        layouts: Sequence[ColumnLayout],
    ) -> Template | None:
        """Return the fields of an open file; ``None`` if each file must be located in full."""
        if any(e.kind is not Kind.ROWS or e.axis or e.others or e.left_out for e in located):
            return None
        places = dict.fromkeys(each.path for each in located)
        datasets = tuple(d for place in places if (d := _Dataset.of(file, place)) is not None)
        if len(datasets) < len(places):
            return None
        return cls(tuple(columns), tuple(layouts), datasets)

    def entry(self, file: Any, path: str) -> tuple[int, tuple[ColumnLayout, ...]] | None:
        """Return the number of rows of an open file, and its layouts; ``None`` if it differs."""
        nodes = {}
        for each in self.datasets:
            node = nodes[each.place] = each.open(file)
            if node is None:
                return None
        lengths = {node.shape[0] for node in nodes.values()}
        if len(lengths) > 1:
            return None
        pairs = zip(self.columns, self.layouts, strict=True)
        return lengths.pop(), tuple(_layout(nodes[c.path], path, c, first) for c, first in pairs)


def _layout(node: Any, path: str, column: Column, first: ColumnLayout) -> ColumnLayout:
    length, storage = node.shape[0], first.storage
    if length and storage is not None and storage.row_bytes and not first.is_chunked:
        offset = hdf5.offset_of_block(node, length * storage.row_bytes)
        if offset is not None:
            storage = Storage(np.array([offset]), length, storage.dtype, storage.row_bytes)
            return contiguous_layout(first.spec, length, storage)
    dataset = hdf5.h5py().Dataset(node, readonly=True)
    return layout_of(dataset, path, column.axis, column.dtype, False)


def layouts_to_json(
    layouts: Sequence[ColumnLayout], first: Sequence[ColumnLayout]
) -> list[Any] | None:
    """Return the layouts of a file as JSON values.

    ``None`` if the layouts of the `first` file are not sufficient to restore the rest.
    """
    values = [_to_json(each, of_first) for each, of_first in zip(layouts, first, strict=True)]
    return None if None in values else values


def layouts_from_json(
    values: Sequence[Any], first: Sequence[ColumnLayout]
) -> tuple[ColumnLayout, ...] | None:
    """Return the layouts from the JSON values of `layouts_to_json`.

    `first` are the layouts of the first file, which this rank has opened. ``None`` if this rank
    reads files in a different way and must open each file itself.
    """
    if len(values) != len(first):
        return None
    layouts = [_from_json(each, of_first) for each, of_first in zip(values, first, strict=True)]
    found = tuple(each for each in layouts if each is not None)
    return found if len(found) == len(layouts) else None


def _to_json(layout: ColumnLayout, first: ColumnLayout) -> Mapping[str, Any] | None:
    storage, chunks = layout.storage, layout.chunks
    if layout.spec != first.spec:
        return None
    if storage and (first.storage is None or storage.dtype != first.storage.dtype):
        return None
    if chunks and _emptied(chunks) != _emptied(first.chunks):
        return None
    return {
        "rows_per_chunk": layout.rows_per_chunk,
        "is_chunked": layout.is_chunked,
        "decoded_row_bytes": layout.decoded_row_bytes,
        "storage": storage and [_packed(storage.starts), storage.rows_per_chunk, storage.row_bytes],
        "chunks": chunks and [_packed(chunks.places), type(chunks).__name__],
    }


def _from_json(values: Mapping[str, Any], first: ColumnLayout) -> ColumnLayout | None:
    storage: Storage | None = None
    chunks: Chunks | None = None
    if values["storage"]:
        if first.storage is None:
            return None
        starts, rows_per_chunk, row_bytes = values["storage"]
        storage = Storage(_unpacked(starts), rows_per_chunk, first.storage.dtype, row_bytes)
    if values["chunks"]:
        places, kind = values["chunks"]
        if first.chunks is None or type(first.chunks).__name__ != kind:
            return None
        chunks = dataclasses.replace(first.chunks, places=_unpacked(places).reshape(-1, 3))
    return dataclasses.replace(
        first,
        rows_per_chunk=values["rows_per_chunk"],
        is_chunked=values["is_chunked"],
        decoded_row_bytes=values["decoded_row_bytes"],
        storage=storage,
        chunks=chunks,
    )


def _emptied(chunks: Chunks | None) -> Any:
    """Return the attributes that must be the same in all files: all but places and decoder."""
    return chunks and (type(chunks), {**vars(chunks), "places": None, "decoder": None})


def _packed(numbers: np.ndarray) -> str:
    content = np.ascontiguousarray(numbers, np.int64).tobytes()
    return base64.b64encode(zlib.compress(content, 1)).decode()


def _unpacked(text: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.int64)
