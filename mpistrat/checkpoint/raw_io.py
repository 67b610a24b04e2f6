"""Raw reads and writes of large arrays where they lie in an HDF5 file, with checksums.

The library serves one thread at a time. A program that trains reads its data while a checkpoint
is written beside it, so the bytes of large arrays take the file's own descriptor.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from mpistrat.arrays import Array, host_view, pieces
from mpistrat.checkpoint.digests import ArrayDigest, hasher_like
from mpistrat.native import native_library
from mpistrat.system.background import Background
from mpistrat.system.cpu import num_cores

BYTES_PER_PIECE = 2**21
"""What a copy from the device costs in host memory, and about how much stays in a cache."""


def pieces_on_host(array: Array) -> Iterator[np.ndarray]:
    """Yield 1-d arrays in host memory that cover `array` in C order. Local.

    They are views where `array` lies there in C order, else copies, made one by one.
    """
    for piece in pieces(array, BYTES_PER_PIECE):
        yield host_view(piece)


def copy_to_host(target: np.ndarray, source: Array) -> None:
    """Write `source` to `target`, a host array in C order of its shape and dtype."""
    for into, piece in zip(pieces(target, BYTES_PER_PIECE), pieces_on_host(source), strict=True):
        np.copyto(into, piece)


class SharedCopies:
    """Copies of arrays that other threads help with, complete after `finish`."""

    def __init__(self) -> None:
        self._library = native_library()
        self._num_helpers = min(num_cores(), _MOST_THREADS) - 1
        self._begun: list[Any] = []

    def begin(self, target: np.ndarray, source: Array) -> None:
        """Begin to write `source`, which must stay as it is, to `target`, as `copy_to_host`."""
        is_plain = type(source) is np.ndarray and source.flags.carray and target.flags.carray
        is_large = source.nbytes >= BYTES_WORTH_A_THREAD
        if self._library is None or not is_plain or not is_large or not self._num_helpers:
            copy_to_host(target, source)
            return
        # `begin_copy` copies rows that begin at byte offsets; here the whole array is one row, at
        # 0.
        row = target.reshape(1, -1)
        copy = self._library.begin_copy(source, _AT_BEGIN, None, row, self._num_helpers)
        self._begun.append(copy)

    def finish(self) -> None:
        """Do what is left, and wait for the other threads."""
        for copy in reversed(self._begun):  # the others began with the first
            self._library.end_copy(copy)
        self._begun = []


_AT_BEGIN = np.zeros(1, np.int64)

_BYTES = 2**22
"""Of one piece: small enough to stay in the cache of a processor until it is hashed."""
_BYTES_OF_CHUNKS = 2**26
"""Of one piece where chunks are larger."""


def selections(
    shape: tuple[int, ...], item_bytes: int, chunks: Sequence[int] | None = None
) -> Iterator[tuple[int | slice, ...]]:
    """Yield selections that cover an array of `shape`, each contiguous in C order.

    They end where `chunks` end, as far as memory allows: part of a chunk costs as much as all.
    """
    if not shape:
        yield ()
        return
    if 0 in shape:
        return
    row_bytes = [math.prod(shape[axis + 1 :]) * item_bytes for axis in range(len(shape))]
    # The first axis along which one step fits into a piece: a range along it, with one index for
    # each axis before it, is contiguous.
    axis = next(axis for axis, size_bytes in enumerate(row_bytes) if size_bytes <= _BYTES)
    step = _BYTES // row_bytes[axis]
    if chunks is not None and chunks[axis] * row_bytes[axis] <= _BYTES_OF_CHUNKS:
        step = max(step - step % chunks[axis], chunks[axis])
    for outer in itertools.product(*map(range, shape[:axis])):
        for start in range(0, shape[axis], step):
            yield (*outer, slice(start, min(start + step, shape[axis])))


BYTES_WORTH_A_THREAD = 2**18
"""The digests of smaller arrays are computed at once."""

_MOST_THREADS = 8
"""So many are faster than most disks."""
_BYTES_AT_ONCE = 2**19
"""Small enough to stay in the cache of a core between the digest and the write."""
_MAX_BEHIND = 4
"""How many pieces that exist for this alone may wait for their turn."""

_OnPart = Callable[[np.ndarray], object]


class Checksum:
    """The digest of one array, which comes in pieces, computed in a thread.

    `before` and `after` are called there with each part of the array, before or after it goes into
    the digest: to read it, or to write it. Once `stop` is set, no further part is touched.
    """

    def __init__(
        self,
        thread: Background,
        stop: threading.Event,
        before: _OnPart | None,
        after: _OnPart | None,
        like: str,
    ) -> None:
        self._thread = thread
        self._stop = stop
        self._before = before
        self._after = after
        self._hasher = hasher_like(like)
        self._waits: deque[Callable[[], None]] = deque()

    def update(self, piece: np.ndarray, is_view: bool) -> None:
        """Take in the next `piece`, which must not change before `result`. Local.

        Where it `is_view` of memory that is there anyway, any number of pieces may wait. Raises
        what went wrong with an earlier piece.
        """
        # All parts of an array go to one thread, in order: the digest and `InOrder` both depend on
        # the order of the parts.
        self._waits.append(self._thread.submit(lambda: self._absorb(piece)))
        if not is_view and len(self._waits) > _MAX_BEHIND:
            self._waits.popleft()()

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
        """Return the digest, once it is complete; raises what went wrong."""
        while self._waits:
            self._waits.popleft()()
        return self._hasher.result()


class ChecksumPool:
    """Threads that compute digests; a context manager that waits for them at its end.

    After an exception what is still to be done is left: nobody wants it, and whoever interrupts
    a second time would close files that threads write to.
    """

    def __init__(self, cores: int | None = None) -> None:
        num_threads = max(2, min(num_cores() if cores is None else cores, _MOST_THREADS))
        self._threads = [Background("mpistrat-digest") for _ in range(num_threads)]
        self._count = 0
        self._stop = threading.Event()

    def begin(
        self, before: _OnPart | None = None, after: _OnPart | None = None, like: str = ""
    ) -> Checksum:
        """Return the digest of another array, of the kind of `like`; see `Checksum`."""
        self._count += 1
        # Arrays are spread over the threads, never the parts of one array (see `Checksum.update`).
        thread = self._threads[self._count % len(self._threads)]
        return Checksum(thread, self._stop, before, after, like)

    def __enter__(self) -> ChecksumPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._stop.set()
        # Once drained, no thread uses a descriptor or an array any more, and the caller may close
        # or change them.
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
        """Move the next `part`."""
        self._move(self._handle, self._offset, part)
        self._offset += part.nbytes


def write_at(handle: int, offset: int, piece: np.ndarray) -> None:
    """Write the bytes of `piece` to an open file, and have the system begin to flush them."""
    # pwrite may write less than it is asked to; on Linux never more than 0x7ffff000 bytes at a time
    # (write(2)).
    left = memoryview(piece.reshape(-1).view(np.uint8).data)
    while left:
        written = os.pwrite(handle, left, offset)
        _begin_to_flush(handle, offset, written)
        left, offset = left[written:], offset + written


def _begin_to_flush(handle: int, offset: int, num_bytes: int) -> None:
    """Have the disk work from now on, where else it would begin at the fsync at the end."""
    if hasattr(os, "posix_fadvise"):
        # For Linux a request to write what is new: only pages that are on disk are dropped.
        os.posix_fadvise(handle, offset, num_bytes, os.POSIX_FADV_DONTNEED)


_BYTES_AHEAD = 2**23
"""Of one call of the system: Python lets a thread begin few calls while another one is busy."""


@contextlib.contextmanager
def reading_ahead(path: str) -> Iterator[None]:
    """Have a thread bring a file from the disk into memory, from its begin on, until the end."""
    is_over = threading.Event()

    def read() -> None:
        scratch, offset = bytearray(_BYTES_AT_ONCE), 0
        # Errors are not reported here: whoever needs the bytes gets the same error when it reads
        # them.
        with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:
            while not is_over.is_set() and _is_before_end(file.fileno(), offset):
                if not _is_in_memory(file.fileno(), offset):
                    # Nobody wants these bytes here, so all come to the same place.
                    parts = [scratch] * (_BYTES_AHEAD // _BYTES_AT_ONCE)
                    os.preadv(file.fileno(), parts, offset)
                offset += _BYTES_AHEAD

    with contextlib.suppress(RuntimeError):  # too many threads: it only takes longer
        threading.Thread(target=read, name="mpistrat-read", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()  # its last call may end later


def _is_before_end(handle: int, offset: int) -> bool:
    return offset < os.fstat(handle).st_size


def _is_in_memory(handle: int, offset: int) -> bool:
    """Return whether a byte of a file can be read without its disk, where the system says that."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    try:
        # preadv2(2): with RWF_NOWAIT a read fails with EAGAIN, Python's BlockingIOError, if it
        # would wait for the disk. One byte stands for the block that begins there.
        os.preadv(handle, [bytearray(1)], offset, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True


def digest_in_file(handle: int, offset: int, num_bytes: int, like: str) -> ArrayDigest:
    """Return the digest of bytes of an open file, of the kind of `like`, in little memory."""
    hasher = hasher_like(like)
    memory = np.empty(min(_BYTES_AT_ONCE, num_bytes), np.uint8)
    for begin in range(0, num_bytes, _BYTES_AT_ONCE):
        part = memory[: num_bytes - begin]
        read_at(handle, offset + begin, part)
        hasher.update(part)
    return hasher.result()


def read_at(handle: int, offset: int, piece: np.ndarray) -> None:
    """Fill `piece` with bytes of an open file, or raise OSError where it ends before."""
    left = memoryview(piece.reshape(-1).view(np.uint8).data)
    while left:
        num_bytes = os.preadv(handle, [left], offset)
        if num_bytes == 0:
            raise OSError(f"the file ends at byte {offset}")
        left, offset = left[num_bytes:], offset + num_bytes
