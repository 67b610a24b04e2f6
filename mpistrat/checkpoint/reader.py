"""Reader of checkpoint files, which trusts nothing that it has not checked."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat import hdf5
from mpistrat.checkpoint.format import (
    FORMAT,
    FORMAT_VERSION,
    PLAIN_VERSION,
    STATE,
    VARIABLES,
    Header,
    VariableInfo,
    digest_of_array,
    digest_of_text,
    format_digest,
)
from mpistrat.checkpoint.raw_io import read_at, selections
from mpistrat.checkpoint.state_json import load_json
from mpistrat.checkpoint.validation import (
    check_expansion,
    check_layout,
    check_streams,
    read_attribute,
    read_names,
    survey,
)
from mpistrat.errors import CheckpointCorruptError, CheckpointError

__all__ = ["CheckpointReader", "check_digest", "naming_damage", "open_checkpoint"]


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
    handle : int
        The descriptor of the file.
    """

    def __init__(self, file: Any, path: Path) -> None:
        self.path = path
        self.handle: int = file.id.get_vfd_handle()
        with naming_damage(path, "the tree"):
            contents = survey(file)
        self.header = _read_header(file, path)
        with naming_damage(path, "the tree"):
            contents.check({VARIABLES, STATE})
        self._variables = contents.below(VARIABLES)
        self._state = contents.below(STATE)
        self._check_storage()
        self.variables = {}
        for name, dataset in self._variables.items():
            with naming_damage(path, name):
                self.variables[name] = _read_info(dataset)
        self.state_paths = list(self._state)
        for name, dataset in self._state.items():
            with naming_damage(path, name):
                self._check_state(name, dataset)

    def _check_storage(self) -> None:
        """Refuse what could fill the memory, before any value is read."""
        file_bytes = self.path.stat().st_size
        unpacked = 0
        for name, dataset in (*self._variables.items(), *self._state.items()):
            with naming_damage(self.path, name):
                unpacked += check_layout(dataset, file_bytes)
                check_expansion(unpacked, file_bytes)

    def _check_state(self, name: str, dataset: Any) -> None:
        """Check that a state has its arrays, all of them and no others."""
        arrays = read_names(dataset, "arrays")
        if arrays is None:  # a file that another program has made
            return
        expected = {f"{name}/{each}" for each in arrays}
        found = {each for each in self.variables if each.startswith(f"{name}/")}
        if expected != found:
            lines = [f"the array {each} is missing" for each in sorted(expected - found)]
            lines += [f"the array {each} is too many" for each in sorted(found - expected)]
            raise ValueError("; ".join(lines))

    def read_variable(self, name: str) -> np.ndarray:
        """Return the values of a variable, in native byte order."""
        info = self.variables[name]
        with naming_damage(self.path, name):
            values = np.empty(info.shape, info.dtype)
            offset = self.offset_of(name)
            if offset is not None:
                read_at(self.handle, offset, values)
                check_digest(digest_of_array(values), info.digest)
                return values
        flat, begin = values.reshape(-1), 0
        for piece in self.read_pieces(name):
            flat[begin : begin + piece.size] = piece
            begin += piece.size
        return values

    def offset_of(self, name: str) -> int | None:
        """Return at which byte of the file the values of a variable begin. Local.

        ``None`` where they do not lie there as one block, as they do in memory.
        """
        info, dataset = self.variables[name], self._variables[name]
        if not info.size_bytes:
            return 0
        return hdf5.contiguous_offset(dataset) if dataset.dtype == info.dtype else None

    def read_pieces(self, name: str) -> Iterator[np.ndarray]:
        """Yield the values of a variable in C order, flat, in native byte order. Local.

        The memory this takes does not depend on the size of the variable.
        """
        info, dataset = self.variables[name], self._variables[name]
        digest = hashlib.sha256()
        with naming_damage(self.path, name):
            check_streams(dataset)
        for selection in selections(info.shape, info.dtype.itemsize, dataset.chunks):
            with naming_damage(self.path, name):
                piece = np.asarray(dataset[selection], dataset.dtype).reshape(-1)
                digest.update(piece.view(np.uint8).data)
            yield piece.astype(info.dtype, copy=False)
        with naming_damage(self.path, name):
            check_digest(format_digest(digest), info.digest)

    def read_part(self, name: str, offsets: Sequence[int], into: np.ndarray) -> None:
        """Fill `into` with the part of a variable that begins at `offsets`, unverified. Local."""
        dataset = self._variables[name]
        with naming_damage(self.path, name):
            sizes = zip(offsets, into.shape, strict=True)
            into[...] = dataset[tuple(slice(begin, begin + size) for begin, size in sizes)]

    def read_state(self, name: str) -> Any:
        """Return the JSON part of the state of an object."""
        with naming_damage(self.path, name):
            dataset = self._state[name]
            text = dataset[()] if dataset.shape == () and dataset.dtype.kind in "OS" else None
            if not isinstance(text, bytes):
                raise ValueError("a UTF-8 text was expected here")
            if digest_of_text(text) != read_attribute(dataset, "digest"):
                raise ValueError("the text does not have the digest that was stored with it")
            return load_json(text, self.header.format_version)

    def verify(self) -> None:
        """Read everything in pieces, and raise an error that names all that is damaged."""
        damage = []
        for names, read in (
            (self.variables, self._read_through),
            (self.state_paths, self.read_state),
        ):
            for name in names:
                try:
                    read(name)
                except CheckpointCorruptError as error:
                    damage.append(str(error))
        if damage:
            raise CheckpointCorruptError("\n".join(damage))

    def _read_through(self, name: str) -> None:
        for _ in self.read_pieces(name):
            pass


