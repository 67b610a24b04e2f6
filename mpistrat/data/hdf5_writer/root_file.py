"""The file as rank 0 changes it: B-trees, headers, and the commit of one write.

Nothing that the file names is ever overwritten. New chunks, nodes and headers are written behind
what is used, and one write of 40 bytes in the superblock makes them the file.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mpistrat import hdf5
from mpistrat.data.hdf5_writer.chunk_tree import (
    MAX_CHILDREN,
    ChunkEntry,
    ChunkTree,
    Node,
    build_linked,
    encode_node,
    read_chunks,
)
from mpistrat.data.hdf5_writer.dataset_spec import OutputDataset
from mpistrat.data.hdf5_writer.header_copy import Changes, fill_with_copies
from mpistrat.data.hdf5_writer.header_image import (
    END,
    STEPS,
    HeaderTemplate,
    make_image,
    make_template,
)
from mpistrat.data.hdf5_writer.superblock import Root, read_superblock
from mpistrat.errors import DataError
from mpistrat.sharding import ceil_div
from mpistrat.system.files import begin_to_flush

AHEAD_BYTES = 2**24
"""How far the stated end is ahead of what is used, and the size of the file ahead of that.

A reader asks for the size of the file before it reads the superblock. With an exact stated end, it
would find the file too short if a commit comes between.
"""
KEPT_COMMITS = 1024
"""A reader that opened the file this many commits ago still finds everything unchanged."""
_ARENA_BYTES = 2**16

Place = tuple[int, int]
"""Block and cell of a chunk."""


class ReuseList:
    """Places that are not used any more since some commit, by size."""

    def __init__(self) -> None:
        self._free: dict[int, deque[tuple[int, int]]] = {}

    def add(self, commit: int, address: int, num_bytes: int) -> None:
        """Add a place that nothing names any more since `commit`."""
        self._free.setdefault(num_bytes, deque()).append((commit, address))

    def take(self, commit: int, num_bytes: int) -> int | None:
        """Return a place of exactly `num_bytes` that may be overwritten, ``None`` if none may."""
        waiting = self._free.get(num_bytes)
        if not waiting or waiting[0][0] + KEPT_COMMITS > commit:
            return None
        return waiting.popleft()[1]


class _Index:
    """The chunks of one dataset in the file."""

    def __init__(self, dataset: OutputDataset) -> None:
        self.dataset = dataset
        self.tree = ChunkTree(dataset.geometry.chunk, dataset.dtype.itemsize)
        self.waiting: list[ChunkEntry] = []
        """Chunks in the file that are not in `tree` yet."""
        self.last: dict[Place, ChunkEntry] = {}
        """Chunks that a later step may replace."""
        self.root: int | None = None
        self.edge: list[int] = []
        """Addresses of the nodes that the next commit replaces."""


class RootFile:
    """An open file that grows. All methods are for rank 0 only."""

    def __init__(self, path: str, is_durable: bool) -> None:
        self.path = path
        self.handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._is_durable = is_durable
        self._number = 0
        """Number of commits."""
        self.was_killed = False
        """Whether the writer before this one did not close the file."""
        self._free = ReuseList()
        self._arena = (0, 0)
        """Begin and end of the space for nodes and headers that was reserved last."""
        self._template: HeaderTemplate | None = None
        self._header: tuple[int, int] | None = None
        self._indexes: dict[str, _Index] = {}
        self._places: dict[str, int] = {}
        """Addresses of contiguous datasets."""
        try:
            self._superblock = read_superblock(path, self.read(0, 96))
            self._root = self._superblock.root
            """The root group from which headers are copied."""
            self._stated = self._superblock.end
            self._size = os.fstat(self.handle).st_size
            if self._stated > self._size:
                raise DataError(
                    f"{path} is truncated: {self._size} of {self._stated} bytes are there."
                )
        except BaseException:
            os.close(self.handle)
            raise

    def read(self, address: int, num_bytes: int) -> bytes:
        """Return bytes of the file, fewer at its end."""
        return os.pread(self.handle, num_bytes, address)

    def find_end(self, file: Any) -> tuple[int, int]:
        """Return the end of what is used and the number of steps; `file` is opened by h5py."""
        strategy = file.id.get_create_plist().get_file_space_strategy()
        if strategy[0] == hdf5.h5py().h5f.FSPACE_STRATEGY_PAGE or strategy[1]:
            raise DataError(
                f"{self.path} keeps lists of its free space, which HDF5Writer cannot update. Copy "
                "it with h5repack -S FSM_AGGR -P 0."
            )
        end = int(file.attrs.get(END, 0))
        # After a kill the stated end is a multiple of AHEAD_BYTES, and the file goes on behind it;
        # after `close` it is exact. If a different program has extended the file, the attribute
        # does not count any more, and the file ends at the stated end.
        self.was_killed = (
            self._stated % AHEAD_BYTES == 0
            and self._superblock.root.header < end < self._stated < self._size
        )
        if not self.was_killed:
            end = self._stated
        return end, int(file.attrs.get(STEPS, 0))

    def know(self, dataset: OutputDataset, stored: Any) -> None:
        """Take over a dataset of the file, and the chunks of its first `dataset.rows` rows."""
        index = _Index(dataset)
        chunks: list[Any] = []
        if hasattr(stored.id, "chunk_iter"):
            stored.id.chunk_iter(chunks.append)
        else:
            chunks = [stored.id.get_chunk_info(n) for n in range(stored.id.get_num_chunks())]
        geometry = dataset.geometry
        for offsets, mask, address, num_bytes in chunks:
            if offsets[0] >= dataset.rows:
                continue
            place, entry = geometry.place_of(offsets), ChunkEntry(offsets, num_bytes, mask, address)
            # The last block is written again with the next step if it is not full.
            if dataset.grows and (place[0] + 1) * geometry.chunk[0] > dataset.rows:
                index.last[place] = entry
            else:
                index.waiting.append(entry)
        index.waiting.sort()
        self._indexes[dataset.name] = index
        self._template = None

    def add(self, dataset: OutputDataset, address: int | None = None) -> None:
        """Let the next commits write the chunks of a new dataset, or its elements at `address`."""
        if address is None:
            self._indexes[dataset.name] = _Index(dataset)
        else:
            self._places[dataset.name] = address
        self._template = None

    def remove(self, name: str) -> None:
        """Forget a dataset that `add` has added, and that is not in the file."""
        self._indexes.pop(name, None)
        self._places.pop(name, None)
        self._template = None

    def apply(self, changes: Changes, end: int) -> int:
        """Write new objects and attributes at `end`, and return the new end."""
        end += -end % 8
        written = [*self._indexes, *self._places]
        image = make_image(
            self.read,
            self._superblock,
            self._root,
            end,
            lambda file, source, group: changes.fill(file, source, group, written),
        )
        # Nothing names these bytes yet. The headers of the next commit are copies of them or link
        # to them, and a kill before it leaves the file as it was.
        write_all(self.handle, end, image.data)
        self._root = image.root
        self._template = None
        return end + len(image.data)

    def prepare(self, counts: Mapping[str, int], end: int) -> int:
        """Return how many bytes the next commit needs for nodes and headers.

        `counts` are the numbers of chunks that it adds.
        """
        if self._template is None:
            if self._header is not None:
                self._free.add(self._number, *self._header)
                self._header = None
            fill = fill_with_copies([*self._indexes, *self._places])
            end += -end % 8
            self._template = make_template(self.read, self._superblock, self._root, end, fill)
        needed = self._template.num_bytes
        for name, index in self._indexes.items():
            number = counts.get(name, 0) + len(index.waiting) + len(index.last)
            if number or index.root is None:
                needed += index.tree.max_nodes(number) * index.tree.node_bytes
        begin, stop = self._arena
        return 0 if begin + needed <= stop else ceil_div(needed, _ARENA_BYTES) * _ARENA_BYTES

    def give(self, address: int, num_bytes: int) -> None:
        """Use the `num_bytes` at `address` for nodes and headers from now on."""
        if num_bytes:
            self._arena = address, address + num_bytes

    def commit(
        self,
        added: Mapping[str, Mapping[Place, tuple[ChunkEntry, bool]]],
        rows: Mapping[str, int],
        steps: int,
        end: int,
    ) -> None:
        """Make chunks a part of the file, each with whether it never changes again.

        All chunks have been written. `end` is the end of what is used, with the arena.
        """
        # Everything is prepared on copies, so that a failed write leaves this object as it was.
        batch = _Batch(self._free, self._number, self._arena)
        assert self._template is not None
        staged = [
            self._staged(index, added.get(name, {}), batch) for name, index in self._indexes.items()
        ]
        trees = {index.dataset.name: index.root or 0 for index, _ in staged} | self._places
        address = batch.allocate(self._template.num_bytes)
        header, root = self._template.at(address, rows, trees, steps, end)
        batch.add(address, header, len(header))
        # The order matters. Readers must never find a stated end behind the size of the file, nor a
        # root group that names bytes which are not written.
        try:
            self._extend(end)
            for place, data in _joined(batch.writes):
                write_all(self.handle, place, data)
            self._write_root(root)
        except BaseException:
            batch.undo()
            raise
        self._number += 1
        self._arena = batch.arena
        for index, freed in staged:
            self._indexes[index.dataset.name] = index
            for node in freed:
                self._free.add(self._number, node, index.tree.node_bytes)
        if self._header is not None:
            self._free.add(self._number, *self._header)
        self._header = address, self._template.num_bytes
        self._last = rows, steps

    def _write_root(self, root: Root) -> None:
        # Before the commit, because a power failure must not leave a root group whose headers and
        # chunks are not on disk; after it, because `append` then promises that the step is on disk.
        if self._is_durable:
            os.fdatasync(self.handle)
        place, data = self._superblock.commit(root, self._stated)
        before = self.read(place, len(data))
        # One call, never a loop: these few bytes are in one page, so a kill leaves all or none of
        # them.
        if os.pwrite(self.handle, data, place) != len(data):
            raise OSError(f"The superblock of {self.path} was not written.")
        if self._is_durable:
            try:
                os.fdatasync(self.handle)
            except OSError:
                # The caller learns that the step was not written, and the next commit reuses the
                # space of these headers, so the file must not name them.
                os.pwrite(self.handle, before, place)
                raise
        self._superblock = replace(self._superblock, root=root)

    def _staged(
        self, index: _Index, added: Mapping[Place, tuple[ChunkEntry, bool]], batch: _Batch
    ) -> tuple[_Index, list[int]]:
        """Return the index with more chunks, and the addresses of nodes that it does not need."""
        if not added and not index.waiting and index.root is not None:
            return index, []
        staged = _Index(index.dataset)
        staged.tree = tree = index.tree.copy()
        found = {**{place: (entry, False) for place, entry in index.last.items()}, **added}

        def write(node: Node) -> int:
            address = batch.allocate(tree.node_bytes)
            # Without siblings: to name this node, its left neighbour would have to be written
            # again, and then all nodes above that. `finish` adds them once.
            batch.add(address, encode_node(node), tree.node_bytes)
            return address

        for entry in index.waiting:
            tree.add(entry, write)
        # In the order of the blocks: the tree is only ever extended at its right end.
        for _, (entry, is_final) in sorted(found.items()):
            if is_final:
                tree.add(entry, write)
        staged.last = {place: entry for place, (entry, is_final) in found.items() if not is_final}
        # The chunks that may change are only in this copy of the tree.
        edge, whole = [], tree.copy() if staged.last else tree

        def write_edge(node: Node) -> int:
            edge.append(write(node))
            return edge[-1]

        for _, entry in sorted(staged.last.items()):
            whole.add(entry, write_edge)
        staged.root = whole.edge(write_edge)
        staged.edge = edge
        return staged, index.edge

    def _extend(self, end: int) -> None:
        """Let the stated end and the size of the file be ahead of `end`."""
        stated = max(ceil_div(end, AHEAD_BYTES) * AHEAD_BYTES, self._stated)
        if self._size < stated + AHEAD_BYTES:
            os.ftruncate(self.handle, stated + AHEAD_BYTES)
            self._size = stated + AHEAD_BYTES
        self._state(stated)

    def _state(self, stated: int) -> None:
        if stated != self._stated:
            place, data = self._superblock.state_end(stated)
            write_all(self.handle, place, data)
            self._stated = stated
            self._superblock = replace(self._superblock, end=stated)

    def finish(self, end: int) -> None:
        """Commit trees whose nodes know their siblings, and set both ends to what is used."""
        if self._number:
            end = self._link_siblings(end)
        elif self._stated % AHEAD_BYTES or self._stated < end:
            return  # nothing has changed
        # First the stated end, then the size, so that the file is never shorter than it states.
        self._state(end)
        os.ftruncate(self.handle, end)
        os.fsync(self.handle)

    def _link_siblings(self, end: int) -> int:
        def allocate(num_bytes: int) -> int:
            nonlocal end
            address = end + -end % 8
            end = address + num_bytes
            return address

        writes, trees = [], dict(self._places)
        for name, index in self._indexes.items():
            geometry = index.dataset.geometry
            entries = read_chunks(self.read, index.root or 0, len(geometry.chunk))
            trees[name] = index.root or 0
            if len(entries) > MAX_CHILDREN:
                tree = ChunkTree(geometry.chunk, index.dataset.dtype.itemsize)
                trees[name], nodes = build_linked(tree, entries, allocate)
                writes += nodes
        assert self._template is not None
        address = allocate(self._template.num_bytes)
        header, root = self._template.at(address, self._last[0], trees, self._last[1], end)
        self._extend(end)
        for place, data in [*writes, (address, header)]:
            write_all(self.handle, place, data)
        os.fsync(self.handle)
        self._write_root(root)
        os.fsync(self.handle)
        return end

    def close(self) -> None:
        """Close the file as it is."""
        os.close(self.handle)


def _joined(writes: list[tuple[int, bytes, int]]) -> Iterator[tuple[int, bytes]]:
    """Yield the same writes, with neighbours in one: a call takes longer than its bytes."""
    begin, parts, end, rest = 0, list[bytes](), 0, 0
    for address, data, num_bytes in writes:
        if parts and address == end + rest:
            parts.append(bytes(rest))
        elif parts:
            yield begin, b"".join(parts)
            parts = []
        if not parts:
            begin = address
        parts.append(data)
        end, rest = address + len(data), num_bytes - len(data)
    if parts:
        yield begin, b"".join(parts)


class _Batch:
    """The writes of one commit, and where they go."""

    def __init__(self, free: ReuseList, number: int, arena: tuple[int, int]) -> None:
        self._free = free
        self._number = number
        self.arena = arena
        self.writes: list[tuple[int, bytes, int]] = []
        """Place, bytes, and the number of bytes that belong to them in the file."""
        self._reused: list[tuple[int, int]] = []

    def allocate(self, num_bytes: int) -> int:
        """Return a place that no commit of the last 1,024 names."""
        address = self._free.take(self._number, num_bytes)
        if address is not None:
            self._reused.append((address, num_bytes))
            return address
        begin, end = self.arena
        size = num_bytes + -num_bytes % 8
        if begin + size > end:
            raise RuntimeError("HDF5Writer has reserved too little space for a commit.")
        self.arena = begin + size, end
        return begin

    def add(self, address: int, data: bytes, num_bytes: int) -> None:
        """Accept a write to a place with `num_bytes`."""
        self.writes.append((address, data, num_bytes))

    def undo(self) -> None:
        """Give back what was reused."""
        for address, num_bytes in self._reused:
            self._free.add(self._number - KEPT_COMMITS, address, num_bytes)


def write_all(handle: int, address: int, data: Any) -> None:
    """Write bytes to an open file; pwrite may write fewer at a time than it is asked to."""
    left = memoryview(data).cast("B")
    while left:
        written = os.pwrite(handle, left, address)
        left, address = left[written:], address + written


_LARGE_BYTES = 2**16


def begin_to_flush_large(handle: int, address: int, num_bytes: int) -> None:
    """Let the disk work already, if there is enough to write."""
    if num_bytes >= _LARGE_BYTES:
        begin_to_flush(handle, address, num_bytes)
