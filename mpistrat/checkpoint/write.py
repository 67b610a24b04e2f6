"""Write of arrays that several ranks have: each rank writes its parts to the file of rank 0.

Rank 0 reserves a `Room` in the file, each rank writes its own parts there, the digests are
computed, and rank 0 signs. The ranks write through the file's descriptor, past the HDF5 library,
which therefore needs no MPI.
"""

from __future__ import annotations

import base64
import functools
import mmap
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np

from mpistrat.checkpoint.digests import ArrayDigest, digest_of_array
from mpistrat.checkpoint.raw_io import (
    ChecksumPool,
    Digested,
    Extent,
    InOrder,
    PageRun,
    Worker,
    Written,
    digests_of_runs,
    divide_work,
    join_runs,
    runs_of_ranks,
    this_worker,
    write_at,
    write_box,
)
from mpistrat.checkpoint.writer import CheckpointWriter, Item, RootFile, explaining
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CheckpointError
from mpistrat.sharding import Box

_PAGE = mmap.PAGESIZE


@dataclass(frozen=True)
class Room:
    """Space for arrays in a file that one rank has created, and that several ranks write to.

    The steps of such a write are `reserve`, `write_parts`, `read_back` and `sign`. The caller
    decides how the ranks exchange the results: see `write_together`, and `mpistrat.torch.dcp`.
    """

    path: str
    """Path of the checkpoint, for messages."""
    temporary: str
    inode: int
    extents: dict[str, Extent]

    @classmethod
    def reserve(cls, writer: CheckpointWriter, path: str, items: Iterable[Item]) -> Room:
        """Reserve space for `items`, whose values this rank need not have."""
        extents = {
            item.path: Extent(writer.reserve(item), item.num_bytes, item.dtype.itemsize)
            for item in items
        }
        end = max((each.offset + each.num_bytes for each in extents.values()), default=0)
        with explaining(path):
            # Other nodes must not see holes where other ranks have written.
            if os.fstat(writer.handle).st_size < end:
                os.ftruncate(writer.handle, end)
            inode = os.fstat(writer.handle).st_ino
        return cls(path, os.path.abspath(writer.temporary), inode, extents)

    def only(self, names: Iterable[str]) -> Room:
        """Return the space of only the arrays `names`."""
        return replace(self, extents={name: self.extents[name] for name in names})

    def open(self, flags: int = os.O_WRONLY) -> int | None:
        """Return a descriptor of the file, ``None`` if this rank does not see it."""
        try:
            # O_NONBLOCK: a path that is a pipe on this node must not block the rank forever.
            handle = os.open(self.temporary, flags | os.O_NONBLOCK)
        except OSError:
            return None
        # On this node the path may name a file on a local disk. Only the inode tells the
        # difference.
        if os.fstat(handle).st_ino == self.inode:
            return handle
        os.close(handle)
        return None

    def open_or_raise(self, flags: int = os.O_WRONLY) -> int:
        """Return a descriptor of the file, or raise if this rank does not see it."""
        handle = self.open(flags)
        if handle is None:
            raise CheckpointError(
                f"The checkpoint {self.path} cannot be written: a different rank has created "
                f"{self.temporary}, but this rank does not see it. Save to a folder that all nodes "
                "share."
            )
        return handle

    def write_part(self, handle: int, name: str, box: Box, values: np.ndarray) -> Written:
        """Write this rank's values of a part of an array."""
        # Boxes of neighbouring ranks may share a page. `sign` checks that no page has lost any of
        # them.
        with explaining(self.path):
            return write_box(handle, self.extents[name], box, values)

    def read_back(self, runs: Iterable[PageRun], num_threads: int) -> list[Digested]:
        """Return the digests of this rank's `runs` of pages, once all ranks have written."""
        # Opened again, after all writers have closed it: only then does NFS promise to show the
        # data of other nodes (nfs(5), close-to-open consistency).
        handle = self.open_or_raise(os.O_RDONLY)
        try:
            with explaining(self.path):
                return digests_of_runs(handle, self.extents, runs, num_threads)
        finally:
            os.close(handle)

    def sign(
        self,
        writer: CheckpointWriter,
        written: Sequence[Mapping[str, Sequence[Written]]],
        found: Iterable[Digested],
    ) -> None:
        """Check that the file holds what each rank has `written`, and add the digests.

        `found` are the digests of arrays written in parts, which the ranks have read back.
        """
        parts: dict[str, list[Written]] = {name: [] for name in self.extents}
        for rank, of_rank in enumerate(written):
            for name, own in of_rank.items():
                parts[name] += own
                if own[0].digest:
                    self._take_over(writer, name, rank, own[0])
        for name, whole in join_runs(found).items():
            self._check_parts(name, parts[name], whole)
            writer.set_digest(name, ArrayDigest(whole.digest, whole.pages))

    def _check_parts(self, name: str, parts: Sequence[Written], whole: Written) -> None:
        # Two checks that do not depend on the order of elements: their number, and the exclusive or
        # of all of them, which is zero if the written and the found elements agree.
        num_items = sum(each.num_items for each in parts)
        if num_items != whole.num_items:
            raise CheckpointError(
                f"The checkpoint {self.path} cannot be written: the ranks that save have "
                f"{num_items} of the {whole.num_items} elements of {name}. All ranks of its device "
                "mesh must take part. What was there before is unchanged."
            )
        if functools.reduce(operator.xor, (each.parity for each in parts), whole.parity):
            raise CheckpointError(
                f"The checkpoint {self.path} cannot be written by all ranks together: the file "
                f"does not contain the values of {name} that they have written. On this file "
                "system, nodes do not see each other's writes. Save to a different one. The "
                "previous file, if any, is unchanged."
            )

    def _take_over(self, writer: CheckpointWriter, name: str, rank: int, written: Written) -> None:
        """Check a page of an array that `rank` has written, and write the rest that it left out."""
        # On a file system that does not show this rank the bytes of other nodes, the digest would
        # not describe the data in the file. One page of each array shows whether it is such a file
        # system.
        begin, num_bytes = self.extents[name].offset, self.extents[name].num_bytes
        with explaining(self.path):
            page = os.pread(writer.handle, _PAGE, begin)  # empty beyond the end
        if digest_of_array(np.frombuffer(page, np.uint8)).text != written.first_page:
            raise CheckpointError(
                f"The checkpoint {self.path} cannot be written by all ranks together: rank 0 does "
                f"not find in it what rank {rank} has written of {name}. This file system does not "
                "show all nodes the same. Save with parallel=False."
            )
        rest = np.frombuffer(base64.b64decode(written.rest), np.uint8)
        # The end of an array shares its page with the next data, so only this rank writes that
        # page.
        with explaining(self.path):
            write_at(writer.handle, begin + num_bytes - rest.size, rest)
        writer.set_digest(name, ArrayDigest(written.digest, written.pages))


