"""Check the global heaps of an HDF5 file before HDF5 reads them.

Texts of variable length, such as our attributes, lie in global heaps: the one kind of metadata
that has no checksum. In a damaged one HDF5 can loop for ever, so its chain of sizes is followed
here first (HDF5 file format specification, version 3.0, section III.E).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mpistrat.hdf5 import h5py

__all__ = ["check_heap", "check_heaps"]

_SIGNATURE = b"GCOL\x01\0\0\0"
_HEADER_BYTES = 16
"""Of a heap, and of each object in it."""
_BLOCK_BYTES = 2**20


def check_heaps(file: Any, path: Path) -> None:
    """Check every global heap of the open `file`, without reading a text from it. Local.

    Heaps are looked for in all bytes that hold no values of data sets: those may be any bytes,
    also those of another HDF5 file.

    Raises
    ------
    ValueError
        If one is damaged.
    """
    with open(path, "rb") as opened:
        for begin, end in _metadata(file, os.fstat(opened.fileno()).st_size):
            for at in _find_heaps(opened, begin, end):
                opened.seek(at + 8)
                size_bytes = int.from_bytes(opened.read(8), "little")
                if size_bytes > end - at:
                    raise ValueError(f"the global heap at byte {at} passes its end")
                opened.seek(at)
                check_heap(opened.read(size_bytes), at)


def check_heap(heap: bytes, at: int) -> None:
    """Check that the objects of a heap fill it exactly, each under a number of its own. Local.

    Parameters
    ----------
    heap : bytes
        The whole heap, with its header.
    at : int
        Its place in the file, for messages.
    """
    numbers = set()
    place = _HEADER_BYTES
    while place + _HEADER_BYTES <= len(heap):
        number = int.from_bytes(heap[place : place + 2], "little")
        size_bytes = int.from_bytes(heap[place + 8 : place + 16], "little")
        if number == 0:  # free space to the end; its size counts its header
            size_bytes -= _HEADER_BYTES
            if place + _HEADER_BYTES + size_bytes != len(heap):
                raise ValueError(f"the free space of the global heap at byte {at} ends elsewhere")
        elif number in numbers:
            raise ValueError(f"the global heap at byte {at} has two objects {number}")
        numbers.add(number)
        place += _HEADER_BYTES + -(-size_bytes // 8) * 8
    # Less than a header at the end is free space without one.
    if place > len(heap) or not numbers:
        raise ValueError(f"the objects of the global heap at byte {at} do not fit into it")


def _find_heaps(opened: Any, begin: int, end: int) -> Iterator[int]:
    """Yield the places of the signature between two bytes of the file."""
    overlap = len(_SIGNATURE) - 1
    for block in range(begin, end, _BLOCK_BYTES):
        opened.seek(block)
        data = opened.read(min(_BLOCK_BYTES + overlap, end - block))
        at = data.find(_SIGNATURE)
        while at >= 0:
            yield block + at
            at = data.find(_SIGNATURE, at + 1)


def _metadata(file: Any, size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield first and last byte of each part of the file that holds no values."""
    begin = 0
    for start, stop in sorted(_values(file)):
        if start > begin:
            yield begin, min(start, size_bytes)
        begin = max(begin, stop)
    if begin < size_bytes:
        yield begin, size_bytes


def _values(file: Any) -> Iterator[tuple[int, int]]:
    """Yield where the values of each data set lie."""
    datasets: list[Any] = []

    def note(_: str, node: Any) -> None:
        if isinstance(node, h5py().Dataset):
            datasets.append(node.id)

    file.visititems(note)
    for dataset in datasets:
        start = dataset.get_offset()
        if start is not None:
            yield start, start + dataset.get_storage_size()
        elif dataset.get_create_plist().get_layout() == h5py().h5d.CHUNKED:
            yield from _chunks(dataset)


def _chunks(dataset: Any) -> list[tuple[int, int]]:
    chunks: list[tuple[int, int]] = []
    if hasattr(dataset, "chunk_iter"):  # HDF5 1.10.10, 1.12.3 and later
        dataset.chunk_iter(lambda c: chunks.append((c.byte_offset, c.byte_offset + c.size)))
    return chunks
