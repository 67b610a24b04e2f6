"""B-tree of chunks (version 1): built from left to right, where full nodes are written only once.

See "III.A.1. Disk Format: Level 1A1 - Version 1 B-trees" in the HDF5 File Format Specification.
"""

from __future__ import annotations

import copy
import struct
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from mpistrat.data.hdf5_writer.superblock import UNDEFINED
from mpistrat.errors import DataError

MAX_CHILDREN = 64
"""Twice HDF5's default K for trees of chunks, 32, which a superblock of version 0 cannot change."""

_ADDRESS = struct.Struct("<Q")

Read = Callable[[int, int], bytes]
"""Takes an address and a number of bytes, and returns these bytes of a file."""


class ChunkEntry(NamedTuple):
    """A chunk in the file."""

    offsets: tuple[int, ...]
    """Index of its first element."""
    num_bytes: int
    """Number of bytes in the file."""
    mask: int
    """Bit i is set if filter i was not applied."""
    address: int


class _Child(NamedTuple):
    key: bytes
    data: bytes
    """The key and the address, as nodes have them."""

    @classmethod
    def at(cls, key: bytes, address: int) -> _Child:
        return cls(key, key + _ADDRESS.pack(address))

    @property
    def address(self) -> int:
        address: int = _ADDRESS.unpack_from(self.data, len(self.key))[0]
        return address


class Node(NamedTuple):
    """A node that is to be written, without an address."""

    level: int
    children: tuple[_Child, ...]
    right_key: bytes


class ChunkTree:
    """The tree of one dataset.

    Chunks that never change again are added with `add`. `edge` returns the nodes on the right edge,
    which also hold chunks that change with the next step.
    """

    def __init__(self, chunk_shape: Sequence[int], item_bytes: int) -> None:
        self._chunk_shape = tuple(chunk_shape)
        self._item_bytes = item_bytes
        # HDF5 counts the bytes of an element as one more axis of each chunk.
        self._key_bytes = 8 + 8 * (len(self._chunk_shape) + 1)
        self.node_bytes = 24 + (MAX_CHILDREN + 1) * self._key_bytes + MAX_CHILDREN * 8
        """Number of bytes that a node takes in the file, however many children it has."""
        self._levels: list[list[_Child]] = [[]]
        self._last: ChunkEntry | None = None
        axes = len(self._chunk_shape) + 1
        self._pack_key = struct.Struct(f"<II{axes}Q").pack

    def copy(self) -> ChunkTree:
        """Return a copy, to which chunks can be added."""
        twin = copy.copy(self)
        twin._levels = [list(level) for level in self._levels]
        return twin

    def max_nodes(self, num_added: int) -> int:
        """Return how many nodes `add` and `edge` may need together for this many chunks."""
        return 2 * (num_added // MAX_CHILDREN) + 2 * len(self._levels) + 4

    def add(self, entry: ChunkEntry, write: Callable[[Node], int]) -> None:
        """Add the next chunk in C order; `write` takes full nodes and returns their addresses."""
        self._last = entry
        self._add(0, _Child.at(self._key(entry), entry.address), write)

    def _add(self, level: int, child: _Child, write: Callable[[Node], int]) -> None:
        if level == len(self._levels):
            self._levels.append([])
        children = self._levels[level]
        children.append(child)
        if len(children) == MAX_CHILDREN:
            address = write(Node(level, tuple(children), self._right_key()))
            self._levels[level] = []
            self._add(level + 1, _Child.at(children[0].key, address), write)

    def edge(self, write: Callable[[Node], int]) -> int:
        """Write the nodes that are not full, and return the address of the root of the tree."""
        carried: _Child | None = None
        right = self._right_key() if self._last is not None else b""
        top = max((n for n, children in enumerate(self._levels) if children), default=-1)
        for level, permanent in enumerate(self._levels[: top + 1]):
            children = permanent if carried is None else [*permanent, carried]
            if level == top and level and len(children) == 1:
                return children[0].address
            if children:
                address = write(Node(level, tuple(children), right))
                carried = _Child.at(children[0].key, address)
        if carried is None:
            return UNDEFINED
        # The top level may have become full by the carried node, never more than full.
        return carried.address

    def _key(self, entry: ChunkEntry) -> bytes:
        return self._pack_key(entry.num_bytes, entry.mask, *entry.offsets, 0)

    def _right_key(self) -> bytes:
        """Return the key at the right end of the tree."""
        assert self._last is not None
        # As HDF5 does: one chunk further in every dimension, of which the last is the element.
        pairs = zip(self._last.offsets, self._chunk_shape, strict=True)
        return self._pack_key(0, 0, *(start + size for start, size in pairs), self._item_bytes)


def encode_node(node: Node, left: int = UNDEFINED, right: int = UNDEFINED) -> bytes:
    """Return the used bytes of a node, with the addresses of its siblings."""
    # HDF5 reads a node in its full length, so the space for missing children must be in the file,
    # too. Nothing is written there, because HDF5 ignores it.
    parts = [b"TREE", struct.pack("<BBHQQ", 1, node.level, len(node.children), left, right)]
    return b"".join([*parts, *[child.data for child in node.children], node.right_key])


def build_linked(
    tree: ChunkTree, entries: Iterable[ChunkEntry], allocate: Callable[[int], int]
) -> tuple[int, list[tuple[int, bytes]]]:
    """Return the root of a whole tree whose nodes know their siblings, and (address, bytes).

    `tree` must be empty. `allocate` takes a number of bytes and returns an address.
    """
    by_level: dict[int, list[tuple[int, Node]]] = {}

    def write(node: Node) -> int:
        address = allocate(tree.node_bytes)
        by_level.setdefault(node.level, []).append((address, node))
        return address

    for entry in entries:
        tree.add(entry, write)
    root = tree.edge(write)
    written = []
    for nodes in by_level.values():
        places = [UNDEFINED, *(address for address, _ in nodes), UNDEFINED]
        for number, (address, node) in enumerate(nodes):
            written.append((address, encode_node(node, places[number], places[number + 2])))
    return root, written


def read_chunks(read: Read, root: int, num_axes: int) -> list[ChunkEntry]:
    """Return the chunks of a tree in its order, or raise DataError if it is damaged."""
    found: list[ChunkEntry] = []
    if root != UNDEFINED:
        _read_node(read, root, num_axes, None, found)
    return found


def _read_node(
    read: Read, address: int, num_axes: int, level: int | None, found: list[ChunkEntry]
) -> None:
    key_bytes = 8 + 8 * (num_axes + 1)
    head = read(address, 24)
    if len(head) < 24 or head[:5] != b"TREE\x01" or level not in (None, head[5]):
        raise DataError(f"the tree of chunks is damaged at byte {address}")
    own_level, count = head[5], struct.unpack_from("<H", head, 6)[0]
    body = read(address + 24, count * (key_bytes + 8))
    if len(body) < count * (key_bytes + 8):
        raise DataError(f"the tree of chunks is damaged at byte {address}")
    for number in range(count):
        place = number * (key_bytes + 8)
        num_bytes, mask, *offsets = struct.unpack_from(f"<II{num_axes}Q", body, place)
        (child,) = struct.unpack_from("<Q", body, place + key_bytes)
        if own_level:
            _read_node(read, child, num_axes, own_level - 1, found)
        else:
            found.append(ChunkEntry(tuple(offsets), num_bytes, mask, child))
