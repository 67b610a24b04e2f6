"""Superblock of HDF5 files: where the root group is, and up to which byte the file is used.

See "III. Disk Format: Level 0A" in the HDF5 File Format Specification. Version 0 is what HDF5Writer
creates; files of other programs may have version 2 or 3.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from mpistrat.errors import DataError

SIGNATURE = b"\x89HDF\r\n\x1a\n"
UNDEFINED = 2**64 - 1
"""The address of what does not exist."""

_LONGEST = 96
_ROOT_ENTRY = 56
"""Offset of the entry of the root group in version 0."""


@dataclass(frozen=True)
class Root:
    """Addresses of a root group."""

    header: int
    """Its object header."""
    tree: int
    """The B-tree of its links. The entry in a superblock of version 0 repeats it."""
    heap: int
    """The heap with the names of its links."""


@dataclass(frozen=True)
class Superblock:
    """The fields of a superblock that a writer changes."""

    version: int
    root: Root
    end: int
    """The end of the file as the superblock states it."""
    extension: int = UNDEFINED

    def commit(self, root: Root, end: int) -> tuple[int, bytes]:
        """Return offset and bytes of the write that makes `root` the content of the file."""
        if self.version == 0:
            # Link name offset, header, cache type 1 (a tree and a heap), reserved, tree and heap.
            return _ROOT_ENTRY, struct.pack("<QQIIQQ", 0, root.header, 1, 0, root.tree, root.heap)
        return 0, self._version_2(root, end)

    def state_end(self, end: int) -> tuple[int, bytes]:
        """Return offset and bytes of the write that states a new end of the file."""
        if self.version == 0:
            return 40, struct.pack("<Q", end)
        return 0, self._version_2(self.root, end)

    def _version_2(self, root: Root, end: int) -> bytes:
        # The checksum covers all fields, so root group and end can only be written together.
        fields = SIGNATURE + struct.pack("<4B", self.version, 8, 8, 0)
        fields += struct.pack("<4Q", 0, self.extension, end, root.header)
        return fields + struct.pack("<I", lookup3(fields))


def read_superblock(path: str, data: bytes) -> Superblock:
    """Return the superblock of a file that begins with `data`, or raise DataError."""
    if data[:8] != SIGNATURE:
        raise DataError(
            f"{path} is not an HDF5 file, or has a user block, so it cannot be resumed."
        )
    version = data[8] if len(data) > 8 else 255
    if version not in (0, 2, 3) or len(data) < (_LONGEST if version == 0 else 48):
        raise DataError(
            f"{path} has a superblock of version {version} or is truncated; HDF5Writer can resume "
            "files with version 0, 2 or 3. Copy it with h5repack."
        )
    sizes, flags, base = (
        (data[13:15], data[20], data[24:32])
        if version == 0
        else (
            data[9:11],
            data[11],
            data[12:20],
        )
    )
    if sizes != b"\x08\x08" or base != bytes(8):
        raise DataError(f"{path} has addresses of a different size, or a user block.")
    if flags:
        raise DataError(
            f"{path} was not closed by the program that wrote it (with SWMR or a format of HDF5 "
            "1.10), which may still run. If it has ended, clear the mark with h5clear -s, and "
            "check the content."
        )
    if version == 0:
        if struct.unpack_from("<HH", data, 16)[1] == 0:
            raise DataError(f"{path} has a damaged superblock.")
        (end,) = struct.unpack_from("<Q", data, 40)
        header, cached = struct.unpack_from("<QI", data, 64)
        tree, heap = struct.unpack_from("<QQ", data, 80) if cached == 1 else (0, 0)
        return Superblock(0, Root(header, tree, heap), end)
    extension, end, header = struct.unpack_from("<QQQ", data, 20)
    if struct.unpack_from("<I", data, 44)[0] != lookup3(data[:44]):
        raise DataError(f"{path} has a damaged superblock: its checksum is wrong.")
    return Superblock(version, Root(header, 0, 0), end, extension)


def lookup3(data: bytes) -> int:
    """Return the checksum of HDF5's metadata: Bob Jenkins' lookup3, with the initial value 0."""
    # http://burtleburtle.net/bob/c/lookup3.c, hashlittle.
    mask = 0xFFFFFFFF
    a: int
    b: int
    c: int
    a = b = c = (0xDEADBEEF + len(data)) & mask

    def rotated(x: int, bits: int) -> int:
        return ((x << bits) | (x >> (32 - bits))) & mask

    position, left = 0, len(data)
    while left > 12:
        x, y, z = struct.unpack_from("<3I", data, position)
        a, b, c = (a + x) & mask, (b + y) & mask, (c + z) & mask
        a = ((a - c) & mask) ^ rotated(c, 4)
        c = (c + b) & mask
        b = ((b - a) & mask) ^ rotated(a, 6)
        a = (a + c) & mask
        c = ((c - b) & mask) ^ rotated(b, 8)
        b = (b + a) & mask
        a = ((a - c) & mask) ^ rotated(c, 16)
        c = (c + b) & mask
        b = ((b - a) & mask) ^ rotated(a, 19)
        a = (a + c) & mask
        c = ((c - b) & mask) ^ rotated(b, 4)
        b = (b + a) & mask
        position, left = position + 12, left - 12
    if not left:
        return c
    x, y, z = struct.unpack("<3I", data[position:].ljust(12, b"\0"))
    a, b, c = (a + x) & mask, (b + y) & mask, (c + z) & mask
    for first, bits in (("c", 14), ("a", 11), ("b", 25), ("c", 16), ("a", 4), ("b", 14), ("c", 24)):
        if first == "c":
            c = ((c ^ b) - rotated(b, bits)) & mask
        elif first == "a":
            a = ((a ^ c) - rotated(c, bits)) & mask
        else:
            b = ((b ^ a) - rotated(a, bits)) & mask
    return c