class _WholePages:
    """Writes an array that all ranks have, except the end that does not fill a page."""

    # No two ranks write to one page of the file, because no rank reads all of it back. Network file
    # systems, where each node keeps pages in memory, may lose the data of one of the writers.

    def __init__(self, handle: int, extent: Extent) -> None:
        self._write = InOrder(write_at, handle, extent.offset)
        self._left = extent.num_bytes - extent.num_bytes % _PAGE
        self._first_page = ""
        self._rest = b""

    def __call__(self, part: np.ndarray) -> None:
        data = part.view(np.uint8)
        # `_left` counts the bytes of whole pages that are still to be written. The report sends the
        # bytes after them to rank 0.
        self._first_page = self._first_page or digest_of_array(data[:_PAGE]).text
        self._rest += data[self._left :].tobytes()
        self._write(data[: self._left])
        self._left -= min(self._left, data.size)

    def report(self, digest: ArrayDigest) -> Written:
        """Return what rank 0 must know of the write."""
        return Written(0, 0, *digest, self._first_page, base64.b64encode(self._rest).decode())


def write_together(
    file: RootFile, collectives: Collectives, what: str, path: str, items: Sequence[Item]
) -> None:
    """Have all ranks write `items` to the `file` that rank 0 has created. **Collective**."""
    holders = {item.path: item.parts.holders for item in items if item.parts is not None}
    room = file.use(Room.reserve, path, items)
    told = collectives.broadcast_json(room and {"room": asdict(room), "holders": holders})
    if told is None:  # rank 0 has failed
        return
    extents = {name: Extent(*each) for name, each in told["room"].pop("extents").items()}
    room = Room(**told["room"], extents=extents)
    # The same parameters may be sharded by several groups of ranks, each over its own mesh. Only
    # rank 0's group writes.
    own = [
        each
        for each in items
        if each.parts is None or each.parts.holders == told["holders"][each.path]
    ]
    share = _Share(room, own, collectives.rank)
    try:
        # The arrays that all ranks have are divided among the ranks that can open the file, and all
        # ranks must know these before one of them writes.
        workers = collectives.on_all(lambda: share.open(bool(holders)), what, path)
        written = collectives.on_all(lambda: share.write(workers), what, path)
    finally:
        share.close()
    found: list[Digested] = []
    if holders:
        # By now the parts of all ranks are in the file, so each rank may read pages that other
        # ranks have written.
        in_parts = {name: room.extents[name].num_bytes for name in holders}
        runs = runs_of_ranks(in_parts, collectives.size)[collectives.rank]
        num_threads = divide_work({}, workers, collectives.rank).num_threads
        for of_rank in collectives.on_all(lambda: room.read_back(runs, num_threads), what, path):
            found += [(name, first, Written(*each)) for name, first, each in of_rank]
    file.use(lambda writer: room.sign(writer, list(map(_from_json, written)), found))


