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
from mpistrat.checkpoint.format import (
    STATE,
    VARIABLES,
    Header,
    digest_of_array,
    digest_of_text,
)
from mpistrat.checkpoint.json_text import dump_json
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
    """

    def __init__(self, file: Any, header: Header, path: str | os.PathLike[str]) -> None:
        self._path = path
        for name, value in asdict(header).items():
            file.attrs[name] = value
        file.attrs["digest"] = header.digest
        self._variables = file.create_group(VARIABLES)
        self._state = file.create_group(STATE)

    def add_variable(
        self,
        path: str,
        array: np.ndarray,
        *,
        synchronization: str = "NONE",
        aggregation: str = "NONE",
        trainable: bool = False,
    ) -> None:
        """Add the values of one variable, or an array of an object's state. Local."""
        with _explaining(self._path):
            dataset = self._variables.create_dataset(path, data=array)
            dataset.attrs["synchronization"] = synchronization
            dataset.attrs["aggregation"] = aggregation
            dataset.attrs["trainable"] = trainable
            dataset.attrs["digest"] = digest_of_array(array)

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
            writer = CheckpointWriter(file, header, path)
        yield writer
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
