"""Images of object headers, made by h5py in memory, that can be placed anywhere in a file.

h5py opens a file object that shows the file so far. New bytes are kept, and changes to old bytes
are dropped, so a new root group next to the old one costs the file nothing. Made twice, at ends
that are 2**40 bytes apart, the new bytes differ exactly in the pointers among them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from mpistrat import hdf5
from mpistrat.data.hdf5_writer.superblock import Root, Superblock
from mpistrat.errors import DataError

STEPS, END = "mpistrat_steps", "mpistrat_end"
"""Attributes of the root group: the number of steps, and the end of what is used of the file."""

_DISTANCE = 2**40
_ALIGNMENT = 8

Read = Callable[[int, int], bytes]


class _View:
    """File object for h5py: an existing file, of which new bytes at the end are kept in memory."""

    def __init__(self, read: Read, superblock: Superblock, root: Root, end: int) -> None:
        self._read = read
        self._base = end
        self.image = bytearray()
        # The superblock shows the given root and end, whatever the file itself says now.
        self._start = bytearray(read(0, 96).ljust(96, b"\0"))
        for offset, data in (superblock.state_end(end), superblock.commit(root, end)):
            self._start[offset : offset + len(data)] = data
        self._position = 0

    def seek(self, offset: int, whence: int = 0) -> int:
        start = (0, self._position, self._base + len(self.image))[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, target: Any) -> int:
        memory = memoryview(target).cast("B")
        data = self._bytes_at(self._position, len(memory))
        memory[: len(data)] = data
        self._position += len(data)
        return len(data)

    def read(self, num_bytes: int = -1) -> bytes:
        data = self._bytes_at(self._position, num_bytes)
        self._position += len(data)
        return data

    def _bytes_at(self, position: int, num_bytes: int) -> bytes:
        if position >= self._base:
            return bytes(self.image[position - self._base :][:num_bytes])
        # HDF5 reads ahead, so one read may begin in the old part and end in the new one.
        num_old = min(num_bytes, self._base - position)
        data = bytearray(self._read(position, num_old).ljust(num_old, b"\0"))
        if position < len(self._start):
            known = self._start[position : position + num_old]
            data[: len(known)] = known
        if num_old < num_bytes:
            data += self.image[: num_bytes - num_old]
        return bytes(data)

    def write(self, data: Any) -> int:
        memory = memoryview(data).cast("B")
        start, skipped = self._position - self._base, 0
        if start < 0:
            # A change of old bytes: link counts, the old root group, the superblock. The commit
            # makes the new root group the file, and nothing reads these bytes again.
            skipped = min(-start, len(memory))
            start = 0
        kept = memory[skipped:]
        if kept:
            if len(self.image) < start + len(kept):
                self.image.extend(bytes(start + len(kept) - len(self.image)))
            self.image[start : start + len(kept)] = kept
        self._position += len(memory)
        return len(memory)

    def truncate(self, size: int | None = None) -> int:
        length = max((self._position if size is None else size) - self._base, 0)
        if length < len(self.image):
            del self.image[length:]
        else:
            self.image.extend(bytes(length - len(self.image)))
        return self._base + len(self.image)

    def flush(self) -> None:
        pass


class DatasetPlace(NamedTuple):
    """Positions in an image."""

    rows: int
    """Of the first dimension."""
    tree: int
    """Of the address of the tree of chunks, or of the elements themselves."""


@dataclass
class Image:
    """New bytes at the end of a file, with a new root group."""

    data: bytearray
    root: Root
    datasets: dict[str, DatasetPlace] = field(default_factory=dict)
    attributes: dict[str, int] = field(default_factory=dict)
    """Position of the value of each attribute of the root group."""


Fill = Callable[[Any, Any, Any], dict[str, Any]]
"""Takes the file, the same file to read values from, and the new root group. Fills the group, and
returns datasets whose places are needed."""


def make_image(read: Read, superblock: Superblock, root: Root, end: int, fill: Fill) -> Image:
    """Return the bytes that follow a file with the root group `root` and `end`, a multiple of 8."""
    h5py = hdf5.h5py()
    view, source_view = (_View(read, superblock, root, end) for _ in range(2))
    # Values are read through a second file. HDF5 puts new strings of any length into a heap that
    # it has read before if there is room, and that change would be dropped.
    with (
        h5py.File(source_view, "r") as source,
        h5py.File(view, "r+", libver=("earliest", "latest")) as file,
    ):
        # The group gets no name: HDF5 would have to change the old root group for it. The
        # superblock of the commit points to its header, so it needs no link.
        group = h5py.Group(h5py.h5g.create(file.id, None))
        places = fill(file, source, group)
        addresses = {name: h5py.h5o.get_info(each.id).addr for name, each in places.items()}
        header = h5py.h5o.get_info(group.id).addr
        file.flush()
        # Before HDF5 closes the file, and removes the objects without a name.
        data = bytearray(view.image)
        del group, places
    data.extend(bytes(-len(data) % _ALIGNMENT))
    messages = list(_messages(data, header - end, end))
    tree, heap = struct.unpack_from("<QQ", data, _place_of(messages, _SYMBOL_TABLE))
    image = Image(data, Root(header, tree, heap))
    for name, address in addresses.items():
        own = list(_messages(data, address - end, end))
        layout = _place_of(own, _LAYOUT)
        version, kind = data[layout], data[layout + 1]
        if version != 3 or kind not in (1, 2):
            raise DataError(f"the dataset {name!r} has a layout that HDF5Writer cannot write")
        # Layout version 3: version, class, for chunks the number of dimensions, then the address.
        image.datasets[name] = DatasetPlace(_place_of(own, _DATASPACE) + 8, layout + kind + 1)
    for kind, place, _ in messages:
        if kind == _ATTRIBUTE:
            name, value = _attribute(data, place)
            image.attributes[name] = value
    return image


_DATASPACE, _LAYOUT, _ATTRIBUTE, _CONTINUATION, _SYMBOL_TABLE = 0x01, 0x08, 0x0C, 0x10, 0x11


def _messages(data: bytearray, header: int, origin: int) -> Iterator[tuple[int, int, int]]:
    """Yield type, position and size of the messages of an object header (version 1) in an image."""
    version, _, count, _, size = struct.unpack_from("<BBHII", data, header)
    if version != 1:
        raise DataError(f"HDF5 has created an object header of version {version}, not 1")
    # Attributes push messages into continuation blocks. HDF5 leaves the old place of a message as
    # a message of type 0, which counts too.
    blocks = [(header + 16, size)]
    while blocks:
        position, left = blocks.pop(0)
        while left >= 8 and count:
            kind, length = struct.unpack_from("<HH", data, position)
            count -= 1
            if kind == _CONTINUATION:
                offset, room = struct.unpack_from("<QQ", data, position + 8)
                blocks.append((offset - origin, room))
            yield kind, position + 8, length
            position, left = position + 8 + length, left - 8 - length


def _place_of(messages: Sequence[tuple[int, int, int]], kind: int) -> int:
    for each, position, _ in messages:
        if each == kind:
            return position
    raise DataError(f"an object header has no message of type {kind}")


def _attribute(data: bytearray, position: int) -> tuple[str, int]:
    """Return name and position of the value of an attribute message."""
    version, _, name_bytes, type_bytes, space_bytes = struct.unpack_from("<BBHHH", data, position)
    start = position + (9 if version == 3 else 8)
    name = bytes(data[start : start + name_bytes]).rstrip(b"\0").decode("utf-8", "replace")
    lengths = (name_bytes, type_bytes, space_bytes)
    # In version 1 each part is padded to a multiple of 8 bytes.
    padded = [length + -length % 8 if version == 1 else length for length in lengths]
    return name, start + sum(padded)


@dataclass
class HeaderTemplate:
    """The headers of all objects that change with each commit."""

    image: Image
    origin: int
    """The end of the file for which the image was made."""
    pointers: np.ndarray
    """Positions of the addresses within the image that point into it."""

    def __post_init__(self) -> None:
        # Pointers need not be aligned.
        self._places = self.pointers[:, None] + np.arange(8)
        whole = np.frombuffer(self.image.data, np.uint8)
        self._words = np.ascontiguousarray(whole[self._places]).view("<u8")

    @property
    def num_bytes(self) -> int:
        """Number of bytes of each copy."""
        return len(self.image.data)

    def at(
        self,
        address: int,
        rows: Mapping[str, int],
        trees: Mapping[str, int],
        steps: int,
        end: int,
    ) -> tuple[bytes, Root]:
        """Return a copy for `address` with these numbers of rows, trees, steps and used bytes."""
        data, distance = bytearray(self.image.data), address - self.origin
        whole = np.frombuffer(data, np.uint8)
        if len(self.pointers):
            words = self._words + np.uint64(distance % 2**64)
            whole[self._places] = words.view(np.uint8)
        del whole
        for name, place in self.image.datasets.items():
            if name in rows:
                struct.pack_into("<Q", data, place.rows, rows[name])
            struct.pack_into("<Q", data, place.tree, trees[name])
        struct.pack_into("<q", data, self.image.attributes[STEPS], steps)
        struct.pack_into("<q", data, self.image.attributes[END], end)
        root = Root(*(each + distance for each in vars(self.image.root).values()))
        return bytes(data), root


def make_template(
    read: Read, superblock: Superblock, root: Root, end: int, fill: Fill
) -> HeaderTemplate:
    """Return the template for copies after a file with the root group `root`."""
    # HDF5 itself shows which words are addresses, even in messages that this code does not know. A
    # parser would need to know all messages.
    one = make_image(read, superblock, root, end, fill)
    two = make_image(read, superblock, root, end + _DISTANCE, fill)
    if len(one.data) != len(two.data):
        raise RuntimeError("HDF5 has laid out the same headers in two ways.")
    a, b = (np.frombuffer(each.data, np.uint8) for each in (one, two))
    # The addresses differ by 2**40, so exactly their sixth bytes differ (little endian).
    pointers = np.nonzero(a != b)[0] - 5
    places = pointers[:, None] + np.arange(8)
    words = np.ascontiguousarray(a[places]).view("<u8"), np.ascontiguousarray(b[places]).view("<u8")
    is_inside = (words[0] >= end) & (words[0] <= end + len(one.data))
    if not (is_inside.all() and (words[1] - words[0] == _DISTANCE).all()):
        raise RuntimeError("HDF5 has written an address in a way that HDF5Writer does not know.")
    return HeaderTemplate(one, end, pointers)
