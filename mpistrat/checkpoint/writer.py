"""Write a checkpoint file: header, variables and state, one at a time."""

from __future__ import annotations

import contextlib
import mmap
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from mpistrat import hdf5
from mpistrat.arrays import Array, host_view, is_on_host
from mpistrat.checkpoint.attributes import write_attribute
from mpistrat.checkpoint.contiguous import InOrder, create_unwritten, offset_of, write_at
from mpistrat.checkpoint.digesting import BYTES_WORTH_A_THREAD, Digester, Digests
from mpistrat.checkpoint.format import (
    STATE,
    VARIABLES,
    Header,
    digest_of_array,
    digest_of_text,
)
from mpistrat.checkpoint.json_text import dump_json
from mpistrat.checkpoint.pieces import pieces_on_host
from mpistrat.errors import CheckpointError

__all__ = ["CheckpointWriter", "create_checkpoint", "explaining"]


class CheckpointWriter:
    """The content of a checkpoint file that is being written.

    Parameters
    ----------
    file : h5py.File
    header : Header
    path : path
        The final name, for messages.
    digests : Digests

    Attributes
    ----------
    temporary : str
        The name of the file until it is complete.
    handle : int
        Its descriptor.
    """

    def __init__(
        self, file: Any, header: Header, path: str | os.PathLike[str], digests: Digests
    ) -> None:
        self._path = path
        for name, value in asdict(header).items():
            write_attribute(file, name, value)
        write_attribute(file, "digest", header.digest)
        self.temporary: str = file.filename
        self.handle: int = file.id.get_vfd_handle()
        self._variables = file.create_group(VARIABLES)
        self._state = file.create_group(STATE)
        self._digests = digests
        self._unfinished: list[tuple[Any, Digester]] = []

    def add_variable(
        self,
        path: str,
        array: Array,
        *,
        synchronization: str = "NONE",
        aggregation: str = "NONE",
        trainable: bool = False,
        lives_on: bool = False,
    ) -> None:
        """Add the values of one variable, or an array of an object's state. Local.

        Where `lives_on`, nobody changes or drops `array` before `finish`, so that its digest
        need not be complete when this returns.
        """
        with explaining(self._path):
            if array.nbytes < BYTES_WORTH_A_THREAD:
                host = host_view(array)
                dataset = self._variables.create_dataset(path, data=host)
                write_attribute(dataset, "digest", digest_of_array(host))
            else:
                dataset = self._write_large(path, array, lives_on)
            _set_modes(dataset, synchronization, aggregation, trainable)

    def reserve(
        self, path: str, array: Array, *, synchronization: str, aggregation: str, trainable: bool
    ) -> int:
        """Make room for the values of a large variable, and return where it begins. Local.

        It begins with a page of the system. The values come by `write_at`, their digest by
        `set_digest`.
        """
        with explaining(self._path):
            dataset, offset = self._make_room(path, array)
            if offset % mmap.PAGESIZE:
                raise RuntimeError(f"HDF5 has placed {path} at byte {offset}, inside of a page")
            _set_modes(dataset, synchronization, aggregation, trainable)
            return offset

    def set_digest(self, path: str, digest: str) -> None:
        """Add the digest of a variable for which there was only room. Local."""
        with explaining(self._path):
            write_attribute(self._variables[path], "digest", digest)

    def _make_room(self, path: str, array: Array) -> tuple[Any, int]:
        dataset = create_unwritten(self._variables, path, array)
        offset = offset_of(dataset, array.nbytes)
        if offset is None:
            raise RuntimeError(f"HDF5 has no place for the {array.nbytes} bytes of {path}")
        return dataset, offset

    def _write_large(self, path: str, array: Array, lives_on: bool) -> Any:
        dataset, offset = self._make_room(path, array)
        digester = self._digests.begin(after=InOrder(write_at, self.handle, offset))
        for piece in pieces_on_host(array):
            digester.update(piece, is_view=is_on_host(array))
        if lives_on:
            self._unfinished.append((dataset, digester))
        else:
            write_attribute(dataset, "digest", digester.result())
        return dataset

    def add_state(self, path: str, value: Any, arrays: Sequence[str] = ()) -> None:
        """Add the JSON `value` of one object, and the names of its arrays below `path`. Local."""
        text = dump_json(value).encode()
        # Texts of variable length would lie in a heap that has no checksum.
        dtype = hdf5.h5py().string_dtype("utf-8", len(text))
        with explaining(self._path):
            dataset = self._state.create_dataset(path, data=text, dtype=dtype)
            write_attribute(dataset, "digest", digest_of_text(text))
            write_attribute(dataset, "arrays", arrays)

    def finish(self) -> None:
        """Write the digests that were not complete before. Local."""
        with explaining(self._path):
            for dataset, digester in self._unfinished:
                write_attribute(dataset, "digest", digester.result())
            self._unfinished.clear()


@contextlib.contextmanager
def create_checkpoint(path: str | os.PathLike[str], header: Header) -> Iterator[CheckpointWriter]:
    """Write a checkpoint that appears under `path` once it is complete and on disk. Local.

    Raises
    ------
    CheckpointError
        If the folder or the file cannot be written; `path` is then as it was.
    """
    header = replace(header, created=header.created or Header.now())
    with contextlib.ExitStack() as stack:
        with explaining(path):
            file = stack.enter_context(hdf5.create_atomically(path))
            digests = stack.enter_context(Digests())
            writer = CheckpointWriter(file, header, path, digests)
        yield writer
        writer.finish()
        with explaining(path):
            stack.close()


def _set_modes(dataset: Any, synchronization: str, aggregation: str, trainable: bool) -> None:
    write_attribute(dataset, "synchronization", synchronization)
    write_attribute(dataset, "aggregation", aggregation)
    write_attribute(dataset, "trainable", trainable)


@contextlib.contextmanager
def explaining(path: str | os.PathLike[str]) -> Iterator[None]:
    """Turn what the system and h5py raise into an error with the remedy. Local.

    Raises
    ------
    CheckpointError
        In the place of these.
    """
    try:
        yield
    except (OSError, RuntimeError) as reason:  # h5py raises either where the system refuses
        words = hdf5.words_of(reason)
        raise CheckpointError(
            f"The checkpoint {os.fspath(path)} cannot be written: {words}. Check the folder, "
            "its permissions and the free space; what was there before is unchanged."
        ) from reason
