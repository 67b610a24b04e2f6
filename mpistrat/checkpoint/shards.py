"""Shards of arrays in a file: which bytes of it each is, raw reads and writes, digests."""

from __future__ import annotations

import functools
import itertools
import math
import operator
import os
from collections.abc import Hashable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np

from mpistrat.arrays import is_on_host
from mpistrat.checkpoint.digests import ArrayDigest, hasher_like
from mpistrat.checkpoint.raw_io import BYTES_WORTH_A_THREAD, read_at, write_at
from mpistrat.checkpoint.torch_hook import Box
from mpistrat.checkpoint.writer import CheckpointWriter, Item, explaining
from mpistrat.errors import CheckpointError
from mpistrat.options import VariableSynchronization
from mpistrat.variables import Variable


class Extent(NamedTuple):
    """The bytes of a file in which an array lies in C order."""

    offset: int
    num_bytes: int
    item_bytes: int


class Written(NamedTuple):
    """What is known of bytes in a file."""

    num_items: int
    parity: int
    """The exclusive or of all elements, which does not depend on their order."""
    digest: str = ""
    pages: str = ""
    """As `ArrayDigest` has them."""


def _runs(shape: Sequence[int], box: Box) -> tuple[int, Iterator[int]]:
    """Return how many elements of `box` lie in one piece, and where in the array each run begins.

    The runs are in C order of the box.
    """
    axis = len(shape)
    while axis and box.sizes[axis - 1] == shape[axis - 1]:
        axis -= 1
    inner = max(axis - 1, 0)  # of this axis a part, of those behind it all
    strides = [math.prod(shape[each + 1 :]) for each in range(len(shape))]
    first = sum(map(math.prod, zip(box.offsets, strides, strict=True)))
    steps = [
        range(0, size * stride, stride)
        for size, stride in zip(box.sizes[:inner], strides[:inner], strict=True)
    ]
    begins = (first + sum(each) for each in itertools.product(*steps))
    return math.prod(box.sizes[inner:]), begins


def write_box(handle: int, extent: Extent, shape: Sequence[int], box: Box, values: Any) -> Written:
    """Write `values`, an array in C order, to where `box` lies in an array of this `shape`."""
    flat = values.reshape(-1).view(np.uint8)
    if not flat.size:
        return Written(0, 0)
    length, begins = _runs(shape, box)
    num_bytes = length * extent.item_bytes
    # `write_at` asks for a flush of what it has written. For short runs that would cost a system
    # call each, and flush a page that the next run changes again.
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


def read_box(handle: int, extent: Extent, shape: Sequence[int], box: Box, into: Any) -> None:
    """Fill `into`, an array in C order, with what `write_box` writes."""
    flat = into.reshape(-1).view(np.uint8)
    if not flat.size:
        return
    length, begins = _runs(shape, box)
    num_bytes = length * extent.item_bytes
    for number, begin in enumerate(begins):
        run = flat[number * num_bytes : (number + 1) * num_bytes]
        read_at(handle, extent.offset + begin * extent.item_bytes, run)


def has_bytes_of_file(variable: Variable) -> bool:
    """Return whether the memory of `variable` is to hold the bytes of the file."""
    placement, on_read = variable._placement, VariableSynchronization.ON_READ
    if variable.synchronization is on_read or placement.block or not placement.is_here:
        return False
    return is_on_host(variable._storage)


def has_part_of_file(variable: Variable) -> bool:
    """Return whether the memory of `variable` is to hold a part of what is in the file."""
    if variable.synchronization is VariableSynchronization.ON_READ:
        return False
    return variable._placement.block is not None and is_on_host(variable._storage)


def read_own(handle: int, extent: Extent, variable: Variable) -> None:
    """Read what this rank holds of a variable that lies in `extent` of a file."""
    block, own = variable._placement.block, variable._own_storage
    # `read_at` moves the bytes of the file into the storage of the variable, without a copy
    # between.
    if block is None:
        read_at(handle, extent.offset, own)
    else:
        read_box(handle, extent, block.shape, Box(block.offsets, block.sizes), own)


def _parity(data: np.ndarray, item_bytes: int) -> int:
    words = data.view(f"u{min(item_bytes, 8)}")
    return int(np.bitwise_xor.reduce(words))


