"""Writer of checkpoint files: one dataset after the other, or room for what ranks write there."""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import mmap
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.arrays import Array, host_view
from mpistrat.checkpoint.digests import ArrayDigest, digest_of_array, digest_of_text
from mpistrat.checkpoint.format import DIGESTS, REPLICAS, STATE, VARIABLES, Header
from mpistrat.checkpoint.json_marks import dump_json
from mpistrat.checkpoint.nodes import Groups, write_attribute, write_values
from mpistrat.checkpoint.ownership import WRITERS, Writers
from mpistrat.checkpoint.raw_io import (
    BYTES_WORTH_A_THREAD,
    Checksum,
    ChecksumPool,
    InOrder,
    write_at,
)
from mpistrat.errors import CheckpointError
from mpistrat.sharding import Box


class BufferLifetime(enum.Enum):
    """Which ranks have the values of an array, and for how long."""

    BRIEF = enum.auto()
    """Rank 0, until the next item."""
    LONG = enum.auto()
    """Rank 0, until the end of the save."""
    EVERYWHERE = enum.auto()
    """All ranks, the same values, until the end of the save."""


@dataclass(frozen=True)
class Parts:
    """The parts of an array that ranks have, of which no rank has all."""

    holders: str
    """A text that is equal on the ranks that divide the array among them."""
    own: Callable[[], Iterable[tuple[Box, np.ndarray]]]
    """Returns those that this rank is to write."""


@dataclass(frozen=True)
class Item:
    """One dataset of a file, and which ranks have its values.

    The values are `array`, or `pieces`, or `parts`.
    """

    group: str
    """`VARIABLES`, `STATE` or `REPLICAS`."""
    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    attributes: Mapping[str, bool | str | Sequence[str]]
    """All but the digest."""
    array: Array | None = None
    """All values, on the ranks of `life`: for state the text."""
    life: BufferLifetime = BufferLifetime.LONG
    pieces: Iterator[np.ndarray | None] | None = None
    """Some values at a time, in their order, on rank 0. Collective."""
    parts: Parts | None = None

    @property
    def is_shared(self) -> bool:
        """Whether other ranks than 0 may write it."""
        return self.parts is not None or self.life is BufferLifetime.EVERYWHERE

    @property
    def num_bytes(self) -> int:
        """The size of all values."""
        return math.prod(self.shape) * self.dtype.itemsize


def variable_item(
    path: str,
    array: Array | None,
    *,
    shape: tuple[int, ...] | None = None,
    dtype: np.dtype | None = None,
    synchronization: str = "NONE",
    aggregation: str = "NONE",
    trainable: bool = False,
    tensor_dtype: str = "",
    life: BufferLifetime = BufferLifetime.LONG,
    pieces: Iterator[np.ndarray | None] | None = None,
    parts: Parts | None = None,
) -> Item:
    """Return the item of a variable, or of an array of an object's state.

    `shape` and `dtype` are by default those of `array`. `tensor_dtype` is the dtype of a tensor,
    which the file names if HDF5 lacks it.
    """
    if shape is None or dtype is None:
        given: Any = array
        shape, dtype = given.shape, given.dtype
    attributes: dict[str, bool | str] = {
        "synchronization": synchronization,
        "aggregation": aggregation,
        "trainable": trainable,
    }
    if tensor_dtype not in ("", dtype.name):
        attributes["dtype"] = tensor_dtype
    return Item(VARIABLES, path, shape, dtype, attributes, array, life, pieces, parts)


def state_item(path: str, state: Any, arrays: Sequence[str] = ()) -> Item:
    """Return the item of a JSON value with the names of its arrays below `path`."""
    text = np.array(dump_json(state).encode())
    return Item(STATE, path, (), text.dtype, {"arrays": arrays}, text)


