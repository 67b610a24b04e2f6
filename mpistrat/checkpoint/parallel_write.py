"""Parallel writing of large mirrored variables into one file, by all ranks that see it.

All ranks hold the same values. So rank 0 makes room in the file, and each rank digests and writes
some of the variables there, past the HDF5 library, which therefore needs no MPI. No two
ranks write to one page of the file: network file systems, where each node keeps pages in memory,
may lose what one of them has written. The last page of a variable goes through rank 0.
"""

from __future__ import annotations

import base64
import mmap
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from mpistrat.arrays import Array, is_on_host
from mpistrat.checkpoint.digests import ArrayDigest, digest_of_array
from mpistrat.checkpoint.ranks import Worker, divide_work, this_worker
from mpistrat.checkpoint.raw_io import (
    BYTES_WORTH_A_THREAD,
    ChecksumPool,
    InOrder,
    pieces_on_host,
    write_at,
)
from mpistrat.checkpoint.root_file import RootFile
from mpistrat.checkpoint.shards import Room
from mpistrat.checkpoint.writer import BufferLifetime, CheckpointWriter, Item, explaining
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CheckpointError

_PAGE = mmap.PAGESIZE


class ParallelWriting:
    """Writes this rank's share of the large variables, and all else through `file`."""

    def __init__(self, file: RootFile, path: str) -> None:
        self._file = file
        self._path = path
        self._arrays: dict[str, Array] = {}
        """The large variables, on every rank."""
        self._items: dict[str, Item] = {}
        """How they come into the file."""
        self._room: Room | None = None
        """Their places in it, on rank 0."""

    def take(self, items: Iterable[Item]) -> None:
        """Make room for what is large and on all ranks; rank 0 writes the rest of the `items`."""
        for item in items:
            array = item.array
            if (
                item.life is not BufferLifetime.EVERYWHERE
                or array is None
                or array.nbytes < BYTES_WORTH_A_THREAD
            ):
                self._file.write(item)
            else:
                self._arrays[item.path] = array
                self._items[item.path] = item
            del item, array  # or the next would come while this one is there

    def _reserve(self, writer: CheckpointWriter) -> None:
        self._room = Room.reserve(writer, self._items)

    def write(self, collectives: Collectives, what: str) -> None:
        """Write the large variables. **Collective**."""
        self._file.attempt_with(self._reserve)
        room = collectives.broadcast_json(self._room and asdict(self._room))
        if room is None:  # rank 0 has failed
            return
        self._room = Room.from_json(**room)
        reports = self._write_shares(collectives, what, self._room)
        self._file.attempt_with(lambda writer: self._complete(writer, reports))

    def _write_shares(
        self, collectives: Collectives, what: str, room: Room
    ) -> list[dict[str, dict[str, str]]]:
        """Return by rank and variable what has been written. **Collective**."""
        rank = collectives.rank
        handle: int | None = None

        def open_file() -> Worker | None:
            nonlocal handle
            with explaining(self._path):
                handle = room.open(must_be_there=rank == 0)
            return None if handle is None else this_worker()

        def write_own() -> dict[str, dict[str, str]]:
            if handle is None:
                return {}
            with explaining(self._path):
                places = {name: room.extents[name].offset for name in work.own}
                written = self._write_own(handle, places, work.num_threads)
                if rank:  # rank 0 flushes the file at its end
                    os.fsync(handle)
            return {name: asdict(each) for name, each in written.items()}

        try:
            workers = collectives.on_all(open_file, what, self._path)
            sizes = {name: each.num_bytes for name, each in room.extents.items()}
            work = divide_work(sizes, workers, rank)
            return collectives.on_all(write_own, what, self._path)
        finally:
            if handle is not None:
                os.close(handle)

    def _write_own(
        self, handle: int, offsets: Mapping[str, int], num_threads: int
    ) -> dict[str, _Written]:
        under_way = {}
        with ChecksumPool(num_threads) as digests:
            for name, offset in offsets.items():
                array = self._arrays[name]
                pages = _WholePages(handle, offset, array.nbytes)
                digester = digests.begin(after=pages)
                under_way[name] = digester, pages
                for piece in pieces_on_host(array):
                    digester.update(piece, is_view=is_on_host(array))
            return {name: pages.report(d.result()) for name, (d, pages) in under_way.items()}

    def _complete(self, writer: CheckpointWriter, reports: Sequence[Mapping[str, Any]]) -> None:
        """Write on rank 0 what the others have left to it, once it sees what they have written."""
        extents = self._room.extents if self._room is not None else {}
        for rank, report in enumerate(reports):
            for name, each in report.items():
                written, begin = _Written(**each), extents[name].offset
                with explaining(self._path):
                    page = os.pread(writer.handle, _PAGE, begin)  # nothing behind the end
                if digest_of_array(np.frombuffer(page, np.uint8)).text != written.first_page:
                    raise CheckpointError(
                        f"The checkpoint {self._path} cannot be written by all ranks together: "
                        f"rank 0 does not find in it what rank {rank} has written of {name}. This "
                        "file system does not show all nodes the same. Save with parallel=False."
                    )
                rest = np.frombuffer(base64.b64decode(written.rest), np.uint8)
                end = begin + extents[name].num_bytes
                with explaining(self._path):
                    write_at(writer.handle, end - rest.size, rest)
                writer.set_digest(name, ArrayDigest(written.digest, written.pages))


@dataclass(frozen=True)
class _Written:
    """What rank 0 must know of a variable that has been written."""

    digest: str
    pages: str
    """The digests of its pages, as `ArrayDigest` has them."""
    first_page: str
    """The digest of its first page of memory, which rank 0 must find in the file."""
    rest: str
    """What comes after its last whole page, in base 64."""


class _WholePages:
    """Writes the parts of one variable, except what does not fill a page at its end."""

    def __init__(self, handle: int, offset: int, num_bytes: int) -> None:
        self._write = InOrder(write_at, handle, offset)
        self._left = num_bytes - num_bytes % _PAGE
        self._first_page = ""
        self._rest = b""

    def __call__(self, part: np.ndarray) -> None:
        data = part.view(np.uint8)
        self._first_page = self._first_page or digest_of_array(data[:_PAGE]).text
        self._rest += data[self._left :].tobytes()
        self._write(data[: self._left])
        self._left -= min(self._left, data.size)

    def report(self, digest: ArrayDigest) -> _Written:
        return _Written(*digest, self._first_page, base64.b64encode(self._rest).decode())