_BYTES_AT_ONCE = 2**20

Name = TypeVar("Name", bound=Hashable)


def digests_in_file(
    handle: int,
    extents: Mapping[Name, Extent],
    num_threads: int,
    stored: Mapping[Name, str] | None = None,
) -> dict[Name, Written]:
    """Read arrays through, each in one thread and in little memory, and return what they are.

    Their digests are of the kinds of those that are `stored` with them.
    """
    like = [(stored or {}).get(name, "") for name in extents]
    with ThreadPoolExecutor(max(num_threads, 1), "mpistrat-digest") as threads:
        found = threads.map(functools.partial(_read_through, handle), extents.values(), like)
        return dict(zip(extents, found, strict=True))


def _read_through(handle: int, extent: Extent, like: str) -> Written:
    hasher, parity = hasher_like(like), 0
    memory = np.empty(min(_BYTES_AT_ONCE, extent.num_bytes), np.uint8)
    for begin in range(0, extent.num_bytes, _BYTES_AT_ONCE):
        part = memory[: min(_BYTES_AT_ONCE, extent.num_bytes - begin)]
        read_at(handle, extent.offset + begin, part)
        hasher.update(part)
        parity ^= _parity(part, extent.item_bytes)
    num_items = extent.num_bytes // extent.item_bytes
    return Written(num_items, parity, *hasher.result())


@dataclass(frozen=True)
class Room:
    """The file that rank 0 makes, and the places of arrays in it that several ranks write."""

    path: str
    inode: int
    extents: dict[str, Extent]

    @classmethod
    def from_json(cls, path: str, inode: int, extents: Mapping[str, Sequence[int]]) -> Room:
        """Return the room of which `asdict` made JSON values."""
        return cls(path, inode, {name: Extent(*each) for name, each in extents.items()})

    @classmethod
    def reserve(cls, writer: CheckpointWriter, items: Mapping[str, Item]) -> Room:
        """Make room for `items`, whose arrays have no values."""
        extents = {}
        for name, item in items.items():
            blank: Any = item.array
            extents[name] = Extent(writer.reserve(item, blank), blank.nbytes, blank.dtype.itemsize)
        end = max((each.offset + each.num_bytes for each in extents.values()), default=0)
        with explaining(writer.temporary):
            # Other nodes must not take for holes what others have written.
            if os.fstat(writer.handle).st_size < end:
                os.ftruncate(writer.handle, end)
        inode = os.fstat(writer.handle).st_ino
        return cls(os.path.abspath(writer.temporary), inode, extents)

    def open(self, must_be_there: bool = False, flags: int = os.O_WRONLY) -> int | None:
        """Return a descriptor of the file, ``None`` where this rank does not see it."""
        try:
            # O_NONBLOCK: a path that is a pipe on this node must not block the rank forever.
            handle = os.open(self.path, flags | os.O_NONBLOCK)
        except OSError:
            if must_be_there:
                raise
            return None
        # On this node the path may name a file on a local disk. Only the inode tells them apart.
        if os.fstat(handle).st_ino == self.inode:
            return handle
        os.close(handle)
        return None


def sign(
    writer: CheckpointWriter,
    path: str,
    parts: Mapping[str, Sequence[Written]],
    found: Mapping[str, Written],
) -> None:
    """Check that the arrays `found` in the file consist of these `parts`, and add their digests."""
    # Two proofs that do not depend on the order of elements: their number, and the exclusive or of
    # all of them, which is zero if written and found elements agree.
    for name, whole in found.items():
        num_items = sum(each.num_items for each in parts[name])
        if num_items != whole.num_items:
            raise CheckpointError(
                f"The checkpoint {path} cannot be written: the ranks that save have {num_items} of "
                f"the {whole.num_items} elements of {name}. All ranks of its device mesh must take "
                "part. What was there before is unchanged."
            )
        if functools.reduce(operator.xor, (each.parity for each in parts[name]), whole.parity):
            raise CheckpointError(
                f"The checkpoint {path} cannot be written by all ranks together: the file does not "
                f"hold what they have written of {name}. This file system does not show all nodes "
                "the same. Save to another one. What was there before is unchanged."
            )
        writer.set_digest(name, ArrayDigest(whole.digest, whole.pages))
