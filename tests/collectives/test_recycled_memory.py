"""From the second step on nothing large is allocated: what is dropped is used again."""

import tracemalloc

import numpy as np
import pytest
from ml_dtypes import bfloat16

import mpistrat as ms
from tests.devices import implementation
from tests.helpers import fresh_bytes, result_of

pytestmark = pytest.mark.fast

KIB = 1024
SHAPES = [(400_000,), (10,), (), (300, 700), (3_000,), (100_000,)]
WAYS = {
    "auto": ms.CommunicationOptions(),
    "mpi": ms.CommunicationOptions(implementation=implementation("MPI")),
    "small packs": ms.CommunicationOptions(bytes_per_pack=1000),
}


def arrays(dtype):
    return [np.ones(shape, dtype) for shape in SHAPES]


def addresses(results):
    return {each.__array_interface__["data"][0] for each in results if each.nbytes >= 2**16}


@pytest.mark.thorough_product
@pytest.mark.parametrize("is_one", [False, True], ids=["nest", "one"])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "dtype",
    [
        *("f4", "c8", bfloat16, ">f8"),
        *(pytest.param(dtype, marks=pytest.mark.thorough) for dtype in ("i2", "f2")),
    ],
)
@pytest.mark.host_memory
def test_the_second_step_allocates_nothing_large(strategy, way, dtype, is_one):
    given = arrays(dtype)[:1] if is_one else arrays(dtype)
    value = given[0] if is_one else given

    for op in ("sum", "mean"):
        seen = []

        def step(op=op, seen=seen):
            results = ms.get_replica_context().all_reduce(op, value, WAYS[way])
            seen.append(addresses([results] if is_one else results))

        result_of(strategy, step)
        assert len(seen[0]) == sum(array.nbytes >= 2**16 for array in given)
        for _ in range(3):
            assert result_of(strategy, lambda step=step: fresh_bytes(step)) < 250 * KIB
        assert set.union(*seen) == seen[0]


@pytest.mark.parametrize("op", ["min", "max"])
def test_extremes_need_little_besides(strategy, op):
    given = [np.ones(3_000_000, np.float32), np.ones(10, np.float32)]

    def step():
        ms.get_replica_context().all_reduce(op, given)

    result_of(strategy, step)
    assert result_of(strategy, lambda: fresh_bytes(step)) < 2000 * KIB


@pytest.mark.parametrize("dtype", ["f4", ">i4"])
def test_reductions_under_way_allocate_once(strategy, dtype):
    given = arrays(dtype)

    def step():
        replica = ms.get_replica_context()
        handles = [replica.start_all_reduce("sum", given) for _ in range(3)]
        for handle in handles:
            handle.wait()

    result_of(strategy, step)
    for _ in range(3):
        assert result_of(strategy, lambda: fresh_bytes(step)) < 250 * KIB


def test_results_that_are_kept_over_one_step_are_allocated_twice(strategy):
    given = arrays("f4")
    kept, seen = [], []

    def step():
        results = ms.get_replica_context().all_reduce("sum", given)
        seen.append(addresses(results))
        kept[:] = results  # those of the step before are dropped only now

    for _ in range(2):
        result_of(strategy, step)
    assert not seen[0] & seen[1]
    assert result_of(strategy, lambda: fresh_bytes(step, 6)) < 250 * KIB
    assert set.union(*seen) == seen[0] | seen[1]


def test_a_part_of_a_result_keeps_its_numbers(strategy, rank, size):
    parts = []
    for step in range(5):
        own = np.full(100_000, 10 * step + rank, np.int32)
        total = strategy.reduce("sum", own)
        parts.append((total[step::1_000], size * 10 * step + size * (size - 1) // 2))
    for part, expected in parts:
        assert (part == expected).all()


@pytest.mark.parametrize("make", [lambda: ms.optimizers.SGD(0.1, momentum=0.9), ms.optimizers.Adam])
@pytest.mark.host_memory
def test_the_third_step_of_training_allocates_nothing_large(strategy, make):
    gradients = arrays("f4")
    with strategy.scope():
        optimizer = make()
        variables = [ms.Variable(np.zeros(shape, np.float32)) for shape in SHAPES]

    def step():
        optimizer.apply_gradients(zip(gradients, variables, strict=True))

    for _ in range(2):  # the first makes the slots
        strategy.run(step)
    assert fresh_bytes(lambda: strategy.run(step)) < 250 * KIB


def test_a_program_whose_arrays_have_another_size_at_each_step_does_not_grow():
    from mpi4py import MPI

    with_own_pool = ms.MPIStrategy(MPI.COMM_WORLD.Dup(), device="cpu")
    lengths = range(300_000, 360_000, 2_000)
    with_own_pool.reduce("sum", np.ones(max(lengths), np.float32))
    tracemalloc.start()
    try:
        for length in lengths:
            with_own_pool.reduce("sum", np.ones(length, np.float32))
        assert tracemalloc.get_traced_memory()[0] < 4 * max(lengths) + 250 * KIB
    finally:
        tracemalloc.stop()
