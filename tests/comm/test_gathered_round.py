"""Rounds of few ranks over MPI, with which small reductions travel, as between nodes."""

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.comm import mpi_transport
from mpistrat.comm.ops import combine
from mpistrat.comm.rounds import mpi_round
from mpistrat.errors import CollectiveMismatchError
from mpistrat.options import ReduceOp
from tests.helpers import result_of

pytestmark = pytest.mark.mpi(min_size=2)


@pytest.fixture
def apart(monkeypatch):
    """A strategy of ranks that share no memory, and its transport."""
    monkeypatch.setattr(mpi_transport, "share_memory", lambda *_: (None, True))
    comm = MPI.COMM_WORLD.Dup()
    strategy = ms.MPIStrategy(comm=comm, device="cpu")
    yield strategy, strategy.extended._collectives.channel.transport
    comm.Free()


def reduce(strategy, op, array, **arguments):
    return result_of(strategy, lambda: ms.get_replica_context().all_reduce(op, array, **arguments))


def numbers(rank, dtype, length=3):
    # Sums of floats with rounding, so that the order of the operands shows.
    return (np.random.default_rng(rank).standard_normal(length) * 3).astype(dtype)


@pytest.mark.thorough_product
@pytest.mark.parametrize("op", ["sum", "mean", "min", "max", "prod"])
@pytest.mark.parametrize("dtype", ["i1", "u8", "f2", "f4", "f8", "c8"])
def test_every_call_gives_the_bits_of_the_tree(apart, rank, size, op, dtype):
    if op in ("min", "max") and dtype == "c8":
        pytest.skip("complex numbers have no order")
    strategy, transport = apart
    assert transport.node is None
    assert (transport.piggyback is not None) == (size <= 4)
    rows = np.array([numbers(each, dtype) for each in range(size)])
    for _ in range(3):
        found = reduce(strategy, op, rows[rank])
        is_cast = dtype == "f2" or (op == "mean" and dtype in ("i1", "u8"))
        if is_cast or (op, dtype) == ("prod", "c8"):
            np.testing.assert_allclose(found, _by_numpy(op, rows), rtol=1e-2, atol=0.5)
        else:
            expected = combine(ReduceOp.parse(op), rows.copy())
            assert np.asarray(found).tobytes() == expected.tobytes()


def _by_numpy(op, rows):
    wide = rows.astype("c16" if rows.dtype.kind == "c" else "f8")
    return getattr(wide, op)(axis=0) if op != "prod" else wide.prod(axis=0)


@pytest.mark.parametrize("length", [0, 1, 8, 9, 1000])
def test_lengths_around_the_room_and_in_place(apart, rank, size, length):
    strategy, _ = apart
    expected = np.full(length, sum(range(size)), np.float32)
    for _ in range(3):
        array = np.full(length, rank, np.float32)
        np.testing.assert_array_equal(reduce(strategy, "sum", array), expected)
        np.testing.assert_array_equal(array, np.full(length, rank, np.float32))
        assert reduce(strategy, "sum", array, out=array) is array
        np.testing.assert_array_equal(array, expected)


def test_small_arrays_travel_together(apart, rank, size):
    strategy, _ = apart
    for _ in range(3):
        one, two = reduce(strategy, "sum", [np.full(2, rank), np.full((1, 2), 1)])
        assert one.tolist() == [sum(range(size))] * 2
        assert two.tolist() == [[size, size]]


def test_without_checks_the_numbers_travel_alone(apart, rank, size, monkeypatch):
    strategy, _ = apart
    reduce(strategy, "sum", np.ones(2))
    monkeypatch.setattr(strategy.extended._collectives.channel, "checks", False)
    for _ in range(3):
        assert reduce(strategy, "sum", np.full(2, rank)).tolist() == [sum(range(size))] * 2


@pytest.mark.parametrize("num_calls", [1, 3])
def test_ranks_that_disagree_all_raise(apart, rank, num_calls):
    strategy, _ = apart
    array = np.full(2, rank)
    for _ in range(num_calls):
        reduce(strategy, "sum", array)
    with pytest.raises(CollectiveMismatchError, match=r'"max"(.|\n)*"sum"|"sum"(.|\n)*"max"'):
        reduce(strategy, "sum" if rank else "max", array)


def test_the_largest_values_show_what_differs(apart, rank, size):
    _, transport = apart
    made = mpi_round(transport.comm)
    made.send[:] = [rank, 7, 2**64 - 1 - rank, rank == 1]
    made.start()
    while not made.done():
        pass
    assert made.receive.tolist() == [size - 1, 7, 2**64 - 1, 1]
