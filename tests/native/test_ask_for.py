"""Blocks of a file that the system is asked to read."""

import ctypes
import mmap
import os
import time

import numpy as np
import pytest

from mpistrat.native import native_library

native = native_library()
pytestmark = pytest.mark.skipif(native is None, reason="needs the compiled code")

BLOCK = 1 << 16


def is_in_memory(descriptor):
    """Return for each page of a file whether it is in memory."""
    with mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ) as mapped:
        content = np.frombuffer(mapped, np.uint8)
        pages = np.zeros(-(-len(content) // mmap.PAGESIZE), np.uint8)
        done = ctypes.CDLL(None).mincore(
            *map(ctypes.c_void_p, (content.ctypes.data, len(content), pages.ctypes.data))
        )
        del content
    assert done == 0
    return (pages & 1).astype(bool)


@pytest.fixture
def evicted(tmp_path):
    """Return the descriptor of a file of 8 blocks of which none is in memory."""
    path = tmp_path / "blocks"
    path.write_bytes(b"x" * (8 * BLOCK))
    descriptor = os.open(path, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # reading one page reads no other
    if is_in_memory(descriptor).any():
        pytest.skip("this file system keeps the file in memory")
    yield descriptor
    os.close(descriptor)


@pytest.mark.parametrize("in_memory", [[], [0], [BLOCK // 2]], ids=["nothing", "front", "middle"])
def test_a_block_whose_last_page_is_missing_is_read(evicted, in_memory):
    for within in in_memory:
        os.pread(evicted, 1, 2 * BLOCK + within)
    native.ask_for(evicted, np.array([2 * BLOCK, 5 * BLOCK]), BLOCK)
    expected = np.repeat(np.isin(np.arange(8), [2, 5]), BLOCK // mmap.PAGESIZE)
    end = time.monotonic() + 10
    while not is_in_memory(evicted)[expected].all():
        assert time.monotonic() < end
        time.sleep(0.01)
    assert not is_in_memory(evicted)[~expected].any()


def test_a_page_of_two_blocks_counts_for_neither(evicted):
    shifted = 2048  # as HDF5 places data
    native.ask_for(evicted, np.array([3 * BLOCK + shifted]), BLOCK)
    native.ask_for(evicted, np.array([2 * BLOCK + shifted]), BLOCK)
    pages = np.arange(8 * BLOCK // mmap.PAGESIZE) * mmap.PAGESIZE
    expected = (pages > 2 * BLOCK + shifted - mmap.PAGESIZE) & (pages < 4 * BLOCK + shifted)
    end = time.monotonic() + 10
    while not is_in_memory(evicted)[expected].all():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_beyond_the_end_of_a_file_nothing_is_read(evicted):
    native.ask_for(evicted, np.array([9 * BLOCK]), BLOCK)
    assert not is_in_memory(evicted).any()
