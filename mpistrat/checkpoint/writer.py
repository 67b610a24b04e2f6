"""Writer of checkpoint files: rank 0 adds one dataset after the other, or reserves space for it.

A path belongs to the ranks that write it. Groups of ranks of one job need not be in contact, so the
file itself says which ranks wrote it.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import math
import mmap
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.arrays import Array, host_view
from mpistrat.checkpoint.digests import ArrayDigest, digest_of_array, digest_of_text
from mpistrat.checkpoint.format import DIGESTS, FORMAT, REPLICAS, STATE, VARIABLES, Header
from mpistrat.checkpoint.marks import dump_json
from mpistrat.checkpoint.nodes import Groups, read_attribute, write_attribute, write_values
from mpistrat.checkpoint.raw_io import (
    BYTES_WORTH_A_THREAD,
    Checksum,
    ChecksumPool,
    InOrder,
    write_at,
)
from mpistrat.collectives.collectives import Collectives
from mpistrat.errors import CheckpointError
from mpistrat.mpi.world import running_world
from mpistrat.sharding import Box
from mpistrat.system.exit_hooks import Phase, at
from mpistrat.system.files import claimed, hidden_beside, remove_leftovers
from mpistrat.system.text import rank_list

WRITERS = "writers"
"""The attribute of the group of variables, in files of jobs of several ranks."""
# The root group has eight: with a ninth, HDF5 would store them where damage can hide one.

_BEGAN_S = time.time()
"""Older files are from a different job, perhaps with other ranks."""

_LONGEST_COMMIT_S = 10.0
"""Reading a file's header and renaming it take no longer."""


@dataclass(frozen=True)
class Writers:
    """Ranks that write files together."""

    ranks: tuple[int, ...]
    """Ranks in COMM_WORLD."""
    world_size: int
    collectives: Collectives | None = field(default=None, compare=False, repr=False)
    """Collectives of their strategy, which gives up its paths when it is closed."""

    @classmethod
    def of(cls, collectives: Collectives) -> Writers | None:
        """Return the ranks of `collectives`, ``None`` if the job has one rank."""
        transport = collectives.channel.transport
        if transport.world_size > 1:
            return cls(tuple(transport.world_ranks), transport.world_size, collectives)
        world = running_world()
        return None if world is None else cls((world.rank,), world.size)

    @property
    def is_named(self) -> bool:
        """Whether a file says who wrote it."""
        # With num_replicas= the ranks of a whole job write the same file, whatever their number.
        are_all = len(self.ranks) == self.world_size or (
            self.collectives is not None and self.collectives.is_elastic
        )
        has_many = self.collectives is not None and self.collectives.arithmetic != ""
        return not (are_all and has_many)

    def __str__(self) -> str:
        return f"{rank_list(self.ranks)} of {self.world_size}"

    def check(self, path: Path) -> None:
        """Raise `CheckpointError` if other ranks of this job have written `path`."""
        other = _writers_of(path)
        if other is None or other == str(self) or not other.endswith(f"of {self.world_size}"):
            return
        raise CheckpointError(
            f"The checkpoint {path} cannot be written by {self}: {other} of this job have written "
            "it, and their values would be lost. Use a different path for each strategy, or remove "
            "the file first. It is unchanged."
        )

    @contextlib.contextmanager
    def commit(self, path: Path, created: str) -> Iterator[None]:
        """Check `path`; no other writer gives a file this name while the body renames its own."""
        # `created` is the attribute of the file.
        with claimed(path, _LONGEST_COMMIT_S):
            self.check(path)
            yield
            if self.collectives is not None:
                _release_at_close(self.collectives, path, created)


def _writers_of(path: Path) -> str | None:
    """Return who wrote a file since this job began, ``None`` if it does not say so."""
    try:
        if path.stat().st_mtime < _BEGAN_S - 60:  # saves opening most files
            return None
        with hdf5.open_for_reading(path, CheckpointError) as file:
            found = read_attribute(file[VARIABLES].id, WRITERS)
            created = str(read_attribute(file.id, "created"))
        is_ours = Header(created=created).created_s >= _BEGAN_S
        if is_ours and _released(path).exists():
            is_ours = _released(path).read_text() != created
    except (OSError, RuntimeError, ValueError, KeyError):  # no file, or a damaged one
        return None
    return found if is_ours and isinstance(found, str) else None


_MANY = 64


def _release_at_close(collectives: Collectives, path: Path, created: str) -> None:
    actions = collectives.on_close
    if len(actions) >= _MANY:  # by now a manager has removed most of its files
        for gone in [each for each in actions if isinstance(each, Path) and not each.exists()]:
            del actions[gone]
    actions[path] = partial(_release, path, created)


def _released(path: Path) -> Path:
    """Return the path of the mark that says that nobody owns the file `path` any more."""
    return hidden_beside(path, "released")


