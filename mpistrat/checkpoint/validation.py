"""Validation of untrusted files: links, layouts, and compression bombs.

The size of a file limits what its checkpoint may declare: a small file cannot make a reader fill
the memory, neither with a shape nor with compressed zeros.
"""

from __future__ import annotations

import contextlib
import math
import zlib
from dataclasses import dataclass, field
from typing import Any

from mpistrat.checkpoint.format import DEEPEST, is_path_part
from mpistrat.hdf5 import h5py
from mpistrat.system.text import readable_size


@dataclass
class Contents:
    """The contents of the groups of a file."""

    datasets: dict[str, Any] = field(default_factory=dict)
    """The low-level datasets by their full path."""
    groups: set[str] = field(default_factory=set)
    """The full paths of the groups, without the root group."""
    problems: list[str] = field(default_factory=list)
    """Objects that no checkpoint has: links, second names, other kinds of objects."""

    def check(self, roots: set[str], optional: set[str]) -> None:
        """Raise unless all datasets are below the groups `roots`, which exist, or `optional`."""
        if self.problems:
            raise ValueError("; ".join(self.problems))
        tops = {path.partition("/")[0] for path in (*self.groups, *self.datasets)}
        others = tops - roots - optional
        if others:
            raise ValueError(f"{', '.join(sorted(others))} does not belong in a checkpoint")
        for root in sorted(roots):
            if root not in self.groups:
                raise KeyError(f"there is no group {root}")

    def below(self, root: str) -> dict[str, Any]:
        """Return the datasets below the group `root` by their path there, sorted."""
        inside = f"{root}/"
        found = {p: each for p, each in self.datasets.items() if p.startswith(inside)}
        return {path.removeprefix(inside): found[path] for path in sorted(found)}


def survey(file: Any) -> Contents:
    """Return the contents of the groups of the open `file`, without following links. Local.

    It reads only the groups themselves.
    """
    contents = Contents()
    h5 = h5py()
    # Hard links can make a group its own descendant, and give a large array thousands of names. So
    # each object is visited once, and the root counts as visited.
    addresses = {h5.h5o.get_info(file.id).addr}
    stack = [("", file.id, 1)]
    while stack:
        above, group, depth = stack.pop()
        for link in list(group):
            name = link.decode(errors="surrogateescape")
            path = above + name
            # Before anything is opened: opening an external link would open a different file.
            found = group.links.get_info(link)
            problem = _problem_of_link(found, name, depth)
            if problem:
                contents.problems.append(f"{path} {problem}")
                continue
            if found.u in addresses:
                contents.problems.append(f"{path} is a second name of something else")
                continue
            addresses.add(found.u)
            node = h5.h5o.open(group, link)
            if isinstance(node, h5.h5g.GroupID):
                contents.groups.add(path)
                stack.append((f"{path}/", node, depth + 1))
            elif isinstance(node, h5.h5d.DatasetID):
                contents.datasets[path] = node
            else:
                contents.problems.append(f"{path} is neither a group nor a dataset")
    return contents


def _problem_of_link(found: Any, name: str, depth: int) -> str:
    if not is_path_part(name):
        return "has a name that no object can have"
    if found.type != h5py().h5l.TYPE_HARD:
        return "is a link, and links are never followed"
    return f"is nested in more than {DEEPEST} groups" if depth > DEEPEST else ""


_HARMLESS_BYTES = 2**28
"""Any machine can hold this much, however small the file is."""
_HIGHEST_COMPRESSION = 100
"""With a higher ratio, numbers are not a compressed model but a bomb. Deflate reaches 1032."""
_PIECE_BYTES = 2**20
_REPACK = "h5repack -f NONE -l CONTI IN OUT"


