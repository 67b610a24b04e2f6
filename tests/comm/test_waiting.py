"""Waits in shared memory: they sleep, are woken, and know early who comes."""

import mmap
import threading
import time

import numpy as np
import pytest

from mpistrat.comm import shared_memory
from mpistrat.comm.ops import compiled_function
from mpistrat.comm.shared_memory import NodeMemory
from mpistrat.native import native_library
from mpistrat.options import ReduceOp

pytestmark = pytest.mark.skipif(native_library() is None, reason="needs the compiled module")

SIZE = 3
LATE_S = 0.4


@pytest.fixture
def nodes():
    """The memory as three ranks see it, all of them in this process."""
    num_bytes = shared_memory._BYTES_PER_RANK * SIZE
    memory = np.frombuffer(mmap.mmap(-1, num_bytes), np.uint8)
    return [NodeMemory(memory, rank, SIZE, native_library()) for rank in range(SIZE)]


def on_threads(work, late=0):
    """Do `work` of each rank on a thread, and return what it returns and the CPU time of each."""
    results, cpu_s = [None] * SIZE, [0.0] * SIZE

    def one(rank):
        if rank == late:
            time.sleep(LATE_S)
        results[rank] = work(rank)
        cpu_s[rank] = time.thread_time()

    threads = [threading.Thread(target=one, args=(rank,)) for rank in range(SIZE)]
    for each in threads:
        each.start()
    for each in threads:
        each.join(20)
    return results, cpu_s


@pytest.mark.parametrize("is_busy", [False, True])
@pytest.mark.parametrize("length", [10, 100_000, 1_000_000])
def test_a_long_wait_sleeps_and_ends(nodes, is_busy, length):
    arrays = [np.full(length, rank + 1, np.float32) for rank in range(SIZE)]
    number, itemsize = compiled_function(ReduceOp.SUM, np.dtype(np.float32))

    def reduce(rank):
        node, array = nodes[rank], arrays[rank]
        node.wait_busily(is_busy)
        sequence = node.reductions.pointer
        node.library.reduce(
            *(sequence, number, 1, itemsize, 0, 1, 2**19, 2**10, False), [array], [array]
        )

    _, cpu_s = on_threads(reduce)
    for array in arrays:
        np.testing.assert_array_equal(array, SIZE * (SIZE + 1) / 2)
    assert max(cpu_s) < LATE_S / 2


def test_rest_ends_when_a_rank_comes(nodes):
    rounds = [node.rounds.pointer for node in nodes]
    largest = [np.zeros(4, np.uint64) for _ in nodes]

    def meet(rank):
        node, began = nodes[rank], time.monotonic()
        values = np.zeros(4, np.uint64)
        is_done = node.library.round_meet(
            rounds[rank], values.ctypes.data, largest[rank].ctypes.data, 100, rank, 7
        )
        while not is_done:
            assert time.monotonic() - began < 10
            is_done = node.library.round_rest(rounds[rank], largest[rank].ctypes.data)
        return largest[rank].tolist()

    results, cpu_s = on_threads(meet)
    assert results == [[SIZE - 1, 2**64 - 1, 7, 2**64 - 8]] * SIZE
    assert max(cpu_s) < LATE_S / 2


def test_ranks_are_expected_once_they_have_said_so_or_have_come(nodes):
    expect = nodes[0].library.round_expect
    pointers = [node.rounds.pointer for node in nodes]
    assert not expect(pointers[0], 0, 5)
    assert not expect(pointers[1], 0, 5)
    assert expect(pointers[2], 0, 4)
    assert not expect(pointers[0], 0, 5), "rank 2 does not come to number 5"
    values = np.zeros(4, np.uint64)
    nodes[2].library.round_start(pointers[2], values.ctypes.data)
    assert expect(pointers[0], 0, 5)
    assert expect(pointers[1], 0, 5)
    assert not expect(pointers[0], 0, 6)
