"""Raw reads and writes of large arrays and parts of them in an HDF5 file, with checksums.

The HDF5 library serves one thread at a time, and a program that trains reads its data while a
checkpoint is written. So large arrays are read and written through the file's own descriptor, by
several threads and ranks.
"""

from __future__ import annotations

import contextlib
import functools
import heapq
import itertools
import math
import operator
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpistrat.arrays import Array, host_view, is_on_host, pieces
from mpistrat.checkpoint.digests import (
    PAGE_BYTES,
    ArrayDigest,
    PagedHash,
    digest_of_page_digests,
    page_digests_of,
)
from mpistrat.sharding import Box, ceil_div, cut, part_lengths
from mpistrat.system.background import Background
from mpistrat.system.cpu import cores_of_mask, mask_of_cores, num_cores, own_cores
from mpistrat.system.files import begin_to_flush

BYTES_PER_PIECE = 2**21
"""Host memory that a copy from the device needs; about as much as a cache holds."""


def pieces_on_host(array: Array) -> Iterator[np.ndarray]:
    """Yield 1-d arrays in host memory that cover `array` in C order. Local.

    They are views if `array` is stored there in C order, else copies, created one by one.
    """
    for piece in pieces(array, BYTES_PER_PIECE):
        yield host_view(piece)


BYTES_WORTH_A_THREAD = 2**18
"""Arrays smaller than this get no thread: their digests are computed at once."""

MOST_THREADS = 8
"""This many threads are faster than most disks."""
_BYTES_AT_ONCE = 2**19
"""Small enough to stay in the cache of a core between the digest and the write."""
_MAX_BEHIND = 4
"""How many pieces may wait that exist only for their digest."""

_OnPart = Callable[[np.ndarray], object]


class Checksum:
    """The digest of one array, which arrives in pieces; computed in a thread.

    The thread calls `before` and `after` with each part of the array, before or after it adds the
    part to the digest: to read the part, or to write it. Once `stop` is set, it touches no further
    part.
    """

    def __init__(
        self,
        thread: Background,
        stop: threading.Event,
        before: _OnPart | None,
        after: _OnPart | None,
    ) -> None:
        self._thread = thread
        self._stop = stop
        self._before = before
        self._after = after
        self._hasher = PagedHash()
        self._waits: deque[Callable[[], None]] = deque()

    def update(self, piece: np.ndarray, is_view: bool) -> None:
        """Add the next `piece`, which must not change before `result`. Local.

        If it `is_view` of memory that exists anyway, any number of pieces may wait. Raises the
        error of an earlier piece, if there is one.
        """
        # All parts of an array are sent to one thread, in order: the digest and `InOrder` both
        # depend on the order of the parts.
        self._waits.append(self._thread.submit(lambda: self._absorb(piece)))
        if not is_view and len(self._waits) > _MAX_BEHIND:
            self._waits.popleft()()

    def update_with(self, array: Array) -> None:
        """Add all of `array`, which must not change before `result`. Local."""
        for piece in pieces_on_host(array):
            self.update(piece, is_view=is_on_host(array))

    def _absorb(self, piece: np.ndarray) -> None:
        for part in pieces(piece, _BYTES_AT_ONCE):
            if self._stop.is_set():
                return
            if self._before is not None:
                self._before(part)
            self._hasher.update(part)
            if self._after is not None:
                self._after(part)

    def result(self) -> ArrayDigest:
        """Return the digest, once it is complete, or raise the error of a piece."""
        while self._waits:
            self._waits.popleft()()
        return self._hasher.result()


