"""Write a checkpoint file: header, variables and state, one at a time."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.arrays import Array, host_view, is_on_host
from mpistrat.checkpoint.contiguous import create_unwritten, offset_of, write_at
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

__all__ = ["CheckpointWriter", "create_checkpoint"]


class CheckpointWriter:
    """The content of a checkpoint file that is being written.

    Parameters
    ----------
    file : h5py.File
    header : Header
    path : path
        The final name, for messages.
    digests : Digests
    """

    def __init__(
        self, file: Any, header: Header, path: str | os.PathLike[str], digests: Digests
    ) -> None:
        self._path = path
        for name, value in asdict(header).items():
            file.attrs[name] = value
        file.attrs["digest"] = header.digest
        self._file = file
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
        with _explaining(self._path):
            if array.nbytes < BYTES_WORTH_A_THREAD:
                host = host_view(array)
                dataset = self._variables.create_dataset(path, data=host)
                dataset.attrs["digest"] = digest_of_array(host)
            else:
                dataset = self._write_large(path, array, lives_on)
            dataset.attrs["synchronization"] = synchronization
            dataset.attrs["aggregation"] = aggregation
            dataset.attrs["trainable"] = trainable

    def _write_large(self, path: str, array: Array, lives_on: bool) -> Any:
        dataset = create_unwritten(self._variables, path, array)
        offset = offset_of(dataset, array.nbytes)
        if offset is None:
            raise RuntimeError(f"HDF5 has no place for the {array.nbytes} bytes of {path}")
        digester = self._digests.begin(after=_Output(self._file, offset))
        for piece in pieces_on_host(array):
            digester.update(piece, is_view=is_on_host(array))
        if lives_on:
            self._unfinished.append((dataset, digester))
        else:
            dataset.attrs["digest"] = digester.result()
        return dataset

    def add_state(self, path: str, value: Any, arrays: Sequence[str] = ()) -> None:
        """Add the JSON `value` of one object, and the names of its arrays below `path`. Local."""
        text = dump_json(value).encode()
        # Texts of variable length would lie in a heap that has no checksum.
        dtype = hdf5.h5py().string_dtype("utf-8", len(text))
        with _explaining(self._path):
            dataset = self._state.create_dataset(path, data=text, dtype=dtype)
            dataset.attrs["digest"] = digest_of_text(text)
            names = np.array(arrays, dtype=object)
            dataset.attrs.create("arrays", names, dtype=hdf5.h5py().string_dtype())

    def finish(self) -> None:
        """Write the digests that were not complete before. Local."""
        with _explaining(self._path):
            for dataset, digester in self._unfinished:
                dataset.attrs["digest"] = digester.result()
            self._unfinished.clear()


class _Output:
    """Writes one part after the other, from a place in the file on."""

    def __init__(self, file: Any, offset: int) -> None:
        self._file = file
        self._offset = offset

    def __call__(self, part: np.ndarray) -> None:
        write_at(self._file, self._offset, part)
        self._offset += part.nbytes


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
        with _explaining(path):
            file = stack.enter_context(hdf5.create_atomically(path))
            digests = stack.enter_context(Digests())
            writer = CheckpointWriter(file, header, path, digests)
        yield writer
        writer.finish()
        with _explaining(path):
            stack.close()


@contextlib.contextmanager
def _explaining(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except (OSError, RuntimeError) as reason:  # h5py raises either where the system refuses
        raise CheckpointError(
            f"The checkpoint {os.fspath(path)} cannot be written: {_explain(reason)}. Check the "
            "folder, its permissions and the free space; what was there before is unchanged."
        ) from reason


def _explain(reason: Exception) -> str:
    """Return the system's own words from an error of the system or of HDF5."""
    if isinstance(reason, OSError) and reason.strerror and "errno" not in reason.strerror:
        return f"{reason.strerror} ({reason.filename})" if reason.filename else reason.strerror
    found = re.search(r"error message = '([^']+)'", str(reason))
    return found[1] if found else str(reason)
