"""Reductions in memory that the ranks of a node share, of every dtype and around every size."""

import hashlib

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.testing import inject
from tests.helpers import result_of
from tests.random_arrays import DTYPES, NARROW, OPS, can_reduce, expected_of

SHARED = ms.CommunicationOptions(implementation=ms.CommunicationImplementation.SHARED)

KIB = 1024
BOUNDARIES = [8 * KIB, 32 * KIB // 3, 16 * KIB, 64 * KIB]
"""In bytes: where a message goes with the agreement, is reduced by all, or is large."""
BLOCKS = [256 * KIB, 512 * KIB]
MOST_BYTES = BLOCKS[-1] + 3 * 64 + 5 * 32


def lengths(itemsize, size):
    """Yield numbers of elements at and around every boundary."""
    yield from (0, 1, 64 * size // itemsize - 1, 64 * size // itemsize + 1)
    for boundary in BOUNDARIES:
        yield from (boundary // itemsize + each for each in (-1, 0, 1))
    for block in BLOCKS:
        yield block // itemsize + block % 7 - 1
    yield BLOCKS[0] // itemsize
    yield MOST_BYTES // itemsize


def numbers(op, dtype, rank):
    """Return what `rank` brings: numbers whose reduction is exact in every order."""
    random = np.random.default_rng([7, rank])
    length = MOST_BYTES // dtype.itemsize
    if dtype.kind in "iu" and op != "mean":
        info = np.iinfo(dtype)  # sums and products wrap
        return random.integers(info.min, info.max, length, dtype, endpoint=True)
    if dtype.kind == "b":
        return random.integers(0, 2, length).astype(bool)
    if op == "prod":
        signs = random.choice([-1, 1], length)
        return (signs * random.choice([0.5, 1, 2], length)).astype(dtype)
    low = 0 if dtype.kind == "u" else -8
    values = random.integers(low, 9, length).astype(dtype)
    if dtype.kind == "c":
        values += 1j * random.integers(low, 9, length)
    if op in ("min", "max") and dtype.kind == "f" and dtype.char != "g":
        values[random.random(length) < 0.01] = np.nan
        values[random.random(length) < 0.01] = np.inf
    return values


def digest(arrays):
    """Return a digest of the bits of `arrays`, but for those that a longdouble leaves unused."""
    found = hashlib.sha256()
    for array in arrays:
        narrower = {"g": np.float64, "G": np.complex128}.get(array.dtype.char, array.dtype)
        found.update(array.astype(narrower).tobytes())
    return found.hexdigest()


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, marks=pytest.mark.thorough) if dtype.char in "BhIlG" else dtype
        for dtype in DTYPES
    ],
    ids=lambda dtype: f"{dtype.name} {dtype.char}",
)
def test_every_dtype_op_and_size(strategy, rank, size, op, dtype):
    if not can_reduce(op, dtype):
        with pytest.raises(TypeError):
            strategy.reduce(op, np.ones(3, dtype))
        return
    rows = [numbers(op, dtype, each) for each in range(size)]
    with np.errstate(all="ignore"):
        expected = expected_of(op, rows)
    chosen = list(lengths(dtype.itemsize, size))

    def reduce():
        replica = ms.get_replica_context()
        for number, length in enumerate(chosen):
            part = rows[rank][:length]
            if number % 2:
                yield replica.all_reduce(op, part, SHARED)
            else:
                yield replica.start_all_reduce(op, part, SHARED).wait()

    results = result_of(strategy, lambda: list(reduce()))
    for length, result in zip(chosen, results, strict=True):
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected[:length])
    digests = strategy.extended._collectives.gather_json(digest(results))
    assert digests == [digests[0]] * size
    assert digest([rows[rank]]) == digest([numbers(op, dtype, rank)])


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("dtype", ["u2", "f4", "f8", "c16"])
def test_blocks_cut_through_the_arrays_of_a_message(strategy, rank, size, op, dtype):
    if not can_reduce(op, dtype):
        pytest.skip("has no order")
    random = np.random.default_rng(5)
    for _ in range(6):
        sizes = random.choice([0, 1, 100, 5_001, 17_003, 40_000, 150_001], random.integers(2, 12))
        nests = [
            [np.arange(length) % 9 + each + k for k, length in enumerate(sizes)]
            for each in range(size)
        ]
        rows = [[array.astype(dtype) for array in nest] for nest in nests]
        results = result_of(
            strategy, lambda rows=rows: ms.get_replica_context().all_reduce(op, rows[rank], SHARED)
        )
        for k, result in enumerate(results):
            np.testing.assert_array_equal(result, expected_of(op, [row[k] for row in rows]))


