"""A file of data written anew, with chunks that suit shuffled reading."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.cores import num_cores
from mpistrat.data.compression import Compression
from mpistrat.data.rechunk_plan import chunk_shape, rows_per_chunk
from mpistrat.data.rechunk_rows import RowCopy
from mpistrat.data.rechunk_tree import TreeCopy, plain_type
from mpistrat.data.virtual_sources import check_virtual_sources
from mpistrat.errors import DataError

__all__ = ["Rechunked", "rechunk"]

Report = Callable[[str, int, int], object]
"""Told of each step: what is being done, bytes done since the last report, bytes in all."""


@dataclass(frozen=True)
class Rechunked:
    """What has been done."""

    num_datasets: int
    """Data sets that have new chunks; others were copied as they are."""
    num_bytes: int
    """Their size in memory."""
    stored_bytes: int
    """Size of the new file."""


def rechunk(
    source: str | os.PathLike[str],
    target: str | os.PathLike[str],
    chunk_bytes: int,
    compression: Compression,
    num_workers: int | None = None,
    report: Report = lambda step, done, total: None,
) -> Rechunked:
    """Write the file `source` anew as `target`, which appears once it is complete. Local.

    Groups, links, attributes and references are kept. Data sets of numbers, bools, fixed strings
    and compounds of these get new chunks; others, scalars and empty ones are copied as they are.
    What is written is read back and compared.

    Parameters
    ----------
    source, target : path
    chunk_bytes : int
        Size of a chunk of the widest of the fields of one length in a group.
    compression : Compression
    num_workers : int, optional
        Threads; by default as many as there are cores.
    report : callable
        Gets what is being done, the bytes done since its last call, and how many there are.

    Raises
    ------
    DataError
        If `source` cannot be read, or what was written differs.
    OSError, RuntimeError
        If `target` cannot be written. Then it is as it was.
    """
    num_workers = num_workers or num_cores()
    hdf5.remove_leftovers(os.path.dirname(target) or ".", os.path.basename(target))
    with (
        contextlib.closing(hdf5.open_for_reading(source, DataError)) as old,
        hdf5.create_atomically(target) as new,
        ThreadPoolExecutor(num_workers, "mpistrat-rechunk") as pool,
    ):
        tree = TreeCopy(old, new)
        with _naming(source, "the tree"):
            tree.copy_groups()
        chunks = _plan(old, tree.datasets, chunk_bytes)
        copies = {}
        for path in tree.datasets:
            with _naming(source, path):
                check_virtual_sources(old[path])
                if path in chunks:
                    made = _create(old[path], new, path, chunks[path], compression)
                    copies[path] = RowCopy(old[path], made, pool, num_workers)
                else:
                    old.copy(old[path], new, name=path, without_attrs=True)
        total = sum(old[path].nbytes for path in copies)
        for step, work in (("writing", RowCopy.write), ("checking", RowCopy.check)):
            for path, copy in copies.items():
                with _naming(source, path):
                    work(copy, lambda done, step=step: report(step, done, total))  # type: ignore[misc]
            new.flush()
        with _naming(source, "what objects say of each other"):
            tree.finish()
    return Rechunked(len(copies), total, os.path.getsize(target))


def _plan(file: Any, paths: list[str], chunk_bytes: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of a chunk of each data set that gets new ones."""
    together: dict[tuple[str, int], dict[str, int]] = {}
    for path in paths:
        dataset = file[path]
        if dataset.shape and dataset.size and _is_plain(dataset.dtype):
            key = os.path.dirname(path), dataset.shape[0]
            row_bytes = math.prod(dataset.shape[1:]) * dataset.dtype.itemsize
            together.setdefault(key, {})[path] = row_bytes
    rows: dict[str, int] = {}
    for (_, num_rows), row_bytes in together.items():
        rows |= rows_per_chunk(row_bytes, num_rows, chunk_bytes)
    return {
        path: chunk_shape(file[path].shape, file[path].dtype.itemsize, each, chunk_bytes)
        for path, each in rows.items()
    }


def _is_plain(dtype: np.dtype) -> bool:
    return not dtype.hasobject and dtype.subdtype is None and dtype.itemsize > 0


def _create(
    source: Any, target: Any, path: str, chunks: tuple[int, ...], compression: Compression
) -> Any:
    """Make a data set with the type, shape and limits of `source`, and other chunks."""
    h5py = hdf5.h5py()
    old = source.id.get_create_plist()
    if compression.name == "keep" and source.chunks:
        properties = old.copy()
        _check_encoders(source)
    else:
        properties = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
        if old.fill_value_defined() == h5py.h5d.FILL_VALUE_USER_DEFINED:
            fill = np.zeros((), source.dtype)
            old.get_fill_value(fill)
            properties.set_fill_value(fill)
    properties.set_chunk(chunks)
    if compression.is_shuffled and source.dtype.itemsize > 1:
        properties.set_shuffle()
    for number, values in compression.filters:
        properties.set_filter(number, h5py.h5z.FLAG_OPTIONAL, values)
    made = h5py.h5d.create(
        target.id,
        path.encode(),
        plain_type(source.id.get_type()),
        source.id.get_space(),
        properties,
    )
    return h5py.Dataset(made)


def _check_encoders(source: Any) -> None:
    h5z = hdf5.h5py().h5z
    for number, _ in hdf5.filters_of(source):
        if not (
            h5z.filter_avail(number)
            and h5z.get_filter_info(number) & h5z.FILTER_CONFIG_ENCODE_ENABLED
        ):
            raise DataError(
                f"The filter {number} of {source.name} cannot be applied here. Choose another "
                "with --compression."
            )


@contextlib.contextmanager
def _naming(source: str | os.PathLike[str], what: str) -> Iterator[None]:
    """Turn what h5py raises into a `DataError` that names the file and the place in it."""
    try:
        yield
    except DataError as reason:
        raise DataError(f"{os.fspath(source)}: {reason}") from reason
    except (KeyError, OSError, RuntimeError, TypeError, ValueError) as reason:
        if isinstance(reason, OSError) and reason.errno:  # of the system: the disk is full, ...
            raise
        raise DataError(
            f"{os.fspath(source)}: {what} cannot be copied: {reason}. The file is damaged, or "
            "holds what this version of HDF5 does not know."
        ) from reason
