"""``wire_dtype``: half the bytes, sums in float32."""

import numpy as np
import pytest
from ml_dtypes import bfloat16

import mpistrat as ms
from tests.devices import assert_array_equal
from tests.helpers import as_bytes, result_of, triangle
from tests.tree_reduction import expected_reduction, values_of

WIRES = {"float16": np.dtype("f2"), "bfloat16": np.dtype(bfloat16)}


class MeasuringTransport:
    """Notes which methods of a transport are called, and how many bytes each is given."""

    def __init__(self, transport):
        self._transport = transport
        self.calls = []

    def __getattr__(self, name):
        attribute = getattr(self._transport, name)
        if not callable(attribute):
            return attribute

        def measured(*args):
            num_bytes = sum(arg.nbytes for arg in args if isinstance(arg, np.ndarray))
            self.calls.append((name, num_bytes))
            return attribute(*args)

        return measured


@pytest.fixture
def calls(strategy, monkeypatch):
    channel = strategy.extended._collectives.channel
    measuring = MeasuringTransport(channel.transport)
    monkeypatch.setattr(channel, "transport", measuring)
    return measuring.calls


@pytest.fixture(params=WIRES)
def wire(request):
    return request.param


@pytest.fixture
def on_wire(wire):
    """A strategy that has the option for all of its calls."""
    options = ms.CommunicationOptions(wire_dtype=wire)
    return ms.MPIStrategy(device="cpu", communication_options=options)


def all_reduce(strategy, op, value, **options):
    options = ms.CommunicationOptions(**options)
    return result_of(strategy, lambda: ms.get_replica_context().all_reduce(op, value, options))


def expected_on_wire(op, rows, wire):
    """Round once, reduce in float32, round once."""
    with np.errstate(all="ignore"):
        rounded = [row.astype(wire).astype(np.float32) for row in rows]
        return expected_reduction(op, rounded).astype(wire).astype(rows[0].dtype)


@pytest.mark.thorough_product
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("dtype", ["f4", "f8", "g", ">f4", "f2", bfloat16])
def test_sums_are_those_of_rounded_values_and_rounded_once(strategy, rank, size, wire, op, dtype):
    rows = [values_of(r, (11, 3), dtype) for r in range(size)]
    own = np.dtype(dtype).name in WIRES
    expected = expected_on_wire(op, rows, np.dtype(dtype) if own else WIRES[wire])
    result = all_reduce(strategy, op, rows[rank], wire_dtype=wire)
    assert result.dtype == np.dtype(dtype).newbyteorder("=")
    assert result.tolist() == expected.tolist()
    packed = all_reduce(strategy, op, [rows[rank][:1], rows[rank][1:]], wire_dtype=wire)
    assert np.concatenate(packed).tolist() == expected.tolist()


@pytest.mark.host_memory
def test_bytes_are_halved_both_ways(strategy, calls, wire):
    if strategy.num_replicas_in_sync == 1:
        pytest.skip("nothing moves")
    arrays = [np.ones(100, np.float32) for _ in range(1000)]
    by_mpi = ms.CommunicationImplementation.MPI
    all_reduce(strategy, "sum", arrays, deterministic=True, implementation=by_mpi)
    wide = calls[:]
    calls.clear()
    all_reduce(strategy, "sum", arrays, wire_dtype=wire)
    assert [name for name, _ in calls] == ["all_to_all", "all_gather"]
    assert [(name, 2 * num_bytes) for name, num_bytes in calls] == wide
    calls.clear()
    halves = [array.astype(np.float16) for array in arrays]
    all_reduce(strategy, "sum", halves, wire_dtype=wire)
    assert [(name, 2 * num_bytes) for name, num_bytes in calls] == wide
    calls.clear()
    there = "/job:worker/task:0/device:CPU:0"
    options = ms.CommunicationOptions(wire_dtype=wire)
    strategy.extended.reduce_to("sum", arrays[0], there, options)
    assert calls[0] == ("all_to_all", 200)
    assert [name for name, _ in calls] == ["all_to_all", "gather"]


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *(("sum", dtype) for dtype in ("i4", "u8", "c8", "c16")),
        *(("mean", dtype) for dtype in ("i8", "c8")),
        *((op, dtype) for op in ("min", "max", "prod") for dtype in ("f2", bfloat16, "f4", "i8")),
        ("max", bool),
    ],
)
def test_everything_else_travels_unchanged(strategy, rank, wire, op, dtype):
    value = values_of(rank, 41, dtype)
    if np.dtype(dtype).kind in "iu":
        value *= 10_001 if op == "sum" else 1
    plain = all_reduce(strategy, op, value, deterministic=True)
    result = all_reduce(strategy, op, value, deterministic=True, wire_dtype=wire)
    assert result.dtype == plain.dtype
    assert as_bytes(result) == as_bytes(plain)


def test_a_nest_may_mix_dtypes(strategy, rank, size):
    rows = np.full(3, rank, "f8")
    nest = {"count": np.int64(2**40 + rank), "loss": np.float32(0.1), "rows": rows}
    total = all_reduce(strategy, "sum", nest, wire_dtype="float16")
    assert total["count"] == 2**40 * size + triangle(size)
    tenth = np.full(1, 0.1, np.float32)
    assert total["loss"] == expected_on_wire("sum", [tenth] * size, np.float16)[0]
    assert total["rows"].tolist() == [triangle(size)] * 3


