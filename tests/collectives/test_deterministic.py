"""``deterministic=True``: bits that depend on the number of ranks and the values alone."""

import functools
from itertools import product

import numpy as np
import pytest
from ml_dtypes import bfloat16

import mpistrat as ms
from mpistrat.comm.packing import Message
from mpistrat.comm.pool import Pool
from mpistrat.comm.reducers import ReduceScatterReducer
from mpistrat.comm.selection import choose_reducer
from tests.devices import implementation
from tests.helpers import as_bytes, fresh_bytes, result_of, triangle
from tests.tree_reduction import expected_reduction, values_of

DETERMINISTIC = ms.CommunicationOptions(deterministic=True)
FLOATS = ["f2", bfloat16, "f4", "f8", ">f4", ">f8", "g"]
INTEGERS = ["i1", "u2", "i4", ">i8", "u8"]
CASES = [
    *((op, dtype) for op in ("sum", "mean", "prod") for dtype in [*FLOATS, *INTEGERS, "c8", "c16"]),
    *((op, dtype) for op in ("min", "max") for dtype in [*FLOATS, *INTEGERS, bool]),
]


@pytest.fixture
def all_reduce(strategy):
    def all_reduce(op, value, options=DETERMINISTIC):
        return result_of(strategy, lambda: ms.get_replica_context().all_reduce(op, value, options))

    return all_reduce


def accumulated(op, dtype):
    """Return the dtype that `dtype` is accumulated in."""
    dtype = np.dtype(dtype)
    if dtype.name in ("float16", "bfloat16"):
        return np.dtype(np.float32)
    return np.dtype(np.float64) if op == "mean" and dtype.kind in "iu" else dtype


def bits(array):
    """Return the bits of `array`, without those that a longdouble leaves unused."""
    array = np.asarray(array)
    native = array.astype(array.dtype.newbyteorder("="))
    return str(native.tolist()) if native.dtype.char == "g" else native.tobytes()


@pytest.mark.parametrize(("op", "dtype"), CASES)
def test_every_op_and_dtype_follows_the_tree(all_reduce, rank, size, op, dtype):
    rows = [values_of(r, (7, 5), dtype) for r in range(size)]
    wide = [row.astype(accumulated(op, dtype)) for row in rows]
    with np.errstate(all="ignore"):
        expected = expected_reduction(op, wide)
        if np.dtype(dtype).kind not in "iu" or op != "mean":
            expected = expected.astype(dtype)
    result = all_reduce(op, rows[rank])
    assert result.dtype == expected.dtype.newbyteorder("=")
    assert bits(result) == bits(expected)


@pytest.mark.parametrize(
    ("op", "dtype"),
    [
        *(("sum", dtype) for dtype in ("f2", "f4", "c16")),
        ("prod", "f4"),
        *(
            pytest.param(op, dtype, marks=pytest.mark.thorough)
            for op, dtype in product(("mean", "prod"), ("f2", "f4", "c16"))
            if (op, dtype) != ("prod", "f4")
        ),
    ],
)
def test_packs_and_sizes_do_not_matter(all_reduce, rank, op, dtype):
    whole = values_of(rank, 30_000, dtype)
    expected = as_bytes(all_reduce(op, whole))
    small = all_reduce(op, np.split(whole, 1000))
    assert as_bytes(np.concatenate(small)) == expected
    options = ms.CommunicationOptions(deterministic=True, bytes_per_pack=999)
    shuffled = np.random.default_rng(1).permutation(1000).tolist()
    parts = np.split(whole, 1000)
    mixed = all_reduce(op, [parts[i] for i in shuffled], options)
    back = dict(zip(shuffled, mixed, strict=True))
    assert b"".join(as_bytes(back[i]) for i in range(1000)) == expected
    one = all_reduce(op, whole[12_345:12_346])
    assert as_bytes(one) == expected[12_345 * whole.itemsize :][: whole.itemsize]


def test_blocks_do_not_matter_and_bound_the_memory(strategy, all_reduce, rank, monkeypatch):
    whole = values_of(rank, 10**6, "f4")
    expected = as_bytes(all_reduce("sum", whole))
    monkeypatch.setattr("mpistrat.comm.reducers._BYTES_PER_BLOCK", 2**15)
    monkeypatch.setattr("mpistrat.comm.reducers._BYTES_PER_SLICE", 16)
    reducer = ReduceScatterReducer(strategy.extended._collectives.channel.transport)
    copies = [whole.copy() for _ in range(3)]
    # Another thread may allocate during one of the reductions.
    peaks = [
        fresh_bytes(functools.partial(reducer.all_reduce, ms.ReduceOp.SUM, message))
        for message in (Message([each], [each], Pool()) for each in copies)
    ]
    assert all(as_bytes(each) == expected for each in copies)
    assert min(peaks) < 8 * 2**15


@pytest.mark.parametrize("op", ["sum", "mean", "max"])
def test_to_each_rank(strategy, rank, size, op):
    rows = [values_of(r, 1001, "f4") for r in range(size)]
    for root in range(size):
        there = f"/job:worker/task:{root}/device:CPU:0"
        result = strategy.extended.reduce_to(op, rows[rank], there, DETERMINISTIC)
        if rank == root:
            assert as_bytes(result) == as_bytes(expected_reduction(op, rows))
        else:
            assert result is None


