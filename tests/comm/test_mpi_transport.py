"""Messages longer than MPI's int can count travel in parts: here with a low limit."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.collectives.operations.broadcast import broadcast
from mpistrat.comm import mpi_transport
from tests.helpers import result_of, triangle
from tests.random_arrays import expected_of

MPI = ms.CommunicationOptions(implementation=ms.CommunicationImplementation.MPI)


@pytest.fixture(params=[24, 500])
def limit(request, monkeypatch):
    monkeypatch.setattr(mpi_transport, "_PART_BYTES", request.param)
    return request.param


def numbers(rank, shape, dtype):
    return (np.arange(np.prod(shape)).reshape(shape) * 3 + rank).astype(dtype)


@pytest.mark.parametrize("op", ["sum", "mean", "max", "prod"])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((99,), "f4"), ((7, 9), "u1"), ((0, 3), "i8"), ((), "g")]
)
def test_reductions(strategy, rank, size, limit, op, shape, dtype):
    rows = [numbers(each, shape, dtype) for each in range(size)]
    expected = expected_of(op, rows)

    def reduce():
        replica = ms.get_replica_context()
        handles = [replica.start_all_reduce(op, rows[rank], MPI) for _ in range(3)]
        nest = replica.all_reduce(op, [rows[rank], {"a": rows[rank]}], MPI)
        return [
            replica.all_reduce(op, rows[rank], MPI),
            *(each.wait() for each in handles[::-1]),
            nest[0],
            nest[1]["a"],
        ]

    for result in result_of(strategy, reduce):
        assert result.dtype == expected.dtype
        np.testing.assert_array_equal(result, expected)
    device = f"/job:worker/task:{size - 1}/device:CPU:0"
    reduced = strategy.extended.reduce_to(op, ms.PerReplica(rows[rank]), device, MPI)
    if rank == size - 1:
        np.testing.assert_array_equal(reduced, expected)


@pytest.mark.parametrize(
    "dtype",
    ["i2", "c16", *(pytest.param(dtype, marks=pytest.mark.thorough) for dtype in ("f8", "?"))],
)
def test_gathers_of_different_lengths(strategy, rank, size, limit, dtype):
    for lengths in (
        [3] * size,
        [0] * size,
        range(size),
        [0, 70, 1, 20][:size],
        [500, 0, 1, 9][:size],
    ):
        rows = [numbers(each, (length, 2), dtype) for each, length in enumerate(lengths)]
        gathered = strategy.gather(rows[rank], 0)
        assert gathered.dtype == dtype
        np.testing.assert_array_equal(gathered, np.concatenate(rows))
        across = strategy.gather(rows[rank].T, 1)
        np.testing.assert_array_equal(across, np.concatenate(rows).T)


def test_a_gather_to_one_rank(strategy, rank, size, limit):
    transport = strategy.extended._collectives.channel.transport
    counts = [3 * each + 1 for each in range(size)]
    part = np.full(counts[rank], rank, np.int32)
    for root in range(size):
        gathered = transport.gather(part, counts, root)
        if rank == root:
            assert gathered.tolist() == np.repeat(np.arange(size), counts).tolist()
        else:
            assert gathered is None


@pytest.mark.parametrize("dtype", ["u1", "i2", "c16", "S3", [("a", "f4"), ("b", "i1")]], ids=str)
def test_exchanges_of_all_lengths(strategy, rank, size, limit, dtype):
    transport = strategy.extended._collectives.channel.transport
    chance = np.random.default_rng(7)
    for longest in (0, 3, 30, 400):
        lengths = chance.integers(0, longest + 1, (size, size))  # from a rank, to a rank
        values = [np.zeros(lengths[each].sum(), dtype) for each in range(size)]
        for each in values:
            each.view("u1")[:] = chance.integers(0, 99, each.nbytes)
        sent, incoming = lengths[rank].tolist(), lengths[:, rank].tolist()
        found = transport.all_to_all(values[rank], sent, incoming)
        parts = [
            np.split(values[each], np.cumsum(lengths[each])[:-1])[rank] for each in range(size)
        ]
        assert found.dtype == np.dtype(dtype)
        assert found.tobytes() == np.concatenate(parts).tobytes()


def test_broadcasts(strategy, rank, size, limit):
    collectives = strategy.extended._collectives
    for root in range(size):
        for shape in ((101,), (20, 3), (), (0,)):
            expected = numbers(root, shape, "f8")
            with collectives.call("broadcast") as call:
                found = broadcast(call, numbers(rank, shape, "f8"), root=root)
            assert (found == expected).all()


def test_what_is_agreed_and_checkpoints(strategy, rank, size, limit, shared_tmp_path):
    assert strategy.extended._collectives.gather_json("x" * 100 * rank) == [
        "x" * 100 * each for each in range(size)
    ]
    with strategy.scope():
        seen = ms.Variable(
            np.zeros(300),
            name="seen",
            aggregation=ms.VariableAggregation.SUM,
            synchronization=ms.VariableSynchronization.ON_READ,
        )
    strategy.run(lambda: seen.assign(np.arange(300.0) * rank))
    checkpoint = ms.Checkpoint(seen=seen)
    path = checkpoint.write(str(shared_tmp_path / "x.h5"))
    strategy.run(lambda: seen.assign(np.zeros(300)))
    checkpoint.restore(path).assert_consumed()
    np.testing.assert_allclose(seen.numpy(), np.arange(300.0) * triangle(size))