class ChecksumPool:
    """Threads that compute digests; a context manager that waits for them at its end.

    After an exception the remaining work is dropped, because nobody needs it. Otherwise, a user who
    interrupts a second time would close files that threads write to.
    """

    def __init__(self, cores: int | None = None) -> None:
        num_threads = max(2, min(num_cores() if cores is None else cores, MOST_THREADS))
        self._threads = [Background("mpistrat-digest") for _ in range(num_threads)]
        self._count = 0
        self._stop = threading.Event()

    def begin(self, before: _OnPart | None = None, after: _OnPart | None = None) -> Checksum:
        """Return the digest of a new array; see `Checksum`."""
        self._count += 1
        # Whole arrays are spread over the threads, never the parts of one array (see
        # `Checksum.update`).
        thread = self._threads[self._count % len(self._threads)]
        return Checksum(thread, self._stop, before, after)

    def __enter__(self) -> ChecksumPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stop.set()
        # Once drained, no thread uses a descriptor or an array, and the caller may close or change
        # them.
        for thread in self._threads:
            thread.drain()
            thread.close()


class InOrder:
    """Reads or writes the parts of an array in order, the first of them at `offset`."""

    def __init__(
        self, move: Callable[[int, int, np.ndarray], None], handle: int, offset: int
    ) -> None:
        self._move = move
        self._handle = handle
        self._offset = offset

    def __call__(self, part: np.ndarray) -> None:
        """Read or write the next `part`."""
        self._move(self._handle, self._offset, part)
        self._offset += part.nbytes


def write_at(handle: int, offset: int, piece: np.ndarray) -> None:
    """Write the bytes of `piece` to an open file, and ask the system to begin to flush them."""
    # pwrite may write fewer bytes than it is asked to; on Linux never more than 0x7ffff000 at a
    # time (write(2)).
    left = memoryview(piece.reshape(-1).view(np.uint8).data)
    while left:
        written = os.pwrite(handle, left, offset)
        begin_to_flush(handle, offset, written)
        left, offset = left[written:], offset + written


_BYTES_AHEAD = 2**23
"""Bytes per system call: Python lets a thread make few calls while another thread is busy."""


