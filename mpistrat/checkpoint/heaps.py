"""Check the global heaps of an HDF5 file before HDF5 reads them.

Texts of variable length, such as our attributes, lie in global heaps: the one kind of metadata
that has no checksum. In a damaged one HDF5 can loop for ever, so its chain of sizes is followed
here first (HDF5 file format specification, version 3.0, section III.E).
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mpistrat.checkpoint.layout import stored_chunks

__all__ = ["check_heap", "check_heaps"]

_SIGNATURE = b"GCOL\x01\0\0\0"
_HEADER_BYTES = 16
"""Of a heap, and of each object in it."""
_BLOCK_BYTES = 2**20


def check_heaps(datasets: Iterable[Any], path: Path) -> int:
    """Check every global heap of an open file, without reading a text from it. Local.

    Heaps are looked for in all bytes that hold no values of data sets: those may be any bytes,
    also those of another HDF5 file.

    Parameters
    ----------
    datasets : iterable of h5py.Dataset
        All data sets of the file.
    path : Path
        The file.

    Returns
    -------
    int
        The size of the longest text, in bytes.

    Raises
    ------
    ValueError
        If one is damaged.
    """
    longest_bytes = 0
    with open(path, "rb") as opened:
        for begin, end in _metadata(datasets, os.fstat(opened.fileno()).st_size):
            at = _find_heap(opened, begin, end)
            while at is not None:
                opened.seek(at + 8)
                size_bytes = int.from_bytes(opened.read(8), "little")
                if not _HEADER_BYTES <= size_bytes <= end - at:
                    raise ValueError(f"the global heap at byte {at} passes its end")
                opened.seek(at)
                longest_bytes = max(longest_bytes, check_heap(opened.read(size_bytes), at))
                at = _find_heap(opened, at + size_bytes, end)
    return longest_bytes


def check_heap(heap: bytes, at: int) -> int:
    """Check that the objects of a heap fill it exactly, each under a number of its own. Local.

    Returns the size of the largest object in bytes.

    Parameters
    ----------
    heap : bytes
        The whole heap, with its header.
    at : int
        Its place in the file, for messages.
    """
    numbers = set()
    largest_bytes = 0
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
        else:
            largest_bytes = max(largest_bytes, size_bytes)
        numbers.add(number)
        place += _HEADER_BYTES + -(-size_bytes // 8) * 8
    # Less than a header at the end is free space without one.
    if place > len(heap) or not numbers:
        raise ValueError(f"the objects of the global heap at byte {at} do not fit into it")
    return largest_bytes


def _find_heap(opened: Any, begin: int, end: int) -> int | None:
    """Return the place of the first signature between two bytes of the file."""
    overlap = len(_SIGNATURE) - 1
    for block in range(begin, end, _BLOCK_BYTES):
        opened.seek(block)
        at = opened.read(min(_BLOCK_BYTES + overlap, end - block)).find(_SIGNATURE)
        if at >= 0:
            return block + int(at)
    return None


def _metadata(datasets: Iterable[Any], size_bytes: int) -> Iterator[tuple[int, int]]:
    """Yield first and last byte of each part of the file that holds no values."""
    begin = 0
    for start, stop in sorted(_values(datasets)):
        if start > begin:
            yield begin, min(start, size_bytes)
        begin = max(begin, stop)
    if begin < size_bytes:
        yield begin, size_bytes


def _values(datasets: Iterable[Any]) -> Iterator[tuple[int, int]]:
    """Yield where the values of each data set lie."""
    for dataset in datasets:
        start = dataset.id.get_offset()
        if start is not None:
            yield start, start + dataset.id.get_storage_size()
        else:
            yield from ((c.byte_offset, c.byte_offset + c.size) for c in stored_chunks(dataset))