def _release(path: Path, created: str) -> None:
    """Give up `path`, unless the file there is not the one that was `created` then."""
    # Other ranks need not be in contact, so a mark is kept next to the file until the job ends.
    with contextlib.suppress(OSError):
        _released(path).write_text(created)
        at(Phase.AFTER_LAST_ROUND, partial(_released(path).unlink, missing_ok=True))


class Replaces(enum.Enum):
    """Which files a save may replace."""

    CHECKPOINTS = enum.auto()
    """A file that is a checkpoint."""
    OWN_NAMES = enum.auto()
    """A file whose name only a `CheckpointManager` uses, even damaged; no intact data file."""
    ANYTHING = enum.auto()


def check_may_replace(path: str, replaces: Replaces) -> None:
    """Raise `CheckpointError` if `path` is a file that a save must not overwrite."""
    if replaces is Replaces.ANYTHING or not os.path.isfile(path):
        return
    remedy = (
        "It is unchanged. Write to another path, remove the file first, or replace it by "
        "Checkpoint.write(path, overwrite=True)."
    )
    try:
        with hdf5.open_for_reading(path, CheckpointError) as file:
            names = ", ".join(map(repr, list(file)[:4]))
            is_checkpoint = file.attrs.get("format") in (FORMAT, FORMAT.encode())
    except PermissionError:
        return  # unreadable; the error of writing says why
    except (OSError, RuntimeError) as reason:
        if replaces is Replaces.OWN_NAMES:
            return  # damaged: a job that resumed at an earlier step writes it again
        raise CheckpointError(
            f"The checkpoint {path} would replace a file that is not a readable HDF5 file: "
            f"{reason} {remedy}"
        ) from None
    if not is_checkpoint:
        raise CheckpointError(
            f"The checkpoint {path} would replace an HDF5 file that is not a checkpoint, with "
            f"{names or 'nothing'} at its top. {remedy}"
        )


class BufferLifetime(enum.Enum):
    """Which ranks have the values of an array, and until when."""

    BRIEF = enum.auto()
    """Rank 0 has them, until the next item."""
    LONG = enum.auto()
    """Rank 0 has them, until the end of the save."""
    EVERYWHERE = enum.auto()
    """All ranks have the same values, until the end of the save."""


@dataclass(frozen=True)
class Parts:
    """The parts of an array, if no rank has all of them."""

    holders: str
    """A string that is equal on the ranks that divide the array among them."""
    own: Callable[[], Iterable[tuple[Box, np.ndarray]]]
    """Returns the parts that this rank writes."""


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
    """All attributes except the digest."""
    array: Array | None = None
    """All values, on the ranks that `life` names; for state, the JSON text."""
    life: BufferLifetime = BufferLifetime.LONG
    pieces: Iterator[np.ndarray | None] | None = None
    """The values piece by piece, in order, on rank 0. Collective."""
    parts: Parts | None = None

    @property
    def is_shared(self) -> bool:
        """Whether ranks other than 0 may write it."""
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

    The defaults of `shape` and `dtype` are the array's own. `tensor_dtype` is the dtype of a
    tensor, which the file names if HDF5 lacks it.
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
        The descriptor of the file.
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
        # The look-up creates the group. The reader requires both groups, even if one is empty.
        for name in (VARIABLES, STATE):
            self.groups[name]
        self._stack = stack
        self._reserved: dict[str, Any] = {}
        """The datasets whose digests are added later, by path."""
        self._unfinished: list[tuple[str, Checksum]] = []

    @functools.cached_property
    def _digests(self) -> ChecksumPool:
        """Threads that only a checkpoint of large arrays needs."""
        # An ExitStack ends its contexts in reverse order: the threads end before the file is
        # closed, so none writes to a closed descriptor.
        return self._stack.enter_context(ChecksumPool())

    def add(self, item: Item) -> None:
        """Add one dataset, whose values are on this rank. Local.

        If its values stay valid until `finish`, its digest may be added there.
        """
        array = item.array
        if array is None:
            raise RuntimeError(f"the values of {item.path} have not reached the rank that writes")
        with explaining(self._path):
            if item.group == STATE:
                self._write_text(item, host_view(array))
            elif item.group == REPLICAS or array.nbytes < BYTES_WORTH_A_THREAD:
                self._write_small(item, host_view(array))
            else:
                digester = self.begin(item)
                digester.update_with(array)
                # The next item replaces a brief array, so `add` returns only when all of it is
                # written.
                if item.life is BufferLifetime.BRIEF:
                    self.end(item, digester)
                else:
                    self._unfinished.append((item.path, digester))

    def begin(self, item: Item) -> Checksum:
        """Reserve space for an array, and return an object that writes its pieces in order."""
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
        """Reserve space for the values of a variable, and return its offset. Local.

        A large variable begins at a page of the system. `write_at` writes the values, and
        `set_digest` adds their digest.
        """
        with explaining(self._path):
            dataset = self._reserved[item.path] = self._create(item)
            if not item.num_bytes:
                return 0
            # Known at once, because `nodes._in_place` lets HDF5 allocate the space when the dataset
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
    folder, name = os.path.split(os.path.realpath(path))
    with contextlib.ExitStack() as stack:
        with explaining(path):
            # A job that is killed again and again while it saves would fill the disk.
            remove_leftovers(folder, name)
            if writers is None:
                file = stack.enter_context(hdf5.create_atomically(path))
            else:
                # Checked early, before all data is written. `commit` checks again while it holds
                # the claim, since a different writer may finish first.
                writers.check(Path(os.path.realpath(path)))
                commit = partial(writers.commit, created=header.created)
                file = stack.enter_context(hdf5.create_atomically(path, commit))
            writer = CheckpointWriter(file, header, path, stack)
            if writers is not None and writers.is_named:
                write_attribute(writer.groups[VARIABLES], WRITERS, str(writers))
        yield writer
        writer.finish()
        # The threads end, HDF5 closes the file, then fsync and rename: each step can still fail for
        # lack of space.
        with explaining(path):
            stack.close()


