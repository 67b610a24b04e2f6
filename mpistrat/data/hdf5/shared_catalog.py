"""Shared catalog: what rank 0 found in many files, so that other ranks need not open them."""

from __future__ import annotations

import base64
import dataclasses
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mpistrat.data.hdf5.layouts import ColumnLayout
from mpistrat.data.hdf5.storage import Chunks, Storage


def layouts_to_json(
    layouts: Sequence[ColumnLayout], first: Sequence[ColumnLayout]
) -> list[Any] | None:
    """Return the layouts of a file as JSON values.

    ``None`` if they cannot be told from those of the `first` file.
    """
    values = [_to_json(each, of_first) for each, of_first in zip(layouts, first, strict=True)]
    return None if None in values else values


def layouts_from_json(
    values: Sequence[Any], first: Sequence[ColumnLayout]
) -> tuple[ColumnLayout, ...] | None:
    """Return what `layouts_to_json` has made to JSON values.

    `first` are the layouts of the first file, which this rank has opened. ``None`` if this rank
    reads files in a different way, so that it must open each.
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
    """Return what must be the same in all files: all but the places."""
    return chunks and (type(chunks), {**vars(chunks), "places": None, "decoder": None})


def _packed(numbers: np.ndarray) -> str:
    content = np.ascontiguousarray(numbers, np.int64).tobytes()
    return base64.b64encode(zlib.compress(content, 1)).decode()


def _unpacked(text: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), np.int64)
