"""Memory for results: handed out page by page, and left before a fork."""

import mmap
import os

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mpistrat.comm.pool import Pool
from mpistrat.comm.shared_memory import Arena, MemoryFile, map_file

PAGE = mmap.PAGESIZE
NUM_PAGES = 64


def shared_memory():
    """Return shared memory of whole pages as bytes, and what another process would see of it."""
    handle = os.memfd_create("test")
    os.truncate(handle, NUM_PAGES * PAGE)
    memory = np.frombuffer(mmap.mmap(handle, NUM_PAGES * PAGE), np.uint8)

    def content(array):
        return os.pread(handle, array.nbytes, array.ctypes.data - memory.ctypes.data)

    return memory, content


class Program(RuleBasedStateMachine):
    taken = Bundle("taken")

    def __init__(self):
        super().__init__()
        self.memory, _ = shared_memory()
        self.arena = Arena(self.memory)
        self.held = {}

    @rule(target=taken, num_bytes=st.integers(1, 20 * PAGE))
    def take(self, num_bytes):
        address = self.arena.take(num_bytes)
        if address is None:
            free = np.ones(NUM_PAGES + 1, bool)
            free[-1] = False
            for start, length in self.held.items():
                first = (start - self.memory.ctypes.data) // PAGE
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
        base = self.memory.ctypes.data
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
    memory, content = shared_memory()
    pool = Pool(Arena(memory))
    assert not pool.lends_shared_memory()
    array = pool.take((20_000,), np.dtype(np.float32))
    assert pool.lends_shared_memory()
    array[:] = np.arange(20_000)
    before = array.tobytes()
    assert content(array) == before
    for _ in range(2):  # a fork may be forked
        pool.leave_shared_memory()
        np.testing.assert_array_equal(array, np.arange(20_000))
    array[:] = 7
    assert content(array) == before


@pytest.mark.parametrize(("num_bytes", "is_shared"), [(2**16, True), (2**24 + 1, False)])
def test_where_an_array_comes_from(num_bytes, is_shared):
    memory, _ = shared_memory()
    array = Pool(Arena(memory)).take((num_bytes,), np.dtype(np.uint8))
    begin = memory.ctypes.data
    assert (begin <= array.ctypes.data < begin + memory.size) == is_shared


def test_a_full_arena_is_no_error():
    memory, _ = shared_memory()
    pool = Pool(Arena(memory))
    held = [pool.take((2**16,), np.dtype(np.uint8)) for _ in range(memory.size // 2**16 + 3)]
    for number, array in enumerate(held):
        array[:] = number
    assert [set(array.tolist()) for array in held] == [{number} for number in range(len(held))]


def test_all_who_map_a_file_see_one_memory():
    made = MemoryFile.new(PAGE)
    one, other = map_file(made.place, PAGE), map_file(made.place, PAGE)
    assert one.memory.shape == (PAGE,)
    assert not one.memory.any()
    one.memory[:] = 7
    assert (other.memory == 7).all()
    made.close()


def test_another_file_at_the_path_is_not_mapped():
    made, other = MemoryFile.new(PAGE), MemoryFile.new(PAGE)
    assert map_file((made.place[0], other.place[1]), PAGE) is None  # as where /proc is another
    assert map_file(made.place, 2 * PAGE) is None
    made.close()
    assert map_file(made.place, PAGE) is None
    other.close()
