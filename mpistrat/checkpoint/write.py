"""Write of a checkpoint: rank 0 creates the file, and all ranks may write large arrays to it.

The other ranks write past the HDF5 library, which therefore needs no MPI.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import itertools
import mmap
import operator
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from mpistrat.arrays import Array, is_on_host
from mpistrat.checkpoint.collect import StateCollector
from mpistrat.checkpoint.digests import (
    PAGE_BYTES,
    ArrayDigest,
    digest_of_array,
    digest_of_page_digests,
    page_digests_of,
)
from mpistrat.checkpoint.format import Header
from mpistrat.checkpoint.ownership import Writers
from mpistrat.checkpoint.ranks import Worker, divide_work, this_worker
from mpistrat.checkpoint.raw_io import (
    BYTES_WORTH_A_THREAD,
    ChecksumPool,
    InOrder,
    pieces_on_host,
    write_at,
)
from mpistrat.checkpoint.shards import Extent, Room, Written, digests_in_file, sign, write_box
from mpistrat.checkpoint.writer import (
    BufferLifetime,
    CheckpointWriter,
    Item,
    create_checkpoint,
    explaining,
)
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CheckpointError
from mpistrat.sharding import ceil_div, cut, part_lengths

_PAGE = mmap.PAGESIZE


class RootWork:
    """Work of rank 0 between collectives, whose first failure is kept until `check`."""

    def __init__(self, collectives: Collectives) -> None:
        self._is_root = collectives.rank == 0
        self._failure: Exception | None = None

    def attempt(self, do: Callable[..., object], *arguments: Any) -> None:
        """Call `do` on rank 0, unless something has failed before."""
        if self._is_root and self._failure is None:
            try:
                do(*arguments)
            # Not raised here: the other ranks are already on their way to the next collective, and
            # would wait there for rank 0.
            except Exception as error:
                self.abandon(error)

    def attempt_each(self, do: Callable[[Item], object], items: Iterable[Item]) -> None:
        """Go through all `items` on every rank, and call `do` with each on rank 0."""
        for item in items:
            self.attempt(do, item)
            del item  # or the next would come while this one is there

    def abandon(self, error: BaseException) -> None:
        """Do nothing more, because of `error`."""
        if self._failure is None:
            self._failure = error if isinstance(error, Exception) else RuntimeError(repr(error))

    def check(self) -> None:
        """Raise what went wrong."""
        if self._failure is not None:
            raise self._failure


class RootFile(RootWork):
    """The file that rank 0 writes."""

    def __init__(
        self, collectives: Collectives, path: str, header: Header, writers: Writers | None
    ) -> None:
        super().__init__(collectives)
        self._context = create_checkpoint(path, header, writers)
        self._writer: CheckpointWriter | None = None
        self.attempt(self._open)

    def _open(self) -> None:
        self._writer = self._context.__enter__()

    def attempt_with(self, add: Callable[[CheckpointWriter], object]) -> None:
        """Call `add` on rank 0 with the writer, unless something has failed before."""
        if self._writer is not None:
            self.attempt(add, self._writer)

    def write(self, item: Item) -> None:
        """Write `item` on rank 0. **Collective** where it comes in pieces."""
        if item.pieces is None:
            self.attempt_with(lambda writer: writer.add(item))
            return
        # Empty on other ranks, and on rank 0 after a failure. The pieces are drawn anyway, because
        # that is collective.
        steps: list[Callable[..., None]] = []
        self.attempt_with(lambda writer: steps.extend(writer.begin(item)))
        for piece in item.pieces:
            if steps:
                self.attempt(steps[0], piece)
            # Or the next piece would be created while this one is still in memory.
            del piece
        if steps:
            self.attempt(steps[1])

    def write_each(self, items: Iterable[Item]) -> None:
        """Write all `items`. **Collective** as they are."""
        for item in items:
            self.write(item)
            del item  # or the next would come while this one is there

    def abandon(self, error: BaseException) -> None:
        """Remove what has been written, because of `error`."""
        super().abandon(error)
        if self._writer is not None:
            self._writer = None
            try:
                # The rest of `create_checkpoint` runs with the error: it removes the temporary
                # file, and the file under `path` stays.
                self._context.__exit__(type(error), error, error.__traceback__)
            except Exception as explained:
                self._failure = explained

    def complete(self) -> None:
        """Put the file in its place on rank 0, or raise what went wrong."""
        self.check()
        if self._writer is not None:
            self._context.__exit__(None, None, None)


@contextlib.contextmanager
def file_of_root(gathering: StateCollector, what: str, header: Header) -> Iterator[RootFile]:
    """Have rank 0 write the file of `gathering`, for the public function `what`. **Collective**.

    Where rank 0 fails to write, it still takes part for the rest, and the error is raised on
    every rank at the end.
    """
    collectives, path = gathering.collectives, gathering.path
    file = RootFile(collectives, path, header, gathering.writers)
    try:
        yield file
    # No common outcome after this: an error outside of `attempt` may leave the ranks at different
    # calls.
    except BaseException as error:
        file.abandon(error)
        raise
    with collectives.common_outcome(what, path):
        file.complete()


class ParallelWriting:
    """Writes this rank's share of the large mirrored variables, and all else through `file`."""

    # All ranks hold the same values. So rank 0 makes room in the file, and each rank digests and
    # writes some of the variables there. No two ranks write to one page of the file: network file
    # systems, where each node keeps pages in memory, may lose what one of them has written. The
    # last page of a variable goes through rank 0.

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
            # Two rounds, because the work is divided among the ranks that can open the file, and
            # all must know which these are before one of them writes.
            workers = collectives.on_all(open_file, what, self._path)
            sizes = {name: each.num_bytes for name, each in room.extents.items()}
            work = divide_work(sizes, workers, rank)
            return collectives.on_all(write_own, what, self._path)
        finally:
            if handle is not None:
                os.close(handle)

    def _write_own(
        self, handle: int, offsets: Mapping[str, int], num_threads: int
    ) -> dict[str, _WrittenVariable]:
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
        # On a file system that does not show rank 0 the bytes of other nodes, the digests below
        # would be those of data that are not in the file. One page of each variable shows that.
        for rank, report in enumerate(reports):
            for name, each in report.items():
                written, begin = _WrittenVariable(**each), extents[name].offset
                with explaining(self._path):
                    page = os.pread(writer.handle, _PAGE, begin)  # nothing behind the end
                if digest_of_array(np.frombuffer(page, np.uint8)).text != written.first_page:
                    raise CheckpointError(
                        f"The checkpoint {self._path} cannot be written by all ranks together: "
                        f"rank 0 does not find in it what rank {rank} has written of {name}. This "
                        "file system does not show all nodes the same. Save with parallel=False."
                    )
                rest = np.frombuffer(base64.b64decode(written.rest), np.uint8)
                # The end of a variable shares its page with whatever comes next, so only rank 0
                # writes that page.
                end = begin + extents[name].num_bytes
                with explaining(self._path):
                    write_at(writer.handle, end - rest.size, rest)
                writer.set_digest(name, ArrayDigest(written.digest, written.pages))


