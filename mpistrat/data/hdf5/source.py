"""HDF5 source: the examples of one or several files."""

from __future__ import annotations

import copy
import dataclasses
import os
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np

from mpistrat import nests
from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.hdf5.catalog import Catalog, read_catalog
from mpistrat.data.hdf5.chunk_cache import RowCache
from mpistrat.data.hdf5.reader import Allocate, Hdf5Reader
from mpistrat.data.order import PlainSource
from mpistrat.data.random import PassStream
from mpistrat.system.text import brief

__all__ = ["Hdf5Source"]


class Hdf5Source(PlainSource):
    """Examples from one or several HDF5 files, which are looked at when first needed."""

    is_of_files = True

    def __init__(
        self,
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        fields: Any,
    ) -> None:
        if isinstance(files, str | bytes | os.PathLike):
            files = [files]
        if isinstance(files, set | frozenset):
            raise TypeError(
                f"files must be a path or a list of paths, not a set: {files!r} has no order that "
                "all ranks share."
            )
        self._patterns = [os.fspath(file) for file in files]
        if not all(isinstance(pattern, str) for pattern in self._patterns):
            raise TypeError(f"files must be paths, not {self._patterns}.")
        if not self._patterns:
            raise ValueError("from_hdf5 needs at least one file, but the list is empty.")
        _check_fields(fields)
        self._fields = fields
        self._row_caches: dict[int, RowCache] = {}
        self._mappings: dict[int, np.ndarray] = {}
        self._empty: Allocate = np.empty

    def with_memory(self, empty: Allocate) -> Hdf5Source:
        """Return the source of the same examples, read into arrays that `empty` makes."""
        source = copy.copy(self)
        source._empty = empty
        return source

    def share_of_rank(self, size: int, rank: int) -> Hdf5Source:
        """Return the source of every `size`-th file, from file `rank` on."""
        num_files = len(self.catalog.files)
        if num_files < size:
            raise ValueError(
                f"AutoShardPolicy.FILE gives each rank its own files, but there are "
                f"{num_files} for {size} ranks. Use AutoShardPolicy.DATA."
            )
        mine = self.catalog.files[rank::size]
        source = Hdf5Source([file.path for file in mine], self._fields)
        source.catalog = dataclasses.replace(self.catalog, files=mine)
        return source.with_memory(self._empty)

    def only(self, fields: tuple[Any, ...]) -> Hdf5Source | None:
        """Return the source of tuples of some fields."""
        named = self._fields if self._fields is not None else dict.fromkeys(fields)
        if not isinstance(named, dict | tuple | list):
            return None
        try:
            chosen = tuple(named[field] or field for field in fields)
        except (KeyError, IndexError, TypeError):
            return None  # the one who asked says what is wrong
        source = copy.copy(self)
        for name in ("catalog", "layout"):
            vars(source).pop(name, None)
        source._fields, source._row_caches, source._mappings = chosen, {}, {}
        return source

    @cached_property
    def catalog(self) -> Catalog:
        """What the files contain; the first use opens each of them."""
        return read_catalog(self._patterns, self._fields)

    @property
    def is_read(self) -> bool:
        """Whether the files have been looked at."""
        return "catalog" in vars(self)

    def __repr__(self) -> str:
        num_more = len(self._patterns) - 1
        more = f" and {num_more} more" if num_more else ""
        fields = "" if self._fields is None else f", fields={brief(self._fields)}"
        return f"from_hdf5({self._patterns[0]!r}{more}{fields})"

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one example, in the structure of the fields."""
        specs = [layout.spec for layout in self.catalog.files[0].layouts]
        return nests.unflatten(self.catalog.structure, specs)

    @property
    def num_examples(self) -> int:  # type: ignore[override]
        """The rows of all files together."""
        return int(self.catalog.offsets[-1])

    @property
    def file_starts(self) -> np.ndarray:
        """The numbers of the first rows of all files but the first."""
        return self.catalog.offsets[1:-1]

    @cached_property
    def layout(self) -> ChunkLayout | None:
        """The chunks of the field with the largest rows, which cost most to decode."""
        widest = self.catalog.widest
        starts = [
            np.arange(offset, offset + file.num_rows, file.layouts[widest].rows_per_chunk)
            for offset, file in zip(self.catalog.offsets.tolist(), self.catalog.files, strict=False)
        ]
        return ChunkLayout(
            np.concatenate([*starts, self.catalog.offsets[-1:]]), sum(self.catalog.row_sizes)
        )

    @property
    def kind(self) -> str:
        """The method."""
        return "from_hdf5"

    @property
    def order_entries(self) -> list[str]:
        """The size of an example, and the name, length and chunks of each file."""
        # Folders do not count, so that ranks may read their own copies.
        widest = self.catalog.widest
        return [f"{sum(self.catalog.row_sizes)} bytes an example"] + [
            f"the file {os.path.basename(file.path)} with {file.num_rows} rows in chunks of "
            f"{file.layouts[widest].rows_per_chunk}"
            for file in self.catalog.files
        ]

    def open(self, window_rows: int, stream: PassStream) -> Hdf5Reader:
        """Return a reader that caches two windows: one in use, and the next."""
        return Hdf5Reader(self.catalog, window_rows, self._row_caches, self._empty, self._mappings)


def _check_fields(fields: Any) -> None:
    if fields is None:
        return
    names, _ = nests.flatten(fields)
    if not names:
        raise ValueError("from_hdf5 needs at least one field; None takes every top-level one.")
    for name in names:
        if not isinstance(name, str):
            raise TypeError(
                "fields must be a name, a tuple of names, or a dict from labels to names, "
                f"not {fields!r}."
            )