def check_layout(dataset: Any, item_bytes: int, file_bytes: int) -> int:
    """Return the most bytes of memory that reading a low-level `dataset` needs.

    Raises for values that are stored in other files, or behind filters whose output has no bound.
    """
    space = dataset.get_space()
    if space.get_simple_extent_type() == h5py().h5s.NULL:
        raise ValueError("it has no values")
    shape = space.get_simple_extent_dims()
    properties = dataset.get_create_plist()
    layout = properties.get_layout()
    if layout == h5py().h5d.VIRTUAL or properties.get_external_count():
        raise ValueError("its values are stored in other files, which are never opened")
    of_chunk = properties.get_chunk() if layout == h5py().h5d.CHUNKED else ()
    if of_chunk:
        chunks = [-(-length // part) for length, part in zip(shape, of_chunk, strict=True)]
        # A chunk in the file takes at least a byte. With a false number, the lists of chunks would
        # fill the memory.
        if math.prod(chunks) > file_bytes:
            raise ValueError(f"it has {math.prod(chunks)} chunks, more than the file has bytes")
    _check_filters(_filters(properties))
    # HDF5 decodes a whole chunk, even if the array is smaller.
    unpacked: int = max(math.prod(shape), math.prod(of_chunk)) * item_bytes
    return unpacked


def _check_filters(filters: list[tuple[int, str]]) -> None:
    h5z = h5py().h5z
    known = [h5z.FILTER_SHUFFLE, h5z.FILTER_DEFLATE, h5z.FILTER_FLETCHER32]
    numbers = [number for number, _ in filters]
    if numbers != sorted(set(numbers) & set(known), key=known.index):
        raise ValueError(
            f"its values went through the filters {', '.join(name for _, name in filters)}, but "
            "in a file of unknown origin mpistrat decodes only shuffle, deflate and fletcher32, in "
            f"this order. If you trust the file, rewrite it: {_REPACK}"
        )


def _filters(properties: Any) -> list[tuple[int, str]]:
    """Return number and name of each filter, in the order in which writing applies them."""
    found = [properties.get_filter(i) for i in range(properties.get_nfilters())]
    return [(each[0], each[3].decode(errors="replace") or str(each[0])) for each in found]


def check_expansion(unpacked: int, file_bytes: int) -> None:
    """Raise for a file whose values are out of all proportion to its size."""
    if unpacked > max(_HARMLESS_BYTES, _HIGHEST_COMPRESSION * file_bytes):
        raise ValueError(
            f"its values take {readable_size(unpacked)}, which is larger than the file of "
            f"{readable_size(file_bytes)} can hold, unless they are compressed more than "
            f"{_HIGHEST_COMPRESSION} times. Where you trust it, rewrite it: {_REPACK}"
        )


def check_streams(dataset: Any) -> None:
    """Raise for compressed chunks that are longer than declared: HDF5 would unpack all of them."""
    if dataset.chunks is None:  # not chunked, so without filters
        return
    filters = [number for number, _ in _filters(dataset.id.get_create_plist())]
    if h5py().h5z.FILTER_DEFLATE not in filters:
        return
    bit = 1 << filters.index(h5py().h5z.FILTER_DEFLATE)
    chunk_bytes = math.prod(dataset.chunks) * dataset.dtype.itemsize
    for chunk in _stored_chunks(dataset):
        mask, stream = dataset.id.read_direct_chunk(chunk.chunk_offset)
        if not mask & bit and _is_longer(stream, chunk_bytes):
            raise ValueError(
                f"the chunk at {chunk.chunk_offset} unpacks to more than its {chunk_bytes} bytes"
            )


def _stored_chunks(dataset: Any) -> list[Any]:
    """Return h5py's description of each chunk that is in the file: its offset and size."""
    if hasattr(dataset.id, "chunk_iter"):  # HDF5 1.10.10, 1.12.3 and later
        found: list[Any] = []
        dataset.id.chunk_iter(found.append)
        return found
    return [dataset.id.get_chunk_info(i) for i in range(dataset.id.get_num_chunks())]


def _is_longer(stream: bytes, size_bytes: int) -> bool:
    """Return whether a deflate stream has more than `size_bytes`, in little memory."""
    inflater = zlib.decompressobj()
    with contextlib.suppress(zlib.error):  # HDF5 will fail at the same byte
        while stream and not inflater.eof:
            size_bytes -= len(inflater.decompress(stream, _PIECE_BYTES))
            if size_bytes < 0:
                return True
            stream = inflater.unconsumed_tail
    return False
