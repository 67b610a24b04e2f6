"""Reductions of all kinds at the same time, with ranks that are late at random: all are exact.

This is the test of the protocol by which ranks use the memory that they share.
"""

import os
import random
import threading
import time

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.native import native_library
from tests.helpers import triangle

LENGTHS = [0, 1, 5, 100, 1_000, 2_100, 4_100, 9_000, 20_000]
LONG = [70_000, 140_000, 300_001]
MOST_UNDER_WAY = 12
WAYS = [ms.CommunicationImplementation.AUTO, ms.CommunicationImplementation.SHARED]


class Workload:
    """Random operations, in one order on all ranks, at different times on each.

    Parameters
    ----------
    strategy : MPIStrategy
    seed : int
        Must agree over ranks.
    """

    def __init__(self, strategy, seed):
        collectives = strategy.extended._collectives
        self.strategy = strategy
        self.rank, self.size = collectives.rank, collectives.size
        self.common = random.Random(seed)
        self.own = random.Random(f"{seed} on rank {self.rank}")
        self.counts = dict.fromkeys(["array", "nest", "begun", "gather", "to one", "agreement"], 0)
        self.under_way = []
        self.kept = []
        self.patterns = {
            dtype: (np.arange(max(LONG)) % 23).astype(dtype) for dtype in ("u1", "i4", "f4", "f8")
        }

    def run(self, num_operations):
        """Do so many operations, all of which must be right. **Collective**."""

        def loop():
            replica = ms.get_replica_context()
            for number in range(num_operations):
                self.dawdle()
                kind = self.common.choices([*self.counts], [6, 3, 6, 1, 1, 1])[0]
                self.counts[kind] += 1
                getattr(self, "do_" + kind.replace(" ", "_"))(replica, number)
                self.look_back()
                if len(self.under_way) > MOST_UNDER_WAY or self.common.random() < 0.02:
                    self.end_all()
            self.end_all()

        self.strategy.run(loop)

    def dawdle(self):
        chance = self.own.random()
        if chance < 0.01:
            time.sleep(self.own.uniform(0, 0.001))
        elif chance < 0.1:
            os.sched_yield()

    def draw(self, number):
        """Return what this rank brings, and what is to come of its SUM."""
        dtype = self.common.choice([*self.patterns])
        length = self.common.choice(LONG if self.common.random() < 0.05 else LENGTHS)
        pattern = self.patterns[dtype][:length]
        if self.common.random() < 0.5:
            pattern = pattern[::-1]  # must be copied first
        shift = number % 50
        own = pattern * pattern.dtype.type(self.rank + 1) + pattern.dtype.type(shift)
        factor, summand = triangle(self.size + 1), self.size * shift % 256
        return own, pattern * pattern.dtype.type(factor) + pattern.dtype.type(summand)

    def options(self):
        return ms.CommunicationOptions(implementation=self.common.choice(WAYS))

    def expect(self, result, expected):
        np.testing.assert_array_equal(result, expected)
        if self.own.random() < 0.2:
            self.kept.append((result, expected))

    def look_back(self):
        """Results stay what they are as long as they are kept."""
        while len(self.kept) > 8:
            result, expected = self.kept.pop(self.own.randrange(8))
            np.testing.assert_array_equal(result, expected)

    def do_array(self, replica, number):
        own, expected = self.draw(number)
        self.expect(replica.all_reduce("sum", own, self.options()), expected)

    def do_nest(self, replica, number):
        pairs = [self.draw(number + each) for each in range(self.common.randrange(1, 9))]
        results = replica.all_reduce("sum", [own for own, _ in pairs], self.options())
        for result, (_, expected) in zip(results, pairs, strict=True):
            self.expect(result, expected)

    def do_begun(self, replica, number):
        own, expected = self.draw(number)
        handle = replica.start_all_reduce("sum", own, self.options())
        own[...] = 1
        self.under_way.append((handle, expected))

    def do_gather(self, replica, number):
        lengths = [self.common.choice([0, 1, 30, 3_000]) for _ in range(self.size)]
        gathered = replica.all_gather(np.full(lengths[self.rank], self.rank), 0)
        np.testing.assert_array_equal(gathered, np.repeat(np.arange(self.size), lengths))

    def do_to_one(self, replica, number):
        own, expected = self.draw(number)
        root = self.common.randrange(self.size)
        device = f"/job:worker/task:{root}/device:CPU:0"

        def merge(strategy, value):
            return strategy.extended.reduce_to("sum", value, device)

        result = replica.merge_call(merge, args=(own,))
        if self.rank == root:
            self.expect(result, expected)

    def do_agreement(self, replica, number):
        everyone = self.strategy.extended._collectives.gather_json([number, self.rank])
        assert everyone == [[number, each] for each in range(self.size)]

    def end_all(self):
        """Wait for what is under way, in an order of this rank's own."""
        self.own.shuffle(self.under_way)
        while self.under_way:
            self.dawdle()
            handle, expected = self.under_way.pop()
            self.expect(handle.wait(), expected)


