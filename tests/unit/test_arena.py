"""Memory for results: handed out page by page, and left before a fork."""

import mmap
import os

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mpistrat.comm.arena import Arena
from mpistrat.comm.pool import Pool

PAGE = mmap.PAGESIZE
NUM_PAGES = 64
START = 3 * PAGE


class File:
    """A shared file, as `mpistrat.comm.node` makes it."""

    def __init__(self):
        self.handle = os.memfd_create("test")
        os.truncate(self.handle, START + NUM_PAGES * PAGE)
        self.map = mmap.mmap(self.handle, START + NUM_PAGES * PAGE)
        self.memory = np.frombuffer(self.map, np.uint8)

    def content(self, address, num_bytes):
        """Return what another process would see."""
        return os.pread(self.handle, num_bytes, address - self.memory.ctypes.data)


class Program(RuleBasedStateMachine):
    taken = Bundle("taken")

    def __init__(self):
        super().__init__()
        self.file = File()
        self.arena = Arena(self.file, START, NUM_PAGES * PAGE)
        self.held = {}

    @rule(target=taken, num_bytes=st.integers(1, 20 * PAGE))
    def take(self, num_bytes):
        address = self.arena.take(num_bytes)
        if address is None:
            free = np.ones(NUM_PAGES + 1, bool)
            free[-1] = False
            for start, length in self.held.items():
                first = (start - self.file.memory.ctypes.data - START) // PAGE
                free[first : first - (-length // PAGE)] = False
            runs = np.diff(np.flatnonzero(np.concatenate([[True], ~free]))) - 1
            assert max(runs, default=0) * PAGE < num_bytes
            return None
        self.held[address] = num_bytes
        return address

    @rule(address=consumes(taken))
    def give_back(self, address):
        if address is not None:
            self.arena.give_back(address, self.held.pop(address))

    @invariant()
    def nothing_is_handed_out_twice(self):
        base = self.file.memory.ctypes.data + START
        stop = base
        for address, num_bytes in sorted(self.held.items()):
            assert address >= stop
            assert address % PAGE == 0
            stop = address + num_bytes
        assert stop <= base + NUM_PAGES * PAGE

    def teardown(self):
        for address, num_bytes in self.held.items():
            self.arena.give_back(address, num_bytes)
        assert self.arena.take(NUM_PAGES * PAGE) is not None


TestProgram = Program.TestCase


def test_who_leaves_keeps_the_numbers_and_shares_no_more():
    file = File()
    pool = Pool(Arena(file, START, NUM_PAGES * PAGE))
    array = pool.take((20_000,), np.dtype(np.float32))
    address = array.ctypes.data
    array[:] = np.arange(20_000)
    assert file.content(address, array.nbytes) == array.tobytes()
    pool.leave_shared_memory()
    pool.leave_shared_memory()
    np.testing.assert_array_equal(array, np.arange(20_000))
    array[:] = 7
    assert file.content(address, array.nbytes) == np.arange(20_000, dtype=np.float32).tobytes()
    del array
    again = pool.take((20_000,), np.dtype(np.float32))
    assert again.ctypes.data == address
    again[:] = 9
    assert file.content(address, again.nbytes) == again.tobytes()


@pytest.mark.parametrize(("num_bytes", "is_shared"), [(2**16, True), (2**22 + 1, False)])
def test_where_an_array_comes_from(num_bytes, is_shared):
    file = File()
    pool = Pool(Arena(file, START, NUM_PAGES * PAGE))
    begin = file.memory.ctypes.data
    array = pool.take((num_bytes,), np.dtype(np.uint8))
    assert (begin <= array.ctypes.data < begin + file.memory.size) == is_shared


def test_a_full_arena_is_no_error():
    file = File()
    pool = Pool(Arena(file, START, NUM_PAGES * PAGE))
    held = [pool.take((2**16,), np.dtype(np.uint8)) for _ in range(NUM_PAGES * PAGE // 2**16 + 3)]
    for number, array in enumerate(held):
        array[:] = number
    assert [set(array.tolist()) for array in held] == [{number} for number in range(len(held))]
