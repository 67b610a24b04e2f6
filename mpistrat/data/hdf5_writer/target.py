"""The file of a writer: opened, created or resumed by rank 0, renamed or removed at the end."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.data.hdf5_writer.lock import WriterLock
from mpistrat.data.hdf5_writer.root_file import RootFile, write_all
from mpistrat.errors import DataError
from mpistrat.system.files import affixes, remove_leftovers, replace_file, umask, write_atomically
from mpistrat.system.xxh3 import digest_of_values


@contextlib.contextmanager
def naming(path: str) -> Iterator[None]:
    """Let errors of the system name the file of the writer."""
    try:
        yield
    except OSError as error:
        # Those of an open file have no name, and those of a new file its hidden one.
        if error.errno is not None:
            error.filename = path
        raise


def open_same(path: str, inode: int) -> int:
    """Return a descriptor of the file that rank 0 has opened, or raise OSError."""
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    # On a different node, the path may name a file on a local disk. Only the inode tells the
    # difference.
    if os.fstat(handle).st_ino == inode:
        return handle
    os.close(handle)
    raise OSError(
        errno.ESTALE,
        "is a different file on this rank than on rank 0. Write to a folder that all nodes share",
        path,
    )


class Target:
    """What rank 0 holds besides the other ranks: the lock, the trees and headers, the name."""

    def __init__(self, path: str, mode: str, is_durable: bool) -> None:
        self.path = Path(os.path.realpath(path))
        self._is_new = mode == "w"
        if self.path.exists() and not self.path.is_file():
            what = "a folder" if self.path.is_dir() else "a device or a pipe"
            raise OSError(errno.EISDIR, f"is {what}, but a file is to be written", path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = WriterLock(self.path)
        except PermissionError as reason:
            what = "cannot be written: its folder does not allow new files"
            raise PermissionError(reason.errno, what, path) from None
        self.name = str(self.path)
        """Path of the file until the end."""
        try:
            if self._is_new:
                self.name = self._new_file()
            elif not self.path.exists():
                # Complete from the start: an empty file, as a kill might leave it, could not be
                # resumed.
                write_atomically(self.path, [_empty_file()])
            self.file = RootFile(self.name, is_durable)
        except BaseException:
            self._discard()
            raise
        self.end, self.steps = 0, 0

    def _new_file(self) -> str:
        # Files of killed writers of this path. A live one would hold the lock.
        remove_leftovers(self.path.parent, self.path.name)
        prefix, suffix = affixes(self.path)
        handle, name = tempfile.mkstemp(dir=self.path.parent, prefix=prefix, suffix=suffix)
        try:
            os.fchmod(handle, 0o666 & ~umask())
            write_all(handle, 0, _empty_file())
        except BaseException:
            os.unlink(name)
            raise
        finally:
            os.close(handle)
        return name

    def inspect(self) -> None:
        """Find out the end and the number of steps; raise DataError for files without support."""
        try:
            with contextlib.closing(hdf5.open_for_reading(self.name, DataError)) as file:
                self.end, self.steps = self.file.find_end(file)
        except BaseException:
            self.abandon()
            raise

    def has_attrs(self, path: str, attrs: Any) -> bool:
        """Return whether an object of the file has all these attributes, with equal values."""
        with contextlib.closing(hdf5.open_for_reading(self.name, DataError)) as file:
            node = file if not path else file.get(path)
            return node is not None and all(
                name in node.attrs and _is_equal(node.attrs[name], attrs[name]) for name in attrs
            )

    def check_pages(self, pages: Mapping[int, tuple[int, int, int]]) -> None:
        """Check that this rank finds in the file what the others have written and flushed."""
        # As for parallel checkpoints: on a file system where the nodes do not see each other's
        # writes, the step would be lost, and only a reader would notice it. Opened again, because
        # only then NFS promises to show the data of other nodes (nfs(5)).
        handle = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC) if pages else -1
        try:
            for rank, (place, num_bytes, digest) in pages.items():
                page = np.frombuffer(os.pread(handle, num_bytes, place), np.uint8)
                if digest_of_values(page) != digest:
                    raise OSError(
                        errno.EIO,
                        f"rank 0 does not find in it what rank {rank} has written: this file "
                        "system does not show all nodes the same. Write to a different one",
                        str(self.path),
                    )
        finally:
            if pages:
                os.close(handle)

    def publish(self) -> None:
        """Let the complete file get its name, and close it."""
        self.file.close()
        if self._is_new:
            replace_file(self.name, self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        self._lock.release()

    def abandon(self) -> None:
        """Close the file as it is, and remove it if it has no name yet."""
        self.file.close()
        self._discard()

    def _discard(self) -> None:
        if self._is_new and self.name != str(self.path):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.name)
        self._lock.release()


def _is_equal(one: Any, two: Any) -> bool:
    if isinstance(one, np.ndarray | np.generic) and isinstance(two, np.ndarray | np.generic):
        return one.dtype == two.dtype and np.array_equal(one, two)
    return type(one) is type(two) and bool(one == two)


def _empty_file() -> bytes:
    """Return a file with an empty root group, with structures of the earliest version."""
    memory = io.BytesIO()
    hdf5.h5py().File(memory, "w", libver=("earliest", "latest")).close()
    return memory.getvalue()


def objects_of(file: Any) -> dict[str, tuple[Any, Any] | None]:
    """Return shape and dtype of each dataset of an open file by path, ``None`` for groups."""
    found: dict[str, tuple[Any, Any] | None] = {}

    def visit(name: str, node: Any) -> None:
        is_dataset = isinstance(node, hdf5.h5py().Dataset)
        found[name] = (node.shape, node.dtype) if is_dataset else None

    file.visititems(visit)
    return found
