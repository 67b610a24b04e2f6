"""Read a checkpoint file, and trust nothing in it before it has been checked."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.checkpoint.format import (
    FORMAT,
    FORMAT_VERSION,
    STATE,
    VARIABLES,
    Header,
    VariableInfo,
    digest_of_array,
    digest_of_text,
)
from mpistrat.checkpoint.heaps import check_heaps
from mpistrat.checkpoint.json_text import load_json
from mpistrat.checkpoint.links import check_root, find_datasets
from mpistrat.errors import CheckpointCorruptError, CheckpointError

__all__ = ["CheckpointReader", "open_checkpoint"]

_HIGHEST_COMPRESSION = 1100
"""Deflate reaches 1032 (RFC 1951); what claims more is a bomb or damaged."""


class CheckpointReader:
    """An open checkpoint file.

    Attributes
    ----------
    path : Path
    header : Header
    variables : dict of str to VariableInfo
        By object path, sorted.
    state_paths : list of str
        Paths of the objects with JSON state, sorted.
    """

    def __init__(self, file: Any, path: Path) -> None:
        self.path = path
        with _naming_damage(path, "its texts"):
            check_heaps(file, path)
        self.header = _read_header(file, path)
        with _naming_damage(path, "the tree"):
            check_root(file, {VARIABLES, STATE})
            self._variables = find_datasets(file, VARIABLES)
            self._state = find_datasets(file, STATE)
        size_bytes = path.stat().st_size
        self.variables = {}
        for name, dataset in self._variables.items():
            with _naming_damage(path, name):
                self.variables[name] = _read_info(dataset, size_bytes)
        self.state_paths = list(self._state)
        for name, dataset in self._state.items():
            with _naming_damage(path, name):
                self._check_state(name, dataset, size_bytes)

    def _check_state(self, name: str, dataset: Any, size_bytes: int) -> None:
        """Check that a state has its arrays, all of them and no others."""
        if dataset.dtype.itemsize > _HIGHEST_COMPRESSION * size_bytes:
            raise ValueError("the text is longer than the file can hold")
        arrays = dataset.attrs.get("arrays")
        if arrays is None:  # a file that another program has made
            return
        expected = {f"{name}/{each}" for each in arrays}
        found = {each for each in self.variables if each.startswith(f"{name}/")}
        if expected != found:
            lines = [f"the array {each} is missing" for each in sorted(expected - found)]
            lines += [f"the array {each} is too many" for each in sorted(found - expected)]
            raise ValueError("; ".join(lines))

    def read_variable(self, name: str) -> np.ndarray:
        """Return the values of a variable, in native byte order. Local.

        Raises
        ------
        CheckpointCorruptError
            If they do not have the digest that the file gives.
        """
        info = self.variables[name]
        with _naming_damage(self.path, name):
            array = np.asarray(self._variables[name][()])
            if digest_of_array(array) != info.digest:
                raise ValueError("the values do not have the digest that was stored with them")
        return array.astype(info.dtype, copy=False)

    def read_state(self, name: str) -> Any:
        """Return the JSON state of an object. Local.

        Raises
        ------
        CheckpointCorruptError
            If the text does not have the digest that the file gives.
        """
        with _naming_damage(self.path, name):
            dataset = self._state[name]
            text = dataset[()] if dataset.shape == () else None
            if not isinstance(text, bytes):
                raise ValueError("a UTF-8 text was expected here")
            if digest_of_text(text) != dataset.attrs["digest"]:
                raise ValueError("the text does not have the digest that was stored with it")
            return load_json(text)

    def read_each(self) -> Iterator[tuple[str, str, Any]]:
        """Yield the group, the path and the value of everything in the file. Local.

        Raises
        ------
        CheckpointCorruptError
            At the end, if anything is damaged; the message names all of it.
        """
        damage = []
        for group, names, read in (
            (VARIABLES, self.variables, self.read_variable),
            (STATE, self.state_paths, self.read_state),
        ):
            for name in names:
                try:
                    value = read(name)
                except CheckpointCorruptError as error:
                    damage.append(str(error))
                else:
                    yield group, name, value
        if damage:
            raise CheckpointCorruptError("\n".join(damage))

    def verify(self) -> None:
        """Read everything and forget it; raise as `read_each` does. Local."""
        for _ in self.read_each():
            pass


@contextlib.contextmanager
def open_checkpoint(path: str | os.PathLike[str]) -> Iterator[CheckpointReader]:
    """Open a checkpoint file for reading. Local.

    Raises
    ------
    CheckpointError
        If there is no file, it cannot be opened, or it has another or a newer format.
    CheckpointCorruptError
        If it is damaged.
    """
    path = Path(path)
    readable = os.path.isfile(path) and os.access(path, os.R_OK)
    error = CheckpointCorruptError if readable else CheckpointError
    with hdf5.open_for_reading(path, error) as file:
        yield CheckpointReader(file, path)


def _read_header(file: Any, path: Path) -> Header:
    with _naming_damage(path, "the attributes of the root group"):
        given = {name: _plain(value) for name, value in file.attrs.items()}
    if given.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} is an HDF5 file but no checkpoint of mpistrat: its attribute 'format' is "
            f"{given.get('format')!r}, expected {FORMAT!r}."
        )
    version = given.get("format_version")
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint {path} has format version {version!r}, but this mpistrat reads "
            f"version {FORMAT_VERSION}. Install the mpistrat that wrote it "
            f"({given.get('mpistrat_version')!r}), or a newer one."
        )
    known = Header.__dataclass_fields__
    missing = [name for name in known if type(given.get(name)) is not type(getattr(Header, name))]
    if missing:
        raise CheckpointCorruptError(
            f"The checkpoint {path} is damaged: the root group lacks good attributes "
            f"{', '.join(missing)}."
        )
    header = Header(**{name: given[name] for name in known})
    with _naming_damage(path, "the attributes of the root group"):
        header.check()
        # Files that other programs make need not have it; damage does not take it away.
        if given.get("digest", header.digest) != header.digest:
            raise ValueError("they do not have the digest that was stored with them")
    return header


def _read_info(dataset: Any, file_size_bytes: int) -> VariableInfo:
    attributes = {name: _plain(value) for name, value in dataset.attrs.items()}
    trainable = attributes.get("trainable")
    if not isinstance(trainable, bool):
        raise ValueError(f"the attribute trainable is {trainable!r}")
    info = VariableInfo(
        shape=dataset.shape,
        dtype=dataset.dtype.newbyteorder("="),
        synchronization=str(attributes.get("synchronization")),
        aggregation=str(attributes.get("aggregation")),
        trainable=trainable,
        digest=str(attributes.get("digest")),
    )
    if dataset.is_virtual or dataset.external:
        raise ValueError("its values lie in other files")
    if info.size_bytes > _HIGHEST_COMPRESSION * file_size_bytes:
        raise ValueError(f"the shape {info.shape} is larger than the file can hold")
    return info


def _plain(value: Any) -> Any:
    """Return NumPy scalars as Python's own; None for what no attribute of ours is."""
    if isinstance(value, np.generic):
        value = value.item()
    return value if isinstance(value, bool | int | str) else None


@contextlib.contextmanager
def _naming_damage(path: Path, where: str) -> Iterator[None]:
    """Turn whatever h5py, NumPy and json raise over bad bytes into one error with the place."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, MemoryError) as reason:
        text = " ".join(str(reason).split()) or type(reason).__name__
        raise CheckpointCorruptError(
            f"The checkpoint {path} is damaged at {where}: {text}."
        ) from reason