def test_reductions_under_way_end_in_any_order(strategy, rank, size):
    rows = [values_of(r, (3, 50), "f4") for r in range(size)]

    def fn():
        replica = ms.get_replica_context()
        mine = rows[rank].copy()
        handles = [
            replica.start_all_reduce("sum", mine[0], DETERMINISTIC),
            replica.start_all_reduce("sum", np.full(9, rank)),
            replica.start_all_reduce("mean", mine[1], DETERMINISTIC),
            replica.start_all_reduce("prod", [mine[2]], DETERMINISTIC),
        ]
        mine[:] = 77
        assert replica.all_reduce("max", rank, DETERMINISTIC) == size - 1
        order = np.roll(range(4), rank)
        for position in order:
            handles[position].wait()
        return [handle.wait() for handle in handles]

    total, ranks, mean, (product,) = result_of(strategy, fn)
    assert ranks.tolist() == [triangle(size)] * 9
    for op, result, i in (("sum", total, 0), ("mean", mean, 1), ("prod", product, 2)):
        assert as_bytes(result) == as_bytes(expected_reduction(op, [row[i] for row in rows]))


def test_a_strategy_has_it_for_all_of_its_calls(rank, size):
    strategy = ms.MPIStrategy(device="cpu", communication_options=DETERMINISTIC)
    rows = [values_of(r, 501, "f4") for r in range(size)]
    total = expected_reduction("sum", rows)
    assert as_bytes(strategy.reduce("sum", rows[rank])) == as_bytes(total)
    with strategy.scope():
        variable = ms.Variable(np.zeros(501, np.float32))
        optimizer = ms.optimizers.SGD(1.0)
        merged = ms.Variable(np.zeros(501, np.float32), aggregation=ms.VariableAggregation.MEAN)
        on_read = ms.Variable(
            np.zeros(501, np.float32),
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )

    def fn():
        optimizer.apply_gradients([(rows[rank], variable)])
        merged.assign(rows[rank])
        on_read.assign(rows[rank])
        result = ms.get_replica_context().all_reduce("prod", rows[rank])
        pulled = ms.gradients.all_reduce_pullback("sum", rows[rank], total, rows[rank])
        return result, pulled

    product, pulled = result_of(strategy, fn)
    assert as_bytes(product) == as_bytes(expected_reduction("prod", rows))
    assert as_bytes(pulled) == as_bytes(total)
    assert as_bytes(variable.numpy()) == as_bytes(0 - total)
    assert as_bytes(merged.numpy()) == as_bytes(expected_reduction("mean", rows))
    assert as_bytes(on_read.numpy()) == as_bytes(total)


@pytest.mark.parametrize("op", ["sum", "mean", "prod", "min", "max"])
def test_an_axis_and_the_layout_of_an_array(rank, op):
    strategy = ms.MPIStrategy(device="cpu", communication_options=DETERMINISTIC)
    value = values_of(rank, (300, 4), "f4")[: 300 - rank]
    expected = strategy.reduce(op, value, axis=0)
    for other in (np.asfortranarray(value), value.astype(">f4"), value[::-1].copy()[::-1]):
        assert as_bytes(strategy.reduce(op, other, axis=0)) == as_bytes(expected)


def test_one_device_and_the_default_strategy():
    value = values_of(0, 99, "f2")
    one = ms.OneDeviceStrategy("cpu:0")
    result = one.run(lambda: ms.get_replica_context().all_reduce("mean", value, DETERMINISTIC))
    assert as_bytes(result.values[0]) == as_bytes(value)
    result = ms.get_replica_context().all_reduce("sum", {"a": value}, DETERMINISTIC)
    assert as_bytes(result["a"]) == as_bytes(value)


def test_empty_arrays_and_numbers(all_reduce, rank, size):
    total = all_reduce("sum", {"none": np.zeros((0, 3), np.float32), "number": 2.5, "one": rank})
    assert total["none"].shape == (0, 3)
    assert total["number"] == 2.5 * size
    assert total["one"] == triangle(size)


def test_options_that_differ_are_a_mismatch(strategy, others):
    options = ms.CommunicationOptions(deterministic=bool(others))
    with pytest.raises(ms.errors.CollectiveMismatchError, match="with deterministic=True"):
        strategy.extended.reduce_to("sum", np.ones(3), "cpu:0", options)


@pytest.mark.parametrize(
    ("op", "dtype"), [("sum", "f4"), ("mean", "f8"), ("prod", "c8"), ("min", "f4")]
)
def test_what_moves_the_arrays_does_not_matter(all_reduce, rank, size, op, dtype):
    if op == "min" and size > 1:
        length, odd = 999, np.array([np.nan, -0.0, 0.0], dtype)
    else:
        length, odd = 50_001, np.array([np.nan, -np.nan, np.inf], dtype)
    value = values_of(rank, length, dtype)
    value[rank::7] = odd[rank % 3]
    by_mpi = ms.CommunicationOptions(deterministic=True, implementation=implementation("MPI"))
    expected = all_reduce(op, value, by_mpi)
    for part in (slice(None), slice(0, 300), slice(17, 18)):
        assert as_bytes(all_reduce(op, value[part])) == as_bytes(expected[part])
        assert as_bytes(all_reduce(op, [value[part]])[0]) == as_bytes(expected[part])


def test_it_costs_nothing_on_one_node(strategy, rank, size):
    transport = strategy.extended._collectives.channel.transport
    if transport.node is None or not transport.node.keeps_order:
        pytest.skip("no ranks share memory")
    dtype = np.dtype(np.float32)
    for num_bytes in (4, 2**16, 2**24):
        reducer, why = choose_reducer(transport, DETERMINISTIC, ms.ReduceOp.SUM, dtype, num_bytes)
        assert reducer is transport.node, why
    rows = [values_of(r, 100_001, "f4") for r in range(size)]
    shared = ms.CommunicationOptions(implementation=ms.CommunicationImplementation.SHARED)
    default = result_of(
        strategy, lambda: ms.get_replica_context().all_reduce("sum", rows[rank], shared)
    )
    assert as_bytes(default) == as_bytes(expected_reduction("sum", rows))
