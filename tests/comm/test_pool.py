"""Result memory is recycled when nothing refers to it any more, and never before."""

import ctypes
import gc
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from mpistrat.comm.pool import Pool

MIB = 2**20
BYTES = np.dtype(np.uint8)


def address(array):
    return array.__array_interface__["data"][0]


VIEWS = {
    "slice": lambda array: array[1:],
    "reversed": lambda array: array[::-1],
    "reshaped": lambda array: array.reshape(-1, 64),
    "transposed": lambda array: array.reshape(-1, 64).T,
    "cast": lambda array: array.view(np.uint64),
    "structured": lambda array: array.view([("a", "u1"), ("b", "u1")])["b"],
    "matrix": lambda array: array.view(np.recarray),
    "diagonal": lambda array: array.reshape(-1, 64).diagonal(),
    "memoryview": lambda array: memoryview(array)[2:],
    "ctypes": lambda array: (ctypes.c_char * array.size).from_buffer(array),
    "through a buffer": lambda array: np.frombuffer(memoryview(array), np.uint16),
    "through DLPack": lambda array: np.from_dlpack(array),
    "windows": lambda array: np.lib.stride_tricks.sliding_window_view(array, 8),
    "iterator": lambda array: array.flat,
    "of a view": lambda array: array[8:].reshape(-1, 8)[1],
}


@pytest.mark.parametrize("kind", VIEWS)
def test_a_view_of_any_kind_keeps_the_memory(kind):
    pool = Pool()
    array = pool.take((MIB,), BYTES)
    start = address(array)
    array[:] = 7
    view = VIEWS[kind](array)
    del array
    others = [pool.take((MIB,), BYTES) for _ in range(3)]
    assert all(abs(address(other) - start) >= MIB for other in others)
    for other in others:
        other[:] = 9
    assert set(np.asarray(view).view(np.uint8).ravel()[:100]) == {7}
    del view, other, others
    again = [pool.take((MIB,), BYTES) for _ in range(4)]
    assert start in map(address, again)


def test_arrays_are_as_asked_for():
    pool = Pool()
    for shape in ((2**16,), (2**16 - 1,), (0,), (), (3, 0, 5), (300, 40, 7), (1, 70_001)):
        for dtype in map(np.dtype, ("?", "i2", "f4", "f8", "c16", "g")):
            array = pool.take(shape, dtype)
            assert (array.shape, array.dtype) == (shape, dtype)
            flags = array.flags
            assert flags.c_contiguous
            assert flags.writeable
            assert flags.aligned
            array[...] = 1
            if array.nbytes >= 2**16:
                assert address(array) % 64 == 0


def test_dropped_memory_is_used_again_whatever_its_shape_and_dtype():
    pool = Pool()
    first = pool.take((1000, 100), np.dtype(np.float32))
    start = address(first)
    del first
    second = pool.take((50_000,), np.dtype(np.complex64))
    assert address(second) == start


def test_memory_of_another_size_makes_room():
    pool = Pool()
    tracemalloc.start()
    try:
        for num_bytes in range(MIB, 2 * MIB, 4096):
            pool.take((num_bytes,), BYTES)
            assert tracemalloc.get_traced_memory()[0] < num_bytes + MIB // 4
        # Sizes that come once leave nothing behind, or a program of many sizes would slow down.
        assert len(pool._free) < 4
    finally:
        tracemalloc.stop()


def test_a_request_that_cannot_be_met_counts_for_nothing():
    pool = Pool()
    with pytest.raises(MemoryError):
        pool.take((2**61,), BYTES)
    tracemalloc.start()
    try:
        pool.take((4 * MIB,), BYTES)
        assert [pool.take((MIB,), BYTES).size for _ in range(3)] == [MIB] * 3
        held = [pool.take((MIB,), BYTES) for _ in range(3)]
        assert tracemalloc.get_traced_memory()[0] < (len(held) + 1.5) * MIB
    finally:
        tracemalloc.stop()


def test_other_threads_may_drop_and_take():
    pool = Pool()
    wrong = []

    def work(number):
        random = np.random.default_rng(number)
        held = []
        for _ in range(400):
            if len(held) > random.integers(4):
                array, mark = held.pop(random.integers(len(held)))
                if array[0] != mark or array[-1] != mark:
                    wrong.append(mark)
                array[0] = array[-1] = 0
            else:
                array = pool.take((int(random.choice([2**16, 2**17, 70_000])),), BYTES)
                mark = random.integers(1, 255)
                array[0] = array[-1] = mark
                held.append((array, mark))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert 0 <= pool._used_bytes <= pool._most_used_bytes <= 4 * 5 * 2**17
    pool.take((2**20,), BYTES)  # a size that has not been dropped, so that all is taken back
    assert pool._used_bytes == 2**20


class Program(RuleBasedStateMachine):
    """A program that takes arrays, makes views, and drops either, here or in another thread."""

    held = Bundle("held")

    def __init__(self):
        super().__init__()
        self.pool = Pool()
        self.num_users = {}
        """How many objects refer to each array, by its number."""
        self.num_bytes = {}
        self.most_used = 0
        tracemalloc.start()
        self.baseline = tracemalloc.get_traced_memory()[0]

    def teardown(self):
        tracemalloc.stop()

    @rule(target=held, mib=st.integers(1, 4))
    def take(self, mib):
        number = len(self.num_users) + 1
        array = self.pool.take((mib * MIB,), BYTES)
        array[:] = number % 256
        self.num_users[number], self.num_bytes[number] = 1, mib * MIB
        used = sum(self.num_bytes[each] for each, users in self.num_users.items() if users)
        self.most_used = max(self.most_used, used)
        return [number, array]

    @rule(target=held, entry=held, kind=st.sampled_from(["slice", "reversed", "memoryview"]))
    def view(self, entry, kind):
        number, array = entry
        self.num_users[number] += 1
        return [number, np.asarray(VIEWS[kind](array))]

    @rule(entry=consumes(held), by_thread=st.booleans())
    def drop(self, entry, by_thread):
        self.num_users[entry[0]] -= 1
        if by_thread:
            thread = threading.Thread(target=entry.clear)
            thread.start()
            thread.join()
        else:
            entry.clear()

    @rule(entry=held)
    def numbers_stay(self, entry):
        number, array = entry
        assert {array[0], array[array.size // 2], array[-1]} == {number % 256}

    @invariant()
    def no_more_is_held_than_was_used_at_one_time(self):
        if self.num_bytes_held() >= self.most_used + MIB // 2:
            gc.collect()  # of garbage that Hypothesis has left
        assert self.num_bytes_held() < self.most_used + MIB // 2

    def num_bytes_held(self):
        return tracemalloc.get_traced_memory()[0] - self.baseline


TestProgram = Program.TestCase
TestProgram.settings = settings(max_examples=30, stateful_step_count=30)