def test_hundreds_of_operations_under_way_at_the_same_time(strategy):
    workload = Workload(strategy, seed=0)
    workload.run(600)
    assert min(workload.counts.values()) > 10


def test_with_many_large_ones(strategy, monkeypatch):
    monkeypatch.setattr(f"{__name__}.LENGTHS", [100, 70_000, 140_000, 300_001])
    Workload(strategy, 7).run(60)


@pytest.mark.skipif(native_library() is None, reason="nothing is compiled for this machine")
@pytest.mark.parametrize(("block_bytes", "small_bytes"), [(64, 0), (4096, 0), (4096, 2**20)])
def test_blocks_of_every_size(strategy, monkeypatch, block_bytes, small_bytes):
    """Small blocks pass each other most often."""
    node = strategy.extended._collectives.channel.transport.node
    if node is not None:
        monkeypatch.setattr(node, "sizes", (block_bytes, small_bytes))
    monkeypatch.setattr(f"{__name__}.LENGTHS", [0, 1, 100, 1_000, 4_000])
    monkeypatch.setattr(f"{__name__}.LONG", [9_000])
    Workload(strategy, block_bytes).run(100)


def test_groups_of_ranks_at_the_same_time(strategy, rank, size):
    """Each group goes its own way, and reductions of all are under way together."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    half, pair = world.Split(rank % 2), world.Split(rank // 2)
    workloads = [Workload(strategy, 1)]
    workloads += [Workload(ms.MPIStrategy(comm, device="cpu"), 2) for comm in (half, pair)]
    for number in range(15):
        for workload in workloads:
            begun, expected = workload.draw(number)
            workload.strategy.run(
                lambda workload=workload, begun=begun, expected=expected, number=number: (
                    workload.under_way.append(
                        (ms.get_replica_context().start_all_reduce("sum", begun), expected)
                    )
                )
            )
            for _ in range(3):
                own, expected = workload.draw(number)
                workload.expect(workload.strategy.reduce("sum", own), expected)
        if number % 5 == 4:
            for workload in random.Random(f"{number} on rank {rank}").sample(workloads, 3):
                workload.end_all()
    # Groups that do not wait for each other.
    workloads[1].run(40 if rank % 2 else 90)
    workloads[2].run(60 if rank // 2 else 30)
    workloads[0].run(30)
    half.Free()
    pair.Free()


def test_a_thread_for_each_group(strategy, rank):
    from mpi4py import MPI

    if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
        pytest.skip("this MPI library lets one thread communicate at a time")
    comms = [MPI.COMM_WORLD.Dup() for _ in range(2)]
    workloads = [Workload(ms.MPIStrategy(comm, device="cpu"), 3) for comm in comms]
    errors = []

    def work(workload):
        try:
            workload.run(150)
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=work, args=(each,), daemon=True) for each in workloads]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    for comm in comms:
        comm.Free()