def test_slices_travel_unchanged(strategy, rank, size):
    slices = ms.IndexedSlices(np.full((1, 2), 1e6 + rank), np.array([rank]), (9, 2))
    total = all_reduce(strategy, "sum", slices, wire_dtype="float16")
    assert total.values[:, 0].tolist() == [1e6 + r for r in range(size)]


@pytest.mark.parametrize("dtype", ["f2", "f4"])
def test_overflow_is_inf_on_every_rank_and_silent(strategy, rank, size, dtype):
    given = np.array([6e4, -6e4, 1 + rank, np.inf, np.nan], dtype)
    total = all_reduce(strategy, "sum", given, wire_dtype="float16")
    limit = 6e4 if size == 1 else np.inf
    assert_array_equal(total, [limit, -limit, size + triangle(size), np.inf, np.nan])
    mean = all_reduce(strategy, "mean", given, wire_dtype="float16")
    assert_array_equal(mean, [6e4, -6e4, (size + 1) / 2, np.inf, np.nan])
    large = np.array([1e5 if rank == size - 1 else 0, 1], np.float32)
    assert all_reduce(strategy, "sum", large, wire_dtype="float16").tolist() == [np.inf, size]
    wide = all_reduce(strategy, "sum", large, wire_dtype="bfloat16")
    assert wide[0] == np.float32(1e5).astype(bfloat16)


def test_small_differences_survive_in_float32_sums(strategy, rank, size):
    # 2048 + 1 is 2048 in float16, but the sum of three such ones is not lost.
    value = np.float16(2048 if rank == 0 else 1)
    total = all_reduce(strategy, "sum", value, wire_dtype="float16")
    assert total == np.float16(np.float32(2048 + size - 1))


def test_reductions_under_way(strategy, rank, size, wire):
    rows = [values_of(r, (2, 20), "f4") for r in range(size)]
    options = ms.CommunicationOptions(wire_dtype=wire)

    def fn():
        replica = ms.get_replica_context()
        handles = [replica.start_all_reduce("sum", row, options) for row in rows[rank]]
        for position in (0, 1) if rank % 2 else (1, 0):
            handles[position].wait()
        return [handle.wait() for handle in handles]

    for i, result in enumerate(result_of(strategy, fn)):
        expected = expected_on_wire("sum", [row[i] for row in rows], WIRES[wire])
        assert as_bytes(result) == as_bytes(expected)


def test_means_over_an_axis_are_exact_where_they_can_be(on_wire, rank):
    local = np.full((3000 + rank, 2), 50.0, np.float32)
    assert on_wire.reduce("mean", local, axis=0).tolist() == [50, 50]
    nothing = np.ones((0, 2), np.float32)
    assert np.isnan(on_wire.reduce("mean", nothing, axis=0)).all()
    integers = np.full((2 + rank, 2), 100_001)
    assert on_wire.reduce("mean", integers, axis=0).tolist() == [100_001.0] * 2
    assert on_wire.reduce("sum", integers, axis=0).dtype == np.int64
    halves = np.full((3000, 1), 20.0, np.float16)
    assert on_wire.reduce("mean", halves, axis=(0, 1)) == 20


def test_optimizers_use_it_and_their_result_is_the_same_everywhere(on_wire, wire, rank, size):
    rows = [values_of(r, (4, 5), "f4") for r in range(size)]
    with on_wire.scope():
        variable = ms.Variable(np.zeros((4, 5), np.float32))
        optimizer = ms.optimizers.SGD(1.0)
    on_wire.run(lambda: optimizer.apply_gradients([(rows[rank], variable)]))
    assert as_bytes(variable.numpy()) == as_bytes(0 - expected_on_wire("sum", rows, WIRES[wire]))


def test_pullbacks_use_it(on_wire, wire, rank, size):
    rows = [values_of(r, 6, "f4") for r in range(size)]
    value = np.zeros(6, np.float32)
    pulled = result_of(
        on_wire, lambda: ms.gradients.all_reduce_pullback("mean", value, value, rows[rank])
    )
    assert as_bytes(pulled) == as_bytes(expected_on_wire("mean", rows, WIRES[wire]))


def test_variables_and_metrics_do_not_lose_a_bit(on_wire, rank, size):
    on_read, summed = ms.VariableSynchronization.ON_READ, ms.VariableAggregation.SUM
    with on_wire.scope():
        on_read = ms.Variable(np.float32(0), synchronization=on_read, aggregation=summed)
        mirrored = ms.Variable(np.float32(0), aggregation=summed)
        mean = ms.metrics.Mean()

    def fn():
        on_read.assign(2.0**20 + rank)
        mirrored.assign(2.0**20 + rank)
        mean.update_state(np.full(2**10, 1e3 + rank))

    on_wire.run(fn)
    assert on_read.numpy() == mirrored.numpy() == 2.0**20 * size + triangle(size)
    assert mean.result() == np.float32(1e3 + (size - 1) / 2)
    saved = on_read._save_value()
    assert (saved is None) if rank else (saved == 2.0**20 * size + triangle(size))


def test_options_that_differ_are_a_mismatch(strategy, others):
    options = ms.CommunicationOptions(wire_dtype="float16" if others else "bfloat16")
    with pytest.raises(ms.errors.CollectiveMismatchError, match="with wire_dtype=float16"):
        strategy.extended.reduce_to("sum", np.ones(3), "cpu:0", options)


def test_one_device_rounds_too():
    one = ms.OneDeviceStrategy("cpu:0")
    value = np.array([0.1, 7e4], np.float32)
    result = all_reduce(one, "sum", value, wire_dtype="float16")
    assert as_bytes(result) == as_bytes(expected_on_wire("sum", [value], np.float16))
