"""HDF5 source: the examples of one or several files, and how the ranks agree on these files."""

from __future__ import annotations

import copy
import dataclasses
import glob
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat import nests
from mpistrat.data.chunks import ChunkLayout
from mpistrat.data.hdf5.catalog import Catalog, Known, read_catalog
from mpistrat.data.hdf5.chunk_cache import RowCache
from mpistrat.data.hdf5.examples import Allocate
from mpistrat.data.hdf5.fields import Field, as_field, has_pattern
from mpistrat.data.hdf5.row_reader import Hdf5Reader
from mpistrat.data.order import PlainSource
from mpistrat.data.random import PassStream
from mpistrat.errors import DataError
from mpistrat.system.text import brief, rank_list, ranks_by_value
from mpistrat.system.xxh3 import digest_of_values, mixed_digest

if TYPE_CHECKING:
    from mpistrat.collectives.collectives import Collectives
    from mpistrat.data.pipeline import Pipeline


class Hdf5Source(PlainSource):
    """Examples from one or several HDF5 files, which are opened on first use."""

    is_of_files = True

    def __init__(
        self,
        files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
        fields: Any,
        is_live: bool = False,
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
        self.is_live = is_live
        """Whether a program is writing the files, with SWMR."""
        self._known: Known | None = None
        """The catalog of rank 0, as JSON values."""
        self._row_caches: dict[int, RowCache] = {}
        self._mappings: dict[int, np.ndarray] = {}
        self._single_caches: dict[int, dict[int, Any]] = {}
        self._empty: Allocate | None = None

    def with_memory(self, empty: Allocate | None) -> Hdf5Source:
        """Return the source of the same examples, read into arrays that `empty` allocates."""
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
        source = Hdf5Source([file.path for file in mine], self._fields, self.is_live)
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
            return None  # the caller raises an error that names the missing field
        source = copy.copy(self)
        # Cached values belong to the source with all fields.
        for name in ("catalog", "layout"):
            vars(source).pop(name, None)
        source._fields, source._row_caches, source._mappings = chosen, {}, {}
        return source

    @cached_property
    def catalog(self) -> Catalog:
        """The contents of the files; the first use opens each of them."""
        return read_catalog(self._patterns, self._fields, self._known, self.is_live)

    @property
    def has_patterns(self) -> bool:
        """Whether fields have patterns, whose matches rank 0 lists for all ranks."""
        given = nests.flatten(self._fields)[0] if self._fields is not None else []
        return any(has_pattern(as_field(each)) for each in given)

    @property
    def may_be_shared(self) -> bool:
        """Whether rank 0 opens the files for all ranks, because of many files or many groups."""
        return self.has_patterns or len(self._patterns) > 1 or glob.has_magic(self._patterns[0])

    def learn(self, known: Known) -> None:
        """Use the catalog of a different rank, unless this rank has opened the files itself."""
        self._known = known

    def anew(self) -> Hdf5Source:
        """Return a new source of the same files, which has not read anything yet."""
        source = Hdf5Source(self._patterns, self._fields, self.is_live)
        return source.with_memory(self._empty)

    def limit_rows(self, num_rows: Sequence[int]) -> None:
        """Limit each file to this number of rows."""
        files = [
            dataclasses.replace(file, num_rows=count)
            for file, count in zip(self.catalog.files, num_rows, strict=True)
        ]
        self.catalog = dataclasses.replace(self.catalog, files=tuple(files))

    @property
    def is_read(self) -> bool:
        """Whether the files have been opened."""
        return "catalog" in vars(self)

    def __repr__(self) -> str:
        num_more = len(self._patterns) - 1
        more = f" and {num_more} more" if num_more else ""
        fields = "" if self._fields is None else f", fields={brief(self._fields)}"
        swmr = ", swmr=True" if self.is_live else ""
        return f"from_hdf5({self._patterns[0]!r}{more}{fields}{swmr})"

    @property
    def element_spec(self) -> Any:
        """The nest of `ArraySpec` of one example, in the structure of the fields."""
        specs = [output.spec for output in self.catalog.outputs]
        return nests.unflatten(self.catalog.structure, specs)

    @property
    def num_examples(self) -> int:  # type: ignore[override]
        """The number of rows of all files together."""
        return int(self.catalog.offsets[-1])

    @property
    def file_starts(self) -> np.ndarray:
        """The numbers of the first rows of all files but the first."""
        return self.catalog.offsets[1:-1]

    def row_lengths(self) -> np.ndarray | None:
        """Return the common length of the arrays of each example, if the files have it."""
        return self.catalog.row_lengths()

    @cached_property
    def layout(self) -> ChunkLayout | None:
        """The chunks of the field with the largest rows, which take longest to decode."""
        catalog = self.catalog
        starts = [
            np.arange(offset, offset + file.num_rows, catalog.rows_per_chunk(file))
            for offset, file in zip(catalog.offsets.tolist(), catalog.files, strict=False)
        ]
        return ChunkLayout(
            np.concatenate([*starts, catalog.offsets[-1:]]), max(catalog.example_bytes, 1)
        )

    @property
    def kind(self) -> str:
        """The method and the fields, so that ranks with different fields of one shape differ."""
        return "from_hdf5" if self._fields is None else f"from_hdf5 of {self._fields!r}"

    @property
    def order_entries(self) -> list[str]:
        """The size of an example, and the name, length and chunks of each file."""
        # Folders are not compared, so that ranks may read their own copies.
        catalog = self.catalog
        entries = [f"{catalog.example_bytes} bytes an example"] + [
            f"the file {os.path.basename(file.path)} with {file.num_rows} rows in chunks of "
            f"{catalog.rows_per_chunk(file)}"
            for file in catalog.files
        ]
        # An attribute or an axis decides what a row is; the names of matches decide their order.
        given = nests.flatten(self._fields)[0] if self._fields is not None else []
        forms = [
            field for field in map(as_field, given) if field.attribute is not None or field.axis
        ]
        entries += [f"the field {field!r}" for field in forms]
        entries += [
            f"the matches {listing.digest} of {text} in {os.path.basename(file.path)}"
            for file in catalog.files
            for text, listing in file.listings.items()
        ]
        return entries

    def open(self, window_rows: int, stream: PassStream) -> Hdf5Reader:
        """Return a reader that caches two windows: the one in use and the next one."""
        return Hdf5Reader(
            self.catalog,
            window_rows,
            self._row_caches,
            self._empty,
            self._mappings,
            self._single_caches,
        )


def _check_fields(fields: Any) -> None:
    if fields is None:
        return
    names, _ = nests.flatten(fields)
    if not names:
        raise ValueError("from_hdf5 needs at least one field; None takes every top-level one.")
    for name in names:
        if not isinstance(name, str | Field):
            raise TypeError(
                "fields must be a name or a Field, a tuple of them, or a dict from labels to them, "
                f"not {fields!r}."
            )
        as_field(name)


def _sources(pipeline: Pipeline) -> Iterator[Hdf5Source]:
    """Yield the HDF5 sources of a pipeline, including the datasets that it combines."""
    if isinstance(pipeline.source, Hdf5Source):
        yield pipeline.source
    for child in getattr(pipeline.source, "children", ()):
        yield from _sources(child)


def describe_files(pipeline: Pipeline) -> list[Any]:
    """Return the values that ranks compare before they share a catalog, as JSON values. Local."""
    # Other ranks may have different files, or may have opened them already.
    return [
        [repr(source), source.is_live, source.may_be_shared and not source.is_read]
        for source in _sources(pipeline)
        if source.is_live or source.may_be_shared
    ]


def agree_on_files(
    pipeline: Pipeline, of_ranks: list[list[Any]], collectives: Collectives, kind: str
) -> Pipeline:
    """Return the pipeline with the same catalog of its files on all ranks. **Collective**.

    `of_ranks` has the result of `describe_files` of each rank.
    """
    if not of_ranks[0]:
        return pipeline
    named = [[entry[:2] for entry in entries] for entries in of_ranks]
    if any(each != named[0] for each in named):
        return pipeline  # if they differ, `check_same` raises an error
    source = pipeline.source
    if isinstance(source, Hdf5Source) and source.is_live:
        # The files may have grown since they were opened.
        pipeline = dataclasses.replace(pipeline, source=source.anew())
    sources = [each for each in _sources(pipeline) if each.is_live or each.may_be_shared]
    for number, each in enumerate(sources):
        is_new = each.is_live and each is pipeline.source
        lacks = [(is_new and each.has_patterns) or entries[number][2] for entries in of_ranks]
        if any(lacks):
            known = collectives.on_root(lambda each=each: each.catalog.known, kind)  # type: ignore[misc]
            if not each.is_read:
                each.learn(known)
        if each.is_live:
            lengths = collectives.on_all(
                lambda each=each: [file.num_rows for file in each.catalog.files],  # type: ignore[misc]
                kind,
            )
            # The writer may append rows after one rank has opened the file and before the next one
            # does. All ranks use the rows that every rank has seen.
            each.limit_rows([min(of_file) for of_file in zip(*lengths, strict=False)])
    return pipeline


_NUM_COMPARED = 64
"""Number of examples that are compared, spread evenly over the files of a dataset."""


def check_copies(pipeline: Pipeline, collectives: Collectives, kind: str) -> None:
    """Raise `DataError` if the files of some ranks have different examples. **Collective**.

    All ranks must already have the same pipeline, with the same names, lengths and types.
    """
    sources = [each for each in _sources(pipeline) if not each.is_live]
    if not sources or collectives.size == 1:
        return
    # Ranks with the same files need not read them.
    stamps = [str(file.stamp) for source in sources for file in source.catalog.files]
    own = mixed_digest([digest_of_values(np.array(stamps))])
    if len(set(collectives.gather_json(own, kind))) == 1:
        return
    with collectives.all_or_none(kind):
        own = mixed_digest([_digest_of_sample(each) for each in sources])
    digests = collectives.gather_json(own, kind)
    if len(set(digests)) == 1:
        return
    folder = os.path.dirname(os.path.abspath(sources[0].catalog.files[0].path))
    places = collectives.gather_json(f"{folder} on {socket.gethostname()}", kind)
    found = [
        f"{rank_list(ranks)} {'reads' if len(ranks) == 1 else 'read'} {places[ranks[0]]}"
        for ranks in ranks_by_value(enumerate(digests)).values()
    ]
    with collectives.common_outcome(kind):  # so that all replicas of a rank raise it together
        raise DataError(
            f"{kind}: all ranks must read the same examples, but their files differ, which "
            f"{sources[0]!r} names: {', '.join(found)}. Copy the files again, or pass a path that "
            "is the same file on every rank. For data of each rank's own use "
            "distribute_datasets_from_function."
        )


def _digest_of_sample(source: Hdf5Source) -> int:
    """Return a 64-bit digest of some of the examples. Local."""
    count = source.num_examples
    numbers = np.unique(np.linspace(0, count - 1, min(count, _NUM_COMPARED)).astype(np.int64))
    with closing(source.open(len(numbers), PassStream())) as reader:
        reader.expect(numbers)
        leaves, _ = nests.flatten(reader.read(numbers))
    return mixed_digest([_digest_of_leaf(np.asarray(leaf)) for leaf in leaves])


def _digest_of_leaf(leaf: np.ndarray) -> int:
    if leaf.dtype == object:  # strings, and rows of different lengths
        return mixed_digest([_digest_of_leaf(np.asarray(each)) for each in leaf.reshape(-1)])
    return digest_of_values(leaf)