@contextlib.contextmanager
def reading_ahead(path: str) -> Iterator[None]:
    """Let a thread read a file from the disk into memory, from its beginning, until the end."""
    is_over = threading.Event()

    def read() -> None:
        scratch, offset = bytearray(_BYTES_AT_ONCE), 0
        # Errors are not reported here: the code that needs the bytes gets the same error when it
        # reads them.
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            while not is_over.is_set() and _is_before_end(file.fileno(), offset):
                if not _is_in_memory(file.fileno(), offset):
                    # Nobody needs these bytes here, so all are read into the same memory.
                    parts = [scratch] * (_BYTES_AHEAD // _BYTES_AT_ONCE)
                    os.preadv(file.fileno(), parts, offset)
                offset += _BYTES_AHEAD

    with contextlib.suppress(RuntimeError):  # too many threads: then it only takes longer
        threading.Thread(target=read, name="mpistrat-read", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()  # its last call may end later


def _is_before_end(handle: int, offset: int) -> bool:
    return offset < os.fstat(handle).st_size


def _is_in_memory(handle: int, offset: int) -> bool:
    """Return whether a byte of a file can be read without its disk, if the system knows."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        # preadv2(2): with RWF_NOWAIT a read fails with EAGAIN, Python's BlockingIOError, if it
        # would wait for the disk. One byte stands for the block that begins there.
        os.preadv(handle, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True


def read_at(handle: int, offset: int, piece: np.ndarray) -> None:
    """Fill `piece` with bytes of an open file, or raise OSError if the file ends before."""
    left = memoryview(piece.reshape(-1).view(np.uint8).data)
    while left:
        num_bytes = os.preadv(handle, [left], offset)
        if num_bytes == 0:
            raise OSError(f"the file ends at byte {offset}")
        left, offset = left[num_bytes:], offset + num_bytes


class Extent(NamedTuple):
    """The bytes of a file that hold an array in C order."""

    offset: int
    num_bytes: int
    item_bytes: int
    digest: str = ""
    """The digest that the file has stored, empty while the array is being written."""


class Written(NamedTuple):
    """Check values of an array, or of a part of it, that is in a file."""

    num_items: int
    parity: int
    """The exclusive or of all elements, which does not depend on their order."""
    digest: str = ""
    pages: str = ""
    """Page digests, as in `ArrayDigest`."""
    first_page: str = ""
    """The digest of its first page of memory, if one rank has written all of it."""
    rest: str = ""
    """The bytes after its last whole page of memory, in base 64, if one rank has written them."""


def _runs(box: Box) -> tuple[int, Iterator[int]]:
    """Return how many elements of `box` are stored contiguously, and where each run begins.

    The runs are in C order of the box.
    """
    shape, axis = box.shape, len(box.shape)
    while axis and box.sizes[axis - 1] == shape[axis - 1]:
        axis -= 1
    inner = max(axis - 1, 0)  # the runs have part of this axis, and all of the later axes
    strides = [math.prod(shape[each + 1 :]) for each in range(len(shape))]
    first = sum(map(math.prod, zip(box.offsets, strides, strict=True)))
    steps = [
        range(0, size * stride, stride)
        for size, stride in zip(box.sizes[:inner], strides[:inner], strict=True)
    ]
    begins = (first + sum(each) for each in itertools.product(*steps))
    return math.prod(box.sizes[inner:]), begins


def write_box(handle: int, extent: Extent, box: Box, values: Any) -> Written:
    """Write `values`, an array in C order, to the part `box` of the array at `extent`."""
    flat = values.reshape(-1).view(np.uint8)
    if not flat.size:
        return Written(0, 0)
    length, begins = _runs(box)
    num_bytes = length * extent.item_bytes
    # `write_at` asks for a flush of the bytes that it has written. For short runs that would cost a
    # system call each, and flush a page that the next run changes again.
    write = write_at if num_bytes >= BYTES_WORTH_A_THREAD else _write_run
    for number, begin in enumerate(begins):
        run = flat[number * num_bytes : (number + 1) * num_bytes]
        write(handle, extent.offset + begin * extent.item_bytes, run)
    return Written(flat.size // extent.item_bytes, _parity(flat, extent.item_bytes))


def _write_run(handle: int, offset: int, run: np.ndarray) -> None:
    left = memoryview(run.data)
    while left:
        written = os.pwrite(handle, left, offset)
        left, offset = left[written:], offset + written


def read_box(handle: int, extent: Extent, box: Box, into: Any) -> None:
    """Fill `into`, an array in C order, with the values that `write_box` has written."""
    flat = into.reshape(-1).view(np.uint8)
    if not flat.size:
        return
    length, begins = _runs(box)
    num_bytes = length * extent.item_bytes
    for number, begin in enumerate(begins):
        run = flat[number * num_bytes : (number + 1) * num_bytes]
        read_at(handle, extent.offset + begin * extent.item_bytes, run)


def _parity(data: np.ndarray, item_bytes: int) -> int:
    words = data.view(f"u{min(item_bytes, 8)}")
    return int(np.bitwise_xor.reduce(words))


def read_through(handle: int, extent: Extent) -> Written:
    """Read an array in little memory, and return its digest.

    The parity is for arrays that have just been written: it is 0 if the file has stored a digest.
    """
    hasher, parity = PagedHash(), 0
    memory = np.empty(min(_BYTES_AT_ONCE, extent.num_bytes), np.uint8)
    for begin in range(0, extent.num_bytes, _BYTES_AT_ONCE):
        part = memory[: extent.num_bytes - begin]
        read_at(handle, extent.offset + begin, part)
        hasher.update(part)
        if not extent.digest:
            parity ^= _parity(part, extent.item_bytes)
    num_items = extent.num_bytes // extent.item_bytes
    return Written(num_items, parity, *hasher.result())


Name = TypeVar("Name", bound=Hashable)


def digests_in_file(
    handle: int, extents: Mapping[Name, Extent], num_threads: int
) -> dict[Name, Written]:
    """Return the result of `read_through` for each array; one thread reads each."""
    with ThreadPoolExecutor(max(num_threads, 1), "mpistrat-digest") as threads:
        found = threads.map(functools.partial(read_through, handle), extents.values())
        return dict(zip(extents, found, strict=True))


_PAGES_AT_ONCE = 16
"""Number of pages that one thread reads, small enough that all threads have work."""


class PageRun(NamedTuple):
    """Some pages of one array."""

    name: str
    start: int
    stop: int


def runs_of_ranks(sizes: Mapping[str, int], num_ranks: int) -> list[list[PageRun]]:
    """Divide the pages of arrays, whose `sizes` are in bytes, among the ranks, in order."""
    # An empty array counts as a page: an array in no run would get no digest, and its file would
    # count as damaged.
    pages = {name: max(1, ceil_div(size, PAGE_BYTES)) for name, size in sizes.items()}
    runs: list[list[PageRun]] = []
    begin = 0  # the first page of this rank among all pages
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
"""An array, the number of its first page that was read, and the check values."""


def digests_of_runs(
    handle: int, extents: Mapping[str, Extent], runs: Iterable[PageRun], num_threads: int
) -> list[Digested]:
    """Read `runs` of the arrays at `extents` of a file, and return their check values."""
    parts = {}
    for name, start, stop in runs:
        whole = extents[name]
        for pages in cut(stop - start, _PAGES_AT_ONCE):
            first, last = (start + each for each in (pages.start, pages.stop))
            # Parts begin at a multiple of PAGE_BYTES, so `join_runs` gets the same page digests as
            # if one thread had read the whole array.
            begin, end = first * PAGE_BYTES, min(last * PAGE_BYTES, whole.num_bytes)
            parts[name, first] = Extent(whole.offset + begin, end - begin, whole.item_bytes)
    found = digests_in_file(handle, parts, num_threads)
    return [(name, first, each) for (name, first), each in found.items()]


def join_runs(found: Iterable[Digested]) -> dict[str, Written]:
    """Return the check values of whole arrays, from all runs of their pages."""
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


Worker = tuple[str, int]
"""A rank that reads or writes: the name of its host, and the mask of the cores it may use."""


def this_worker() -> Worker:
    """Return the host and the cores of this rank."""
    return socket.gethostname(), mask_of_cores(own_cores())


@dataclass(frozen=True)
class WorkDivision:
    """Which rank reads or writes which large variables, and this rank's own part."""

    owners: Mapping[str, int]
    """The rank of each variable."""
    own: Sequence[str]
    """The variables of this rank."""
    num_threads: int
    """Number of threads that have a core here, 0 if this rank does not take part."""


def divide_work(
    sizes: Mapping[str, int], workers: Sequence[Worker | None], rank: int
) -> WorkDivision:
    """Divide variables of these `sizes` in bytes among the ranks that are `workers`.

    If `sizes` is empty, there need not be a worker.
    """
    owners = share_out(sizes, [each for each, worker in enumerate(workers) if worker])
    own = workers[rank]
    num_threads = 0
    if own is not None:
        host, cores = own
        beside = [worker[1] for worker in workers if worker and worker[0] == host]
        num_threads = _num_threads(cores, beside)
    return WorkDivision(owners, [name for name in owners if owners[name] == rank], num_threads)


def share_out(sizes: Mapping[str, int], ranks: Sequence[int]) -> dict[str, int]:
    """Return which of `ranks` gets each variable, so that each has about as many bytes."""
    loads = [(0, rank) for rank in ranks]
    owners = {}
    # The largest variable is assigned first, each to the rank with the fewest bytes so far. Equal
    # sizes are sorted by name, so all ranks compute the same division.
    for name in sorted(sizes, key=lambda each: (-sizes[each], each)):
        load, rank = heapq.heappop(loads)
        owners[name] = rank
        heapq.heappush(loads, (load + sizes[name], rank))
    return owners


def _num_threads(own: int, masks: Sequence[int]) -> int:
    """Return this rank's share of the cores that it may use, if others may use them too."""
    # A core that three ranks may use counts as a third of a core for each.
    return round(sum(1 / sum(m >> core & 1 for m in masks) for core in cores_of_mask(own)))