def test_floats_have_the_same_bits_on_all_ranks(strategy, rank, size):
    for dtype in ("f4", "f8", "c8"):
        for length in (3, 2_000, 10_001, 300_007):
            row = np.random.default_rng([rank, length]).normal(size=length).astype(dtype)
            for op in ("sum", "mean", "prod"):
                result = strategy.reduce(op, row)
                digests = strategy.extended._collectives.gather_json(digest([result]))
                assert digests == [digests[0]] * size


@pytest.mark.parametrize("who", ["all ranks", "rank 0"])
def test_copies_past_the_caches_have_the_same_bits(strategy, rank, size, who):
    node = strategy.extended._collectives.channel.transport.node
    if node is None:
        pytest.skip("no ranks share memory")
    sequence = node._memory.reductions
    row = np.random.default_rng(rank).normal(size=2**20).astype("f4")

    def reduce(length):
        return result_of(
            strategy, lambda: ms.get_replica_context().all_reduce("sum", row[:length], SHARED)
        )

    for length in (1_000, 4_097, 8_192, 100_003, 2**17, 2**20):
        usual = digest([reduce(length)])
        if rank == 0 or who == "all ranks":
            sequence.copy_past_caches(1000)
        past = digest([reduce(length)])
        sequence.copy_past_caches(0)
        found = strategy.extended._collectives.gather_json([usual, past])
        assert found == [[usual] * 2] * size


@pytest.mark.fast
def test_memory_is_shared_where_it_can_be(strategy, size):
    from mpistrat.native import native_library

    is_shared = strategy.extended._collectives.channel.transport.node is not None
    assert is_shared is (size > 1 and native_library() is not None)


def test_narrow_floats_are_no_business_of_shared_memory(strategy, size):
    for dtype in DTYPES:
        if dtype.name in NARROW:
            result = strategy.reduce("sum", np.ones(30_000, dtype))
            assert result.dtype == dtype
            assert (result == size).all()


@pytest.mark.parametrize("length", [3, 3_000, 100_000, 400_000])
def test_who_is_interrupted_before_the_agreement_may_try_again(strategy, rank, size, length):
    """Ranks copy into shared memory before they agree, and must take that back."""

    def reduce(number):
        result = strategy.reduce("sum", np.full(length, rank + number, np.float32))
        assert (result == size * (size - 1) // 2 + size * number).all()

    for who in (None, 0, size - 1):
        for other in (length, 100_000):
            reduce(1)
            with inject(KeyError("interrupted"), rank=who, collective=1, strategy=strategy):
                try:
                    reduce(2)
                except KeyError:
                    reduce(2)
            strategy.extended.reduce_to("sum", np.ones(other), "/job:worker/task:0/device:CPU:0")
            reduce(3)


@pytest.mark.parametrize("op", ["mean", pytest.param("max", marks=pytest.mark.thorough)])
@pytest.mark.parametrize(
    "fill", ["no rank", pytest.param("rank 0", marks=pytest.mark.thorough), "all ranks"]
)
def test_results_are_right_wherever_they_lie(strategy, rank, size, op, fill):
    if fill == "all ranks" or (fill == "rank 0" and rank == 0):
        pool = strategy.extended._collectives.channel.pool
        held = [pool.take((2**22,), np.dtype(np.uint8)) for _ in range(17)]
        assert len({array.ctypes.data for array in held}) == len(held)
    for length in (16_383, 131_073, 262_145, 1_048_577):
        for dtype in (np.float32, np.float64):
            rows = [np.arange(length, dtype=dtype) % 97 + each for each in range(size)]
            nests = [[row, row[: length // 3] * 2] for row in rows]
            results = result_of(
                strategy,
                lambda nests=nests: ms.get_replica_context().all_reduce(op, nests[rank], SHARED),
            )
            for k, result in enumerate(results):
                expected = expected_of(op, [nest[k] for nest in nests])
                np.testing.assert_allclose(result, expected, rtol=1e-6)
            (alone,) = result_of(
                strategy, lambda rows=rows: [ms.get_replica_context().all_reduce(op, rows[rank])]
            )
            np.testing.assert_allclose(alone, expected_of(op, rows), rtol=1e-6)
            alone[:] = -rank  # it is this rank's own
            strategy.extended._collectives.gather_json(None)
            assert (alone == -rank).all()