class CheckpointWriter:
    """The content of a checkpoint file that is being written.

    Attributes
    ----------
    temporary : str
        The name of the file until it is complete.
    handle : int
        Its descriptor.
    """

    def __init__(
        self, file: Any, header: Header, path: str | os.PathLike[str], stack: contextlib.ExitStack
    ) -> None:
        self._path = path
        for name, value in header.attributes().items():
            write_attribute(file.id, name, value)
        write_attribute(file.id, "digest", header.digest())
        self.temporary: str = file.filename
        self.handle: int = file.id.get_vfd_handle()
        self.groups = Groups(file)
        # The look-up creates the group. The reader requires both, also if one is empty.
        for name in (VARIABLES, STATE):
            self.groups[name]
        self._stack = stack
        self._reserved: dict[str, Any] = {}
        """The datasets whose digests follow, by path."""
        self._unfinished: list[tuple[str, Checksum]] = []

    @functools.cached_property
    def _digests(self) -> ChecksumPool:
        """Threads that only a checkpoint of large arrays needs."""
        # An ExitStack ends its contexts in reverse order: the threads end before the file is
        # closed, so none writes to a closed descriptor.
        return self._stack.enter_context(ChecksumPool())

    def add(self, item: Item) -> None:
        """Add one dataset, whose values are here. Local.

        The digest of one that stays as it is until `finish` may be added there.
        """
        array = item.array
        if array is None:
            raise RuntimeError(f"the values of {item.path} have not come to the rank that writes")
        with explaining(self._path):
            if item.group == STATE:
                self._write_text(item, host_view(array))
            elif item.group == REPLICAS or array.nbytes < BYTES_WORTH_A_THREAD:
                self._write_small(item, host_view(array))
            else:
                digester = self.begin(item)
                digester.update_with(array)
                # The next item replaces a brief array, so all of it must be on its way to the file
                # before `add` returns.
                if item.life is BufferLifetime.BRIEF:
                    self.end(item, digester)
                else:
                    self._unfinished.append((item.path, digester))

    def begin(self, item: Item) -> Checksum:
        """Reserve room for an array, and return what writes its pieces there, in their order."""
        with explaining(self._path):
            offset = self.reserve(item)
            return self._digests.begin(after=InOrder(write_at, self.handle, offset))

    def extend(self, digester: Checksum, piece: np.ndarray) -> None:
        """Write the next piece of an array that `begin` has begun."""
        with explaining(self._path):
            digester.update(piece, is_view=False)

    def end(self, item: Item, digester: Checksum) -> None:
        """Wait until all pieces of an array are written, and add their digest."""
        with explaining(self._path):
            digest = digester.result()
        self.set_digest(item.path, digest)

    def reserve(self, item: Item) -> int:
        """Reserve room for the values of a variable, and return where it begins. Local.

        A large one begins with a page of the system. The values are written by `write_at`, and
        `set_digest` adds their digest.
        """
        with explaining(self._path):
            dataset = self._reserved[item.path] = self._create(item)
            if not item.num_bytes:
                return 0
            # Known at once, because `nodes._in_place` has HDF5 allocate the space when the dataset
            # is created.
            offset = dataset.get_offset()
            if offset is None:
                size = item.num_bytes
                raise RuntimeError(f"HDF5 has no place for the {size} bytes of {item.path}")
            # `hdf5._create` has asked HDF5 for this alignment. Without it two ranks could write to
            # one page.
            if item.num_bytes >= BYTES_WORTH_A_THREAD and offset % mmap.PAGESIZE:
                where = f"at byte {offset}, inside of a page"
                raise RuntimeError(f"HDF5 has placed {item.path} {where}")
            return int(offset)

    def set_digest(self, path: str, digest: ArrayDigest) -> None:
        """Add the digest of a variable whose values were written by `write_at`."""
        with explaining(self._path):
            write_attribute(self._reserved.pop(path), "digest", digest.text)
            if digest.pages:
                pages = digest.page_digests()
                dataset = self.groups.create_dataset(f"{DIGESTS}/{path}", pages.shape, pages.dtype)
                write_values(dataset, pages)

    def _create(self, item: Item) -> Any:
        dataset = self.groups.create_dataset(f"{item.group}/{item.path}", item.shape, item.dtype)
        _set_attributes(dataset, item)
        return dataset

    def _write_text(self, item: Item, text: np.ndarray) -> None:
        dataset = self.groups.create_text(f"{item.group}/{item.path}", text.nbytes)
        write_values(dataset, text)
        _set_attributes(dataset, item)
        write_attribute(dataset, "digest", digest_of_text(text.tobytes()))

    def _write_small(self, item: Item, host: np.ndarray) -> None:
        dataset = self._create(item)
        write_values(dataset, np.ascontiguousarray(host))
        write_attribute(dataset, "digest", digest_of_array(host).text)

    def finish(self) -> None:
        """Write the digests that were not complete before."""
        for path, digester in self._unfinished:
            with explaining(self._path):
                digest = digester.result()
            self.set_digest(path, digest)
        self._unfinished.clear()


@contextlib.contextmanager
def create_checkpoint(
    path: str | os.PathLike[str], header: Header, writers: Writers | None = None
) -> Iterator[CheckpointWriter]:
    """Write a checkpoint that appears under `path` once it is complete and on disk."""
    header = replace(header, created=header.created or Header.timestamp())
    with contextlib.ExitStack() as stack:
        with explaining(path):
            if writers is None:
                file = stack.enter_context(hdf5.create_atomically(path))
            else:
                # Early, before all data are written. `commit` checks again while it holds the
                # claim, since a different writer may finish first.
                writers.check(Path(os.path.realpath(path)))
                commit = functools.partial(writers.commit, created=header.created)
                file = stack.enter_context(hdf5.create_atomically(path, commit))
            writer = CheckpointWriter(file, header, path, stack)
            if writers is not None and writers.is_named:
                write_attribute(writer.groups[VARIABLES], WRITERS, str(writers))
        yield writer
        writer.finish()
        # Threads end, HDF5 closes the file, then fsync and the rename: all of it can still fail for
        # lack of space.
        with explaining(path):
            stack.close()


def _set_attributes(dataset: Any, item: Item) -> None:
    for name, value in item.attributes.items():
        write_attribute(dataset, name, value)


@contextlib.contextmanager
def explaining(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of the system and of h5py into a `CheckpointError` with the remedy."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as reason:  # h5py raises either where the system refuses
        text = hdf5.error_text(reason)
        raise CheckpointError(
            f"The checkpoint {os.fspath(path)} cannot be written: {text}. Check the folder, "
            "its permissions and the free space; what was there before is unchanged."
        ) from reason