@contextlib.contextmanager
def open_checkpoint(path: str | os.PathLike[str]) -> Iterator[CheckpointReader]:
    """Open a checkpoint file for reading."""
    path = Path(path)
    readable = os.path.isfile(path) and os.access(path, os.R_OK)
    error = CheckpointCorruptError if readable else CheckpointError
    with hdf5.open_for_reading(path, error) as file:
        yield CheckpointReader(file, path)


def _read_header(file: Any, path: Path) -> Header:
    known = Header.__dataclass_fields__
    with naming_damage(path, "the attributes of the root group"):
        given: dict[str, Any] = {name: read_attribute(file, name) for name in (*known, "digest")}
    if given["format"] != FORMAT:
        if given["format_version"] is not None and given["mpistrat_version"] is not None:
            raise CheckpointCorruptError(
                f"The checkpoint {path} is damaged: its attribute 'format' is "
                f"{given['format']!r}, expected {FORMAT!r}."
            )
        raise CheckpointError(
            f"{path} is an HDF5 file but no checkpoint of mpistrat: its attribute 'format' is "
            f"{given['format']!r}, expected {FORMAT!r}."
        )
    version = given["format_version"]
    if version not in (PLAIN_VERSION, FORMAT_VERSION):
        raise CheckpointError(
            f"The checkpoint {path} has format version {version!r}, but this mpistrat reads "
            f"versions {PLAIN_VERSION} and {FORMAT_VERSION}. Install the mpistrat that wrote it "
            f"({given['mpistrat_version']!r}), or a newer one."
        )
    missing = [name for name in known if type(given[name]) is not type(getattr(Header, name))]
    if missing:
        raise CheckpointCorruptError(
            f"The checkpoint {path} is damaged: the root group lacks good attributes "
            f"{', '.join(missing)}."
        )
    header = Header(**{name: given[name] for name in known})
    with naming_damage(path, "the attributes of the root group"):
        header.check()
        # Files that other programs make need not have it; damage does not take it away.
        if given["digest"] not in (None, header.digest):
            raise ValueError("they do not have the digest that was stored with them")
    return header


def _read_info(dataset: Any) -> VariableInfo:
    trainable = read_attribute(dataset, "trainable")
    if not isinstance(trainable, bool):
        raise ValueError(f"the attribute trainable is {trainable!r}")
    return VariableInfo(
        shape=dataset.shape,
        dtype=dataset.dtype.newbyteorder("="),
        synchronization=str(read_attribute(dataset, "synchronization")),
        aggregation=str(read_attribute(dataset, "aggregation")),
        trainable=trainable,
        digest=str(read_attribute(dataset, "digest")),
        tensor_dtype=str(read_attribute(dataset, "dtype") or ""),
    )


def check_digest(found: str, stored: str) -> None:
    """Raise ValueError unless values have the digest that the file gives."""
    if found != stored:
        raise ValueError("the values do not have the digest that was stored with them")


@contextlib.contextmanager
def naming_damage(path: str | os.PathLike[str], where: str) -> Iterator[None]:
    """Turn errors of h5py, NumPy and json over bad bytes into a `CheckpointCorruptError`."""
    try:
        yield
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, MemoryError) as reason:
        text = " ".join(str(reason).split()) or type(reason).__name__
        raise CheckpointCorruptError(
            f"The checkpoint {path} is damaged at {where}: {text}."
        ) from reason
