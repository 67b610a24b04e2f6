"""Parallel writing of sharded tensors: each rank writes its own shards to one file.

Rank 0 makes room for the whole of each tensor. Once all shards are there, each rank reads some of
the pages, for their digests: no rank has all elements of a tensor.
"""

from __future__ import annotations

import functools
import itertools
import operator
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from mpistrat.checkpoint.digests import (
    PAGE_BYTES,
    ArrayDigest,
    digest_of_page_digests,
    page_digests_of,
)
from mpistrat.checkpoint.ranks import divide_work, this_worker
from mpistrat.checkpoint.root_file import RootFile
from mpistrat.checkpoint.shards import Extent, Room, Written, digests_in_file, sign, write_box
from mpistrat.checkpoint.writer import CheckpointWriter, Item, explaining
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CheckpointError
from mpistrat.sharding import ceil_div, cut, part_lengths

_PAGES_AT_ONCE = 16
"""What one thread reads, so that all have something to do."""


class PageRun(NamedTuple):
    """Some pages of one array."""

    name: str
    start: int
    stop: int


def runs_of_ranks(sizes: Mapping[str, int], num_ranks: int) -> list[list[PageRun]]:
    """Divide the pages of arrays of these `sizes` in bytes among the ranks, in order."""
    pages = {name: max(1, ceil_div(size, PAGE_BYTES)) for name, size in sizes.items()}
    runs: list[list[PageRun]] = []
    begin = 0  # of a rank's pages among all
    for length in part_lengths(sum(pages.values()), num_ranks):
        runs.append(list(_between(pages, begin, begin + length)))
        begin += length
    return runs


def _between(pages: Mapping[str, int], begin: int, end: int) -> Iterator[PageRun]:
    first = 0
    for name, number in pages.items():
        start, stop = max(begin, first), min(end, first + number)
        if start < stop:
            yield PageRun(name, start - first, stop - first)
        first += number


Digested = tuple[str, int, Written]
"""An array, the number of its first page that was read, and what was found."""


def digests_of_runs(
    handle: int, extents: Mapping[str, Extent], runs: Iterable[PageRun], num_threads: int
) -> list[Digested]:
    """Read `runs` of the arrays that lie in `extents` of a file, and return what they are."""
    parts = {}
    for name, start, stop in runs:
        whole = extents[name]
        for pages in cut(stop - start, _PAGES_AT_ONCE):
            first, last = (start + each for each in (pages.start, pages.stop))
            begin, end = first * PAGE_BYTES, min(last * PAGE_BYTES, whole.num_bytes)
            parts[name, first] = Extent(whole.offset + begin, end - begin, whole.item_bytes)
    found = digests_in_file(handle, parts, num_threads)
    return [(name, first, each) for (name, first), each in found.items()]


def join_runs(found: Sequence[Digested]) -> dict[str, Written]:
    """Return what whole arrays are, from all runs of their pages."""
    joined = {}
    ordered = sorted(found, key=operator.itemgetter(0, 1))
    for name, runs in itertools.groupby(ordered, key=operator.itemgetter(0)):
        parts = [written for _, _, written in runs]
        pages = b"".join(page_digests_of(ArrayDigest(each.digest, each.pages)) for each in parts)
        joined[name] = Written(
            sum(each.num_items for each in parts),
            functools.reduce(operator.xor, (each.parity for each in parts)),
            *digest_of_page_digests(pages),
        )
    return joined


class ShardedWriting:
    """Writes the sharded tensors among items, from all ranks."""

    def __init__(self, file: RootFile, path: str) -> None:
        self._file = file
        self._path = path
        self._items: dict[str, Item] = {}
        """The sharded tensors, on every rank."""
        self._room: Room | None = None

    def others(self, items: Iterable[Item]) -> Iterator[Item]:
        """Yield the items that are not sharded, and keep the others for `write`."""
        for item in items:
            if item.tensor is None:
                yield item
            else:
                self._items[item.path] = item
            del item  # or the next would come while this one is there

    def write(self, collectives: Collectives, what: str) -> None:
        """Write what `others` has kept. **Collective**."""
        if not self._items:
            return
        self._file.attempt_with(self._reserve)
        meshes = {name: item.tensor.mesh for name, item in self._items.items() if item.tensor}
        own: dict[str, Any] = {"worker": this_worker()}
        if self._room is not None:
            own |= {"room": asdict(self._room), "meshes": meshes}
        of_ranks = collectives.gather_json(own, what)
        if "room" not in of_ranks[0]:  # rank 0 has failed
            return
        room = Room.from_json(**of_ranks[0]["room"])
        # The same parameters may be sharded by several groups of ranks, each over its own mesh.
        names = [name for name, mesh in meshes.items() if mesh == of_ranks[0]["meshes"][name]]
        workers = [each["worker"] for each in of_ranks]
        is_spread = len({host for host, _ in workers}) > 1
        written = collectives.on_all(
            lambda: self._write_shards(room, names, is_spread), what, self._path
        )
        sizes = {name: each.num_bytes for name, each in room.extents.items()}
        runs = runs_of_ranks(sizes, collectives.size)[collectives.rank]
        num_threads = divide_work({}, workers, collectives.rank).num_threads
        found = collectives.on_all(lambda: self._digest(room, runs, num_threads), what, self._path)
        self._file.attempt_with(lambda writer: self._sign(writer, written, found))

    def _reserve(self, writer: CheckpointWriter) -> None:
        self._room = Room.reserve(writer, self._items)

    def _open(self, room: Room, flags: int) -> int:
        with explaining(self._path):
            handle = room.open(flags=flags)
        if handle is None:
            raise CheckpointError(
                f"The checkpoint {self._path} cannot be written: rank 0 has made {room.path}, but "
                "this rank does not see it. Save to a folder that all nodes share."
            )
        return handle

    def _write_shards(
        self, room: Room, names: Iterable[str], is_spread: bool
    ) -> dict[str, list[Written]]:
        handle = self._open(room, os.O_WRONLY)
        try:
            written: dict[str, list[Written]] = {}
            for name in names:
                tensor: Any = self._items[name].tensor
                for box, values in tensor.shards():
                    with explaining(self._path):
                        part = write_box(handle, room.extents[name], tensor.shape, box, values)
                    written.setdefault(name, []).append(part)
            if is_spread:  # else rank 0's flush at the end is for all
                with explaining(self._path):
                    os.fsync(handle)
        finally:
            os.close(handle)
        return written

    def _digest(self, room: Room, runs: Iterable[PageRun], num_threads: int) -> list[Digested]:
        handle = self._open(room, os.O_RDONLY)
        try:
            with explaining(self._path):
                return digests_of_runs(handle, room.extents, runs, num_threads)
        finally:
            os.close(handle)

    def _sign(
        self,
        writer: CheckpointWriter,
        written: Iterable[Mapping[str, list[list[Any]]]],
        found: Iterable[Iterable[list[Any]]],
    ) -> None:
        parts: dict[str, list[Written]] = {name: [] for name in self._items}
        for of_rank in written:
            for name, own in of_rank.items():
                parts[name] += [Written(*each) for each in own]
        runs = [(name, first, Written(*each)) for rank in found for name, first, each in rank]
        sign(writer, self._path, parts, join_runs(runs))
