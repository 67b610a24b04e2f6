"""Reader of checkpoint files, which relies on nothing that it has not checked."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat.checkpoint.digests import (
    DIGEST_BYTES,
    PAGE_BYTES,
    ArrayDigest,
    PagedHash,
    check_digest,
    differing_pages,
    digest_of_array,
    digest_of_pages,
    digest_of_text,
    is_paged,
)
from mpistrat.checkpoint.format import (
    DIGESTS,
    FORMAT,
    FORMAT_VERSION,
    REPLICAS,
    STATE,
    VARIABLES,
    Header,
    VariableInfo,
)
from mpistrat.checkpoint.marks import load_json
from mpistrat.checkpoint.nodes import (
    TypesInFile,
    read_attribute,
    read_flag,
    read_names,
    read_short_text,
)
from mpistrat.checkpoint.raw_io import Extent, read_at, read_through
from mpistrat.checkpoint.validation import (
    check_expansion,
    check_layout,
    check_streams,
    survey,
)
from mpistrat.errors import CheckpointCorruptError, CheckpointError
from mpistrat.hdf5 import h5py, has_offsets, offset_of_block, open_for_reading


class CheckpointReader:
    """An open checkpoint file.

    Attributes
    ----------
    path : Path
        The file.
    header : Header
        The attributes of the root group.
    variables : dict of str to VariableInfo
        Descriptions of the variables by object path, sorted.
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
            # After the header: a file of a different program gets the error that it is not a
            # checkpoint, not an error about its groups.
            contents.check({VARIABLES, STATE}, {DIGESTS, REPLICAS})
        self._nodes = contents.below(VARIABLES)
        self._state = contents.below(STATE)
        self._digests = contents.below(DIGESTS)
        self._replicas = contents.below(REPLICAS)
        self.replicas: dict[str, tuple[tuple[int, ...], np.dtype]] = {}
        """Shape and dtype of the components of each SyncOnRead variable that has them."""
        self._offsets: dict[str, int] = {}
        self.variables: dict[str, VariableInfo] = {}
        self._read_tree(has_offsets(file.id))
        self.state_paths = list(self._state)
        for name, node in self._state.items():
            with naming_damage(path, name):
                self._check_state(name, node)
        self._check_digests()

    def _read_tree(self, is_plain_file: bool) -> None:
        """Read the descriptions of the variables, once no value can fill the memory any more."""
        file_bytes = self.path.stat().st_size
        unpacked = 0
        types = TypesInFile()
        found: list[tuple[tuple[int, ...], np.dtype]] = []
        for name, node in (*self._nodes.items(), *self._state.items(), *self._replicas.items()):
            with naming_damage(self.path, name):
                dtype, is_as_in_memory = types.of(node)
                shape = node.shape
                found.append((shape, dtype))
                num_bytes, offset = math.prod(shape or (1,)) * dtype.itemsize, None
                if is_plain_file and is_as_in_memory:
                    offset = offset_of_block(node, num_bytes)
                if offset is None:
                    num_bytes = check_layout(node, dtype.itemsize, file_bytes)
                # Compared by identity, because the components of a variable have the same path in a
                # different group.
                elif self._nodes.get(name) is node:  # the file stores its bytes as memory does
                    self._offsets[name] = offset
                unpacked += num_bytes
                check_expansion(unpacked, file_bytes)
        begin = len(found) - len(self._replicas)
        self.replicas = dict(zip(self._replicas, found[begin:], strict=True))
        # Not strict: after the variables, `found` also has the states and the components.
        for (name, node), (shape, dtype) in zip(self._nodes.items(), found, strict=False):
            with naming_damage(self.path, name):
                self.variables[name] = _read_info(node, shape, dtype)

    def _check_state(self, name: str, node: Any) -> None:
        """Check that the file has exactly the arrays that a state names."""
        arrays = read_names(node, "arrays")
        if arrays is None:  # a file from a different program
            return
        expected = {f"{name}/{each}" for each in arrays}
        found = {each for each in self.variables if each.startswith(f"{name}/")}
        if expected != found:
            lines = [f"the array {each} is missing" for each in sorted(expected - found)]
            lines += [f"the array {each} is too many" for each in sorted(found - expected)]
            raise ValueError("; ".join(lines))

    def _check_digests(self) -> None:
        """Check that page digests exist for all large variables, and for no others."""
        expected = {name for name, info in self.variables.items() if is_paged(info.digest)}
        for name in sorted(expected ^ self._digests.keys()):
            with naming_damage(self.path, name):
                missing = name in expected
                raise ValueError(
                    f"the digests of its pages are {'missing' if missing else 'extra'}"
                )

    def read_variable(self, name: str) -> np.ndarray:
        """Return the values of a variable, in native byte order."""
        info = self.variables[name]
        with naming_damage(self.path, name):
            values = np.empty(info.shape, info.dtype)
            extent = self.extent_of(name)
            if extent is not None:
                read_at(self.handle, extent.offset, values)
                self._check_values(name, digest_of_array(values))
                return values
        flat, begin = values.reshape(-1), 0
        for piece in self.read_pieces(name):
            flat[begin : begin + piece.size] = piece
            begin += piece.size
        return values

    def extent_of(self, name: str) -> Extent | None:
        """Return the bytes of the file that hold the values of a variable. Local.

        ``None`` if the file does not store them as one block, as memory does.
        """
        info = self.variables[name]
        # An empty variable has no bytes to read, so every offset is right. None would send its
        # reader to HDF5.
        offset = self._offsets.get(name) if info.size_bytes else 0
        if offset is None:
            return None
        return Extent(offset, info.size_bytes, info.dtype.itemsize, info.digest)

    def extents(self, least_bytes: int = 0) -> dict[str, Extent]:
        """Return by name the result of `extent_of`, for variables of at least this size. Local."""
        found = {}
        for name, info in self.variables.items():
            if info.size_bytes >= least_bytes and (extent := self.extent_of(name)) is not None:
                found[name] = extent
        return found

    def _dataset(self, name: str) -> Any:
        return h5py().Dataset(self._nodes[name])

    def read_pieces(self, name: str) -> Iterator[np.ndarray]:
        """Yield the values of a variable in C order, flat, in native byte order. Local.

        The memory that this needs does not depend on the size of the variable.
        """
        info, dataset = self.variables[name], self._dataset(name)
        hasher = PagedHash()
        with naming_damage(self.path, name):
            check_streams(dataset)
        for selection in _selections(info.shape, info.dtype.itemsize, dataset.chunks):
            with naming_damage(self.path, name):
                piece = np.asarray(dataset[selection], dataset.dtype).reshape(-1)
                hasher.update(piece)
            yield piece.astype(info.dtype, copy=False)
        with naming_damage(self.path, name):
            self._check_values(name, hasher.result())

    def _check_values(self, name: str, found: ArrayDigest) -> None:
        """Raise ValueError if values do not have the digest of the file; it names damaged pages."""
        stored = self.variables[name].digest
        if found.text != stored and found.pages and is_paged(stored):
            pages = differing_pages(found, self._page_digests(name))
            raise ValueError(
                f"{pages} of {len(found.page_digests())} pages of {PAGE_BYTES} bytes, numbered "
                "from 0, do not have the digests that were stored with them"
            )
        check_digest(found.text, stored)

    def read_part(self, name: str, offsets: Sequence[int], into: np.ndarray) -> None:
        """Fill `into` with the part of a variable that begins at `offsets`, unverified. Local."""
        dataset = self._dataset(name)
        with naming_damage(self.path, name):
            sizes = zip(offsets, into.shape, strict=True)
            into[...] = dataset[tuple(slice(begin, begin + size) for begin, size in sizes)]

    def read_replicas(self, name: str) -> np.ndarray:
        """Return the components of a SyncOnRead variable, of shape ``(num_replicas, *shape)``."""
        with naming_damage(self.path, f"{REPLICAS}/{name}"):
            node = self._replicas[name]
            dataset = h5py().Dataset(node)
            check_streams(dataset)
            stored = read_short_text(node, "digest")
            values = np.asarray(dataset[()])
            check_digest(digest_of_array(values).text, stored)
            info = self.variables.get(name)
            expected = None if info is None else (self.header.num_replicas, *info.shape)
            if values.shape != expected:
                raise ValueError(f"the components have the shape {values.shape}, not {expected}")
            return values.astype(values.dtype.newbyteorder("="), copy=False)

    def read_state(self, name: str) -> Any:
        """Return the JSON part of the state of an object."""
        with naming_damage(self.path, name):
            node = self._state[name]
            dataset = h5py().Dataset(node)
            text = dataset[()] if dataset.shape == () and dataset.dtype.kind in "OS" else None
            if not isinstance(text, bytes):
                raise ValueError("a UTF-8 text was expected here")
            if digest_of_text(text) != read_attribute(node, "digest"):
                raise ValueError("the text does not have the digest that was stored with it")
            return load_json(text)

    def verify(self) -> None:
        """Read everything in pieces, and raise one error that names everything that is damaged."""
        damage = []
        for names, read in (
            (self.variables, self._read_through),
            (self._digests, self._verify_pages),
            (self.replicas, self.read_replicas),
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
        extent = self.extent_of(name)
        if extent is None:
            for _ in self.read_pieces(name):
                pass
            return
        with naming_damage(self.path, name):
            found = read_through(self.handle, extent)
            self._check_values(name, ArrayDigest(found.digest, found.pages))

    def _verify_pages(self, name: str) -> None:
        """Check the digests of the pages of a variable against the digest of all of them."""
        with naming_damage(self.path, name):
            self._page_digests(name)

    def _page_digests(self, name: str) -> np.ndarray:
        """Return the digests of the pages of a variable, or raise ValueError."""
        dataset = h5py().Dataset(self._digests[name])
        num_pages = -(-self.variables[name].size_bytes // PAGE_BYTES)
        if dataset.shape != (num_pages, DIGEST_BYTES) or dataset.dtype != np.uint8:
            raise ValueError(
                f"the digests of its pages should be uint8 of shape {(num_pages, DIGEST_BYTES)}"
                f", but are {dataset.dtype} of shape {dataset.shape}"
            )
        check_layout(dataset.id, 1, self.path.stat().st_size)
        check_streams(dataset)
        digests: np.ndarray = dataset[()]
        # The digest of a paged variable is the digest of its page digests, so it also verifies this
        # table.
        if digest_of_pages(digests.tobytes()) != self.variables[name].digest:
            raise ValueError("the digests of its pages are damaged")
        return digests


_BYTES = 2**22
"""Bytes per piece: small enough to stay in the cache of a core until it is hashed."""
_BYTES_OF_CHUNKS = 2**26
"""Bytes per piece if chunks are larger."""


def _selections(
    shape: tuple[int, ...], item_bytes: int, chunks: Sequence[int] | None = None
) -> Iterator[tuple[int | slice, ...]]:
    """Yield selections that cover an array of `shape`, each contiguous in C order.

    They end at ends of `chunks`, as far as memory allows: reading part of a chunk costs as much as
    reading all of it.
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


@contextlib.contextmanager
def open_checkpoint(path: str | os.PathLike[str]) -> Iterator[CheckpointReader]:
    """Open a checkpoint file for reading."""
    path = Path(path)
    # Only a file that exists and may be read can be damaged. Otherwise the path or its permissions
    # are wrong.
    readable = os.path.isfile(path) and os.access(path, os.R_OK)
    error = CheckpointCorruptError if readable else CheckpointError
    with open_for_reading(path, error) as file:
        yield CheckpointReader(file, path)


def _read_header(file: Any, path: Path) -> Header:
    known = Header.__dataclass_fields__
    with naming_damage(path, "the attributes of the root group"):
        given: dict[str, Any] = {name: read_attribute(file.id, name) for name in (*known, "digest")}
    if given["format"] != FORMAT:
        # The other attributes have mpistrat's names, so this one was damaged. A different program's
        # file has none of them.
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
    if version != FORMAT_VERSION:
        raise CheckpointError(
            f"The checkpoint {path} has format version {version!r}, but this mpistrat reads "
            f"only version {FORMAT_VERSION}. Install the mpistrat that wrote the file "
            f"({given['mpistrat_version']!r})."
        )
    given["arithmetic"] = given["arithmetic"] or ""
    missing = [name for name in known if type(given[name]) is not type(getattr(Header, name))]
    if missing:
        raise CheckpointCorruptError(
            f"The checkpoint {path} is damaged: the root group lacks good attributes "
            f"{', '.join(missing)}."
        )
    header = Header(**{name: given[name] for name in known})
    with naming_damage(path, "the attributes of the root group"):
        header.check()
        # Files from other programs need not have a digest; damage does not remove it.
        if given["digest"] not in (None, header.digest()):
            raise ValueError("they do not have the digest that was stored with them")
    return header


def _read_info(dataset: Any, shape: tuple[int, ...], dtype: np.dtype) -> VariableInfo:
    trainable = read_flag(dataset, "trainable")
    if not isinstance(trainable, bool):
        raise ValueError(f"the attribute trainable is {trainable!r}")
    # Asking for an attribute that is missing is the slowest of these calls.
    has_dtype = h5py().h5a.get_num_attrs(dataset) != _NUM_ATTRIBUTES
    return VariableInfo(
        shape=shape,
        dtype=dtype.newbyteorder("="),
        synchronization=read_short_text(dataset, "synchronization"),
        aggregation=read_short_text(dataset, "aggregation"),
        trainable=trainable,
        digest=read_short_text(dataset, "digest"),
        tensor_dtype=str(read_attribute(dataset, "dtype") or "") if has_dtype else "",
    )


_NUM_ATTRIBUTES = 4
"""Number of attributes of a variable whose dtype HDF5 has."""


@contextlib.contextmanager
def naming_damage(path: str | os.PathLike[str], where: str) -> Iterator[None]:
    """Turn errors of h5py, NumPy and json about bad bytes into a `CheckpointCorruptError`."""
    try:
        yield
    # MemoryError too: damaged bytes can claim any shape.
    except (OSError, RuntimeError, ValueError, TypeError, LookupError, MemoryError) as reason:
        text = " ".join(str(reason).split()) or type(reason).__name__
        raise CheckpointCorruptError(
            f"The checkpoint {path} is damaged at {where}: {text}."
        ) from reason
