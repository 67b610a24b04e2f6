"""``all_reduce(..., out=)``: results in memory of the caller, also where calls are repeated."""

import numpy as np
import pytest

import mpistrat as ms
from tests.devices import array_equal
from tests.helpers import result_of

SIZES = [0, 1, 7, 4_000, 20_000, 300_000, 2_500_000]
REPEATS = 3  # from the second call on, the short way is taken


def of_rank(rank, size, dtype="f4"):
    return (np.arange(size) % 50 + rank).astype(dtype)


def summed(num_ranks, size, dtype="f4"):
    return sum(of_rank(rank, size, dtype) for rank in range(num_ranks)).astype(dtype)


def all_reduce(strategy, op, value, **more):
    return result_of(strategy, lambda: ms.get_replica_context().all_reduce(op, value, **more))


@pytest.mark.parametrize("length", SIZES)
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_a_result_in_place(strategy, rank, size, length, op):
    expected = {
        "sum": summed(size, length),
        "mean": summed(size, length) / np.float32(size),
        "max": of_rank(size - 1, length),
    }[op]
    for _ in range(REPEATS):
        value = of_rank(rank, length)
        result = all_reduce(strategy, op, value, out=value)
        assert result is value
        assert array_equal(value, expected)


@pytest.mark.parametrize("length", SIZES)
def test_a_result_elsewhere(strategy, rank, size, length):
    value, out = of_rank(rank, length), np.empty(length, np.float32)
    for _ in range(REPEATS):
        out[...] = -1
        assert all_reduce(strategy, ms.ReduceOp.SUM, value, out=out) is out
        assert array_equal(out, summed(size, length))
        assert array_equal(value, of_rank(rank, length))


@pytest.mark.parametrize("length", [10, 20_000, 300_000])
@pytest.mark.parametrize("shift", [-3, 3])
def test_memory_that_overlaps(strategy, rank, size, length, shift):
    for _ in range(REPEATS):
        memory = np.zeros(length + 3, np.float32)
        value, out = (memory[3:], memory[:-3]) if shift < 0 else (memory[:-3], memory[3:])
        value[...] = of_rank(rank, length)
        all_reduce(strategy, "sum", value, out=out)
        assert array_equal(out, summed(size, length))


def test_arrays_of_a_nest_may_swap(strategy, rank, size):
    first, second = of_rank(rank, 200_000), of_rank(rank + 1, 200_000)
    all_reduce(strategy, "sum", [first, second], out=[second, first])
    assert array_equal(second, summed(size, 200_000))
    assert array_equal(first, summed(size, 200_000) + size)


@pytest.mark.parametrize("dtype", ["i4", "f8", "c8", ">f8", "f2"])
def test_nests_strides_and_dtypes(strategy, rank, size, dtype):
    nest = {"a": of_rank(rank, 6, dtype).reshape(2, 3), "b": [of_rank(rank, 30_000, dtype)]}
    columns = np.zeros((2, 6), dtype)[:, ::2]
    out = {"a": columns, "b": [np.zeros(30_000, dtype)]}
    assert all_reduce(strategy, "sum", nest, out=out) is out
    assert array_equal(columns, summed(size, 6, dtype).reshape(2, 3))
    assert array_equal(out["b"][0], summed(size, 30_000, dtype))


def test_the_mean_of_integers_goes_to_floats(strategy, rank, size):
    value, out = np.array([rank, 1]), np.zeros(2)
    for _ in range(REPEATS):
        all_reduce(strategy, "mean", value, out=out)
        assert out.tolist() == [(size - 1) / 2, 1]
        with pytest.raises(ValueError, match="dtype float64"):
            all_reduce(strategy, "mean", value, out=value)


def test_ranks_may_differ_in_it(strategy, rank, size):
    for length in SIZES[1:]:
        for _ in range(REPEATS):
            value = of_rank(rank, length)
            result = all_reduce(strategy, "sum", value, out=None if rank == 0 else value)
            assert array_equal(result, summed(size, length))


def read_only():
    array = np.zeros(4)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize(
    ("value", "out", "error", "text"),
    [
        (np.ones(4), np.zeros(5), ValueError, r"shape \(4,\) and dtype float64, not \(5,\)"),
        (np.ones(4), np.zeros(4, "f4"), ValueError, "not .* float32"),
        (np.ones(4), read_only(), ValueError, "read-only"),
        (np.ones(4), [0.0] * 4, ValueError, "structure"),
        ([np.ones(4), 1.0], [np.ones(4), 2.0], TypeError, "out at '1' must be an array"),
        (
            ms.IndexedSlices(np.ones((1, 2)), np.array([0]), (3, 2)),
            np.ones(1),
            TypeError,
            "IndexedSlices",
        ),
    ],
)
def test_what_does_not_fit_is_refused_on_all_ranks(strategy, value, out, error, text):
    for _ in range(2):
        with pytest.raises(error, match=text):
            all_reduce(strategy, "sum", value, out=out)
    assert all_reduce(strategy, "sum", np.ones(4))[0] >= 1


@pytest.mark.parametrize("length", [2, 100_000])
def test_repeated_calls_that_disagree(strategy, others, length):
    for _ in range(REPEATS):
        all_reduce(strategy, "sum", np.ones(length))
    with pytest.raises(ms.errors.CollectiveMismatchError, match=rf"\({length},\)") as info:
        all_reduce(strategy, "sum", np.ones(length if others else length + 1))
    assert f"({length + 1},)" in str(info.value)
    assert "test_out.py" in str(info.value)


def test_a_repeated_call_inside_of_another_is_refused(strategy, size):
    def step():
        replica = ms.get_replica_context()
        for _ in range(REPEATS):
            replica.all_reduce("sum", np.ones(3))
        refused = pytest.raises(
            ms.errors.ContextError, match="all_reduce was called inside of outer"
        )
        with strategy.extended._collectives.call("outer"), refused:
            replica.all_reduce("sum", np.ones(3))
        assert replica.all_reduce("sum", np.ones(3))[0] == size

    strategy.run(step)


def test_repeated_calls_are_in_the_flight_record(strategy):
    channel = strategy.extended._collectives.channel
    for _ in range(REPEATS):
        all_reduce(strategy, "sum", 1.5)
    last = list(channel.flight.entries)[-2:]
    assert [(each.signature[0], each.state) for each in last] == [("all_reduce", "done")] * 2
    assert last[1].number == last[0].number + 1
    assert last[1].place[0].co_filename == __file__
    assert last[1].began_ns <= last[1].agreed_ns <= last[1].ended_ns