@dataclass(frozen=True)
class _WrittenVariable:
    """What rank 0 must know of a mirrored variable that another rank has written."""

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
        # `_left` counts the bytes of whole pages that are still to come. Whatever follows them goes
        # to rank 0, in the report.
        self._first_page = self._first_page or digest_of_array(data[:_PAGE]).text
        self._rest += data[self._left :].tobytes()
        self._write(data[: self._left])
        self._left -= min(self._left, data.size)

    def report(self, digest: ArrayDigest) -> _WrittenVariable:
        return _WrittenVariable(*digest, self._first_page, base64.b64encode(self._rest).decode())


_PAGES_AT_ONCE = 16
"""What one thread reads, so that all have something to do."""


class PageRun(NamedTuple):
    """Some pages of one array."""

    name: str
    start: int
    stop: int


def runs_of_ranks(sizes: Mapping[str, int], num_ranks: int) -> list[list[PageRun]]:
    """Divide the pages of arrays of these `sizes` in bytes among the ranks, in order."""
    # An empty array counts as a page: an array in no run would get no digest, and its file would
    # count as damaged.
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
            # Parts begin at a multiple of PAGE_BYTES, so `join_runs` gets the digests of the same
            # pages as if one thread had read the whole array.
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
    """Writes the sharded tensors among items: each rank writes its own shards."""

    # Rank 0 makes room for the whole of each tensor. After all shards are written, each rank reads
    # some of the pages, for their digests: no rank has all elements of a tensor.

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
        # When this returns, the shards of all ranks are in the file, so each rank may read pages
        # that others have written.
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
        # Opened again, after all writers have closed it: NFS promises to show what other nodes have
        # written only then (nfs(5), close-to-open consistency).
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