def _set_attributes(dataset: Any, item: Item) -> None:
    for name, value in item.attributes.items():
        write_attribute(dataset, name, value)


@contextlib.contextmanager
def explaining(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn errors of the system and of h5py into a `CheckpointError` that names a remedy."""
    try:
        yield
    except CheckpointError:
        raise
    except (OSError, RuntimeError) as reason:  # h5py raises either if the system refuses
        text = hdf5.error_text(reason)
        raise CheckpointError(
            f"The checkpoint {os.fspath(path)} cannot be written: {text}. Check the folder, "
            "its permissions and the free space; a previous file is unchanged."
        ) from reason


class FirstError:
    """The first error of work that rank 0 does between collectives, kept until `check`."""

    def __init__(self, is_root: bool) -> None:
        self._is_root = is_root
        self._error: Exception | None = None

    def run(self, do: Callable[..., Any], *arguments: Any) -> Any:
        """Return what `do` returns on rank 0; ``None`` elsewhere, and after an error."""
        if self._is_root and self._error is None:
            try:
                return do(*arguments)
            # Not raised here: the other ranks will enter the next collective, and would wait there
            # for rank 0.
            except Exception as error:
                self.abandon(error)
        return None

    def abandon(self, error: BaseException) -> None:
        """Do nothing more, because `error` was raised."""
        if self._error is None:
            self._error = error if isinstance(error, Exception) else RuntimeError(repr(error))

    def check(self) -> None:
        """Raise the error, if there is one."""
        if self._error is not None:
            raise self._error


class RootFile(FirstError):
    """The file that rank 0 creates; after an error rank 0 stays in step with the other ranks."""

    def __init__(self, is_root: bool, path: str, header: Header, writers: Writers | None) -> None:
        super().__init__(is_root)
        self._context = create_checkpoint(path, header, writers)
        self._writer: CheckpointWriter | None = None
        self._writer = self.run(self._context.__enter__)

    def use(self, do: Callable[..., Any], *arguments: Any) -> Any:
        """Call `do` with the writer on rank 0, as `run` does, and return its result."""
        return self.run(do, self._writer, *arguments)

    def write(self, item: Item) -> None:
        """Write `item` on rank 0. **Collective** if its values are `pieces`."""
        if item.pieces is None:
            self.use(CheckpointWriter.add, item)
            return
        digester = self.use(CheckpointWriter.begin, item)
        # Other ranks, and rank 0 after an error, also iterate over the pieces, because that is
        # collective.
        for piece in item.pieces:
            if digester is not None:
                self.use(CheckpointWriter.extend, digester, piece)
            # Or the next piece would be created while this one is still in memory.
            del piece
        if digester is not None:
            self.use(CheckpointWriter.end, item, digester)

    def abandon(self, error: BaseException) -> None:
        """Remove the data that has been written, because `error` was raised."""
        super().abandon(error)
        if self._writer is not None:
            self._writer = None
            try:
                # The rest of `create_checkpoint` gets the error: it removes the temporary file, and
                # the file at `path` stays.
                self._context.__exit__(type(error), error, error.__traceback__)
            except Exception as explained:
                self._error = explained

    def complete(self) -> None:
        """Rename the file to its path on rank 0, or raise the error."""
        self.check()
        writer, self._writer = self._writer, None
        if writer is not None:
            self._context.__exit__(None, None, None)


@contextlib.contextmanager
def file_of_root(
    collectives: Collectives, what: str, path: str, header: Header, writers: Writers | None
) -> Iterator[RootFile]:
    """Let rank 0 create a file, for the public function `what`. **Collective**.

    If rank 0 fails to write, it still takes part in the rest, and all ranks raise the error at the
    end.
    """
    file = RootFile(collectives.rank == 0, path, header, writers)
    try:
        yield file
    # The ranks share no outcome after this: an error outside of `run` may leave them at different
    # calls.
    except BaseException as error:
        file.abandon(error)
        raise
    with collectives.common_outcome(what, path):
        file.complete()
