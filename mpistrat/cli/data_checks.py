"""Checks of HDF5 data files for ``mpistrat verify``, and their comparison for ``mpistrat diff``."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.data.hdf5.filters import ChunkDecoder, make_decoder
from mpistrat.errors import DataError
from mpistrat.mpi.launcher import cores_of_rank
from mpistrat.sharding import cut

_ERRORS = (OSError, RuntimeError, KeyError, ValueError, TypeError)
"""Errors that h5py raises if an object is damaged."""
_BYTES_AT_ONCE = 2**24


def verify_data(path: str) -> dict[str, Any]:
    """Return whether all chunks of a file are there, apart from each other, and can be decoded."""
    try:
        with contextlib.closing(hdf5.open_for_reading(path, DataError)) as file:
            datasets = _datasets_of(file)
            places: list[tuple[int, int, str]] = []
            for name, dataset in datasets.items():
                error = _check_dataset(path, name, dataset, places)
                if error:
                    return {"sound": False, "error": error}
            error = _overlap(sorted(places))
            size = sum(each.id.get_storage_size() for each in datasets.values())
    except _ERRORS as reason:
        return {"sound": False, "error": f"{path}: {hdf5.error_text(reason)}"}
    if error:
        return {"sound": False, "error": error}
    return {"sound": True, "num_datasets": len(datasets), "size_bytes": size}


def _datasets_of(file: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}

    def visit(name: str, node: Any) -> None:
        if isinstance(node, hdf5.h5py().Dataset):
            found[name] = node

    file.visititems(visit)
    return found


def _check_dataset(
    path: str, name: str, dataset: Any, places: list[tuple[int, int, str]]
) -> str | None:
    """Return what is wrong with a dataset; add the places of its bytes to `places`."""
    size = os.path.getsize(path)
    if dataset.shape is None or dataset.is_virtual or dataset.external:
        return None
    if not dataset.chunks:
        offset = hdf5.offset_of_block(dataset.id, dataset.nbytes)
        if offset is not None:
            places.append((offset, dataset.nbytes, f"dataset {name!r}"))
            if offset + dataset.nbytes > size:
                return f"dataset {name!r}: its bytes end at {offset + dataset.nbytes} of {size}"
        return None
    chunks: list[Any] = []
    if hasattr(dataset.id, "chunk_iter"):
        dataset.id.chunk_iter(chunks.append)
    else:
        chunks = [dataset.id.get_chunk_info(n) for n in range(dataset.id.get_num_chunks())]
    for offsets, _, start, num_bytes in chunks:
        where = _rows(name, dataset, offsets)
        places.append((start, num_bytes, where))
        if start + num_bytes > size:
            return f"{where}: the chunk ends at byte {start + num_bytes} of {size}"
    decoder = make_decoder(hdf5.filters_of(dataset))
    if decoder is None or dataset.file.userblock_size:
        return _read_by_hdf5(name, dataset)
    return _decode_all(path, name, dataset, decoder, chunks)


def _rows(name: str, dataset: Any, offsets: tuple[int, ...]) -> str:
    last = min(offsets[0] + dataset.chunks[0], dataset.shape[0])
    return f"dataset {name!r}, rows {offsets[0]} to {last - 1}"


def _read_by_hdf5(name: str, dataset: Any) -> str | None:
    for start in range(0, len(dataset), dataset.chunks[0]):
        try:
            dataset[start : start + dataset.chunks[0]]
        except _ERRORS as reason:
            where = _rows(name, dataset, (start,))
            return f"{where}: {hdf5.error_text(reason)}"
    return None


def _decode_all(
    path: str, name: str, dataset: Any, decoder: ChunkDecoder, chunks: list[Any]
) -> str | None:
    """Decode all chunks in threads, and return what is wrong with the first damaged one."""
    item_bytes = dataset.id.get_type().get_size()
    num_bytes = math.prod(dataset.chunks) * item_bytes

    def decode(chunk: Any) -> str | None:
        offsets, mask, start, size = chunk
        try:
            decoder.decode(os.pread(handle, size, start), mask, num_bytes)
        except _ERRORS as reason:
            return f"{_rows(name, dataset, offsets)}: {reason}"
        return None

    handle = os.open(path, os.O_RDONLY)
    try:
        with ThreadPoolExecutor(max(cores_of_rank(), 1)) as threads:
            return next(filter(None, threads.map(decode, chunks)), None)
    finally:
        os.close(handle)


def _overlap(places: list[tuple[int, int, str]]) -> str | None:
    for (start, size, one), (begin, _, two) in itertools.pairwise(places):
        if begin < start + size:
            return f"{one} and {two} overlap in the file, at byte {begin}"
    return None


def differences_of_data(a: str, b: str) -> tuple[int, list[tuple[str, str]]]:
    """Return the number of datasets of two files, and each that differs with what differs."""
    with (
        contextlib.closing(hdf5.open_for_reading(a, DataError)) as file_a,
        contextlib.closing(hdf5.open_for_reading(b, DataError)) as file_b,
    ):
        of_a, of_b = _datasets_of(file_a), _datasets_of(file_b)
        names = sorted({*of_a, *of_b})
        rows = []
        for name in names:
            if name not in of_a or name not in of_b:
                rows.append((name, f"only in {'a' if name in of_a else 'b'}"))
                continue
            rows += [(name, what) for what in _difference(of_a[name], of_b[name])]
    return len(names), rows


def _difference(a: Any, b: Any) -> Iterator[str]:
    in_a, in_b = (f"{each.dtype} {each.shape}" for each in (a, b))
    if in_a != in_b:
        yield f"{in_a} in a, {in_b} in b"
        return
    if a.shape is None:
        return
    count, first = 0, None
    row_bytes = max(math.prod(a.shape[1:]) * a.dtype.itemsize, 1)
    parts: list[Any] = [()]
    if a.shape:
        parts = cut(len(a), max(_BYTES_AT_ONCE // row_bytes, 1))
    for part in parts:
        one, two = np.asarray(a[part]), np.asarray(b[part])
        differ = _differ(one, two)
        num = int(np.count_nonzero(differ))
        if num and first is None and a.shape:
            first = part.start + int(np.argwhere(differ)[0][0])
        count += num
    if count:
        where = "" if first is None else f", first in row {first}"
        yield f"{count} of {a.size} elements differ{where}"


def _differ(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return which elements of two arrays of the same shape and dtype differ; NaN equals NaN."""
    if a.dtype.names:
        fields = [_differ(a[name], b[name]) for name in a.dtype.names]
        # A field may be an array itself, and so has more axes.
        found = [each.reshape(*a.shape, -1).any(axis=-1) for each in fields]
        return np.asarray(np.logical_or.reduce(found))
    if a.dtype.hasobject:  # strings, or rows of any length
        pairs = zip(a.flat, b.flat, strict=True)
        return np.array([not _is_same(*pair) for pair in pairs], bool).reshape(a.shape)
    differ = np.asarray(a != b)
    if a.dtype.kind in "fc":
        differ &= ~(np.isnan(a) & np.isnan(b))
    return differ


def _is_same(a: Any, b: Any) -> bool:
    # NumPy ignores zero bytes at the end of strings, so it compares only arrays.
    return np.array_equal(a, b) if isinstance(a, np.ndarray) else bool(a == b)