def _from_json(written: Mapping[str, Sequence[Sequence[Any]]]) -> dict[str, list[Written]]:
    return {name: [Written(*each) for each in parts] for name, parts in written.items()}


class _Share:
    """The part of the arrays in a `Room` that one rank writes."""

    def __init__(self, room: Room, items: Iterable[Item], rank: int) -> None:
        self._room, self._rank = room, rank
        self._items = {item.path: item for item in items}
        self._handle: int | None = None

    def open(self, must_be_seen: bool) -> Worker | None:
        """Return this rank as a worker, ``None`` if it does not see the file."""
        is_needed = must_be_seen or self._rank == 0
        self._handle = self._room.open_or_raise() if is_needed else self._room.open()
        return None if self._handle is None else this_worker()

    def close(self) -> None:
        """Close the file."""
        if self._handle is not None:
            os.close(self._handle)

    def write(self, workers: Sequence[Worker | None]) -> dict[str, list[Written]]:
        """Write this rank's share of whole arrays, and its parts of others; then flush them."""
        handle, room = self._handle, self._room
        sizes = {n: each.num_bytes for n, each in self._items.items() if each.parts is None}
        work = divide_work(sizes, workers, self._rank)
        if handle is None:
            return {}
        written: dict[str, list[Written]] = {}
        with explaining(room.path):
            if work.own:
                written |= self._write_whole(handle, work.own, work.num_threads)
            for name, item in self._items.items():
                for box, values in item.parts.own() if item.parts is not None else ():
                    part = room.write_part(handle, name, box, values)
                    written.setdefault(name, []).append(part)
            # Rank 0 flushes the file at its end. For parts, that covers all ranks of one host.
            if self._rank and (work.own or len({each[0] for each in workers if each}) > 1):
                os.fsync(handle)
            self._handle = None
            os.close(handle)
        return written

    def _write_whole(
        self, handle: int, names: Iterable[str], num_threads: int
    ) -> dict[str, list[Written]]:
        under_way = {}
        with ChecksumPool(num_threads) as digests:
            for name in names:
                pages = _WholePages(handle, self._room.extents[name])
                digester = digests.begin(after=pages)
                under_way[name] = digester, pages
                array: Any = self._items[name].array
                digester.update_with(array)
            return {name: [pages.report(d.result())] for name, (d, pages) in under_way.items()}
