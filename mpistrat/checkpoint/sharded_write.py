"""Parallel writing of sharded tensors: each rank writes its own shards to one file.

Rank 0 makes room for the whole of each tensor. Once all shards are there, each rank reads some of
the pages, for their digests: no rank has all elements of a tensor.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

from mpistrat.checkpoint.page_runs import (
    Digested,
    PageRun,
    digests_of_runs,
    join_runs,
    runs_of_ranks,
)
from mpistrat.checkpoint.ranks import divide_work, this_worker
from mpistrat.checkpoint.root_file import RootFile
from mpistrat.checkpoint.shards import Room, Written, sign, write_box
from mpistrat.checkpoint.writer import CheckpointWriter, Item, explaining
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CheckpointError

__all__ = ["ShardedWriting"]


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
