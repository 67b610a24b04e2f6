"""The reducers of device arrays give what the host gives, bit for bit."""

import logging

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arrays import Device
from mpistrat.collectives import reduction
from mpistrat.comm import device_reducers, packing
from mpistrat.comm.wire import wire_dtype
from mpistrat.mpi.world import open_world
from mpistrat.strategies.devices import open_device_capabilities
from tests.comm.fake_devices import WAYS, FakeCapabilities, OnDevice, capabilities_of, to_device
from tests.helpers import as_bytes
from tests.tree_reduction import values_of

Op = ms.ReduceOp
NUMBERS = ["i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "F", "D"]
ORDERED = [dtype for dtype in [*NUMBERS, "?"] if dtype not in "FD"]
DTYPES = {op: ORDERED if op in (Op.MIN, Op.MAX) else NUMBERS for op in Op}


@pytest.fixture(params=WAYS)
def collectives(request, strategy):
    """Collectives between devices that are stood in for by the host."""
    return with_ways(strategy, request.param)


def with_ways(strategy, name):
    collectives = strategy.extended._collectives
    collectives.capabilities = capabilities_of(name)
    return collectives


class JoinByNumPy:
    """Does what the kernel of `Join` does, on the host, where these tests keep their devices."""

    def __init__(self, sizes, target):
        self._target = target

    def __call__(self, arrays):
        np.concatenate([np.asarray(each).reshape(-1) for each in arrays], out=self._target)


@pytest.fixture(autouse=True)
def without_cupy(monkeypatch):
    monkeypatch.setattr(packing, "Join", JoinByNumPy)
    monkeypatch.setattr(reduction, "describe_on_device", lambda arrays, device: None)


@pytest.fixture
def small_parts(monkeypatch):
    monkeypatch.setattr(device_reducers, "_MIN_PART_BYTES", 64)
    monkeypatch.setattr(device_reducers, "_MAX_PART_BYTES", 64)


def reduced(collectives, op, arrays, **options):
    with collectives.call("all_reduce", options=ms.CommunicationOptions(**options)) as call:
        return call.all_reduce(op, arrays)


def reduced_to(collectives, op, arrays, root):
    with collectives.call("reduce_to") as call:
        return call.reduce(op, arrays, root)


def started(collectives, op, arrays):
    with collectives.call("start_all_reduce") as call:
        return call.start_all_reduce(op, arrays)


def numbers(rank, shape, dtype):
    """Return small whole numbers, whose sums and products are exact in any order."""
    values = (np.arange(np.prod(shape, dtype=int)) % 3 + rank % 2).reshape(shape)
    return values.astype(dtype)


def nest(rank, op):
    """Return arrays of every dtype and of unlike shapes and layouts."""
    arrays = []
    for dtype in DTYPES[op]:
        arrays += [numbers(rank, shape, dtype) for shape in [(), (5,), (0, 2), (3, 4)]]
        arrays += [numbers(rank, (4, 3), dtype).T, numbers(rank, (9,), dtype)[::2]]
    return arrays


def assert_same(found, expected):
    assert [each.dtype for each in found] == [each.dtype for each in expected]
    assert [each.shape for each in found] == [each.shape for each in expected]
    assert [as_bytes(each) for each in found] == [as_bytes(each) for each in expected]


@pytest.mark.thorough_product
@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("bytes_per_pack", [1, 100, 2**20])
def test_a_nest_on_the_device_is_reduced_as_on_the_host(collectives, rank, op, bytes_per_pack):
    arrays = nest(rank, op)
    sources = [to_device(each) for each in arrays]
    expected = reduced(collectives, op, arrays, bytes_per_pack=bytes_per_pack)
    found = reduced(collectives, op, sources, bytes_per_pack=bytes_per_pack)
    assert_same(found, expected)
    assert_same(sources, arrays)
    for i, each in enumerate(found):
        assert each.flags.writeable
        others = sources + found[:i]
        assert not any(np.shares_memory(each, other) for other in others)


@pytest.mark.parametrize("op", [Op.SUM, Op.MAX])
def test_host_and_device_arrays_travel_in_one_call(collectives, rank, op):
    arrays = nest(rank, op)
    mixed = [to_device(each) if i % 3 else each for i, each in enumerate(arrays)]
    assert_same(reduced(collectives, op, mixed), reduced(collectives, op, arrays))


@pytest.mark.parametrize("op", [Op.MIN, Op.MAX])
@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_nan_wins_on_the_device_too(collectives, rank, size, op, dtype):
    last = np.nan if rank == size - 1 else 1
    values = np.array([rank, -rank, -0.0, np.inf, -np.inf, last], dtype)
    expected = reduced(collectives, op, [values])
    (found,) = reduced(collectives, op, [to_device(values)])
    assert_same([found], expected)
    assert np.isnan(found[5])
    assert found[0] == (0 if op is Op.MIN else size - 1)


@pytest.mark.thorough_product
@pytest.mark.parametrize("op", [Op.SUM, Op.MEAN])
@pytest.mark.parametrize("options", [{"deterministic": True}, {"wire_dtype": "float16"}])
def test_our_own_arithmetic_stays_on_the_host(collectives, rank, op, options):
    arrays = nest(rank, op)
    sources = [to_device(each) for each in arrays]
    assert_same(
        reduced(collectives, op, sources, **options), reduced(collectives, op, arrays, **options)
    )


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("dtype", ["u1", "f4", "D"])
def test_parts_follow_each_other_through_the_buffers(strategy, rank, op, dtype):
    if dtype not in DTYPES[op]:
        pytest.skip("has no order")
    collectives = with_ways(strategy, "staged")
    per_part = 64 // wire_dtype(op, np.dtype(dtype)).itemsize
    for parts in range(6):
        for length in {max(parts * per_part + extra, 0) for extra in (-1, 0, 1)}:
            array = numbers(rank, (length,), dtype)
            before = collectives.capabilities.copier.num_fetches
            found = reduced(collectives, op, [to_device(array)])
            assert collectives.capabilities.copier.num_fetches - before == -(-length // per_part)
            assert_same(found, reduced(collectives, op, [array]))


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("dtype", ["f4", "f8", "F"])
def test_in_shared_memory_parts_change_no_bit(strategy, rank, dtype):
    collectives = with_ways(strategy, "staged")
    if collectives.channel.transport.node is None:
        pytest.skip("MPI may choose another order for another size")
    shared = ms.CommunicationImplementation.SHARED
    array = values_of(rank, (10_000,), dtype)
    for op in (Op.SUM, Op.MEAN):
        expected = reduced(collectives, op, [array], implementation=shared)
        found = reduced(collectives, op, [to_device(array)], implementation=shared)
        assert_same(found, expected)


def test_in_a_world_of_one_nothing_moves(monkeypatch):
    collectives = ms.OneDeviceStrategy().extended._collectives
    for way in ("mpi", "staged"):
        monkeypatch.setattr(collectives, "capabilities", capabilities_of(way))
        arrays = nest(0, Op.SUM)
        found = reduced(collectives, Op.SUM, [to_device(each) for each in arrays])
        assert_same(found, [np.ascontiguousarray(each).reshape(each.shape) for each in arrays])
        (root,) = reduced_to(collectives, Op.MEAN, [to_device(np.ones(3))], 0)
        assert (root == 1).all()


@pytest.mark.usefixtures("small_parts")
def test_one_rank_alone_may_get_the_result(collectives, rank, size):
    for root in range(size):
        for op in (Op.SUM, Op.MEAN, Op.MAX):
            arrays = nest(rank, op)
            sources = [to_device(each) for each in arrays]
            found = reduced_to(collectives, op, sources, root)
            expected = reduced_to(collectives, op, arrays, root)
            assert_same(sources, arrays)
            assert (found is None) == (rank != root)
            if rank == root:
                assert_same(found, expected)


@pytest.mark.parametrize("small", [0, 3])
def test_started_reductions_end_in_any_order(collectives, rank, small):
    def with_small(array):
        return [array, array[:small]] if small else [array]

    for order in (1, -1):
        arrays = [numbers(rank + i, (1000,), "f4") for i in range(4)]
        sources = [to_device(each) for each in arrays]
        ends = [started(collectives, Op.MEAN, with_small(each)) for each in sources]
        for each in sources:
            each[...] = 99
        found = [end() for end in ends[::order]][::order]
        for each, array in zip(found, arrays, strict=True):
            assert_same(each, reduced(collectives, Op.MEAN, with_small(array)))


@pytest.mark.parametrize(
    ("way", "reducer", "why"),
    [
        ("staged", "StagedReducer", "MPI is not proved, and there is no NCCL; "),
        ("mpi", "DirectReducer", "MPI is proved CUDA-aware, and there is no NCCL"),
        ("nccl", "NcclReducer", "each rank has its own GPU"),
    ],
)
def test_the_log_says_what_was_chosen_and_why(strategy, caplog, way, reducer, why):
    collectives = with_ways(strategy, way)
    with caplog.at_level(logging.DEBUG, "mpistrat"):
        reduced(collectives, Op.SUM, [to_device(np.ones(3, np.float32))])
    assert f"3 x float32 by {reducer} over" in caplog.text
    assert f"({why}" in caplog.text


def test_ranks_whose_arrays_lie_elsewhere_are_named(strategy, others):
    collectives = with_ways(strategy, "staged")
    array = np.ones(3)
    with pytest.raises(ms.errors.CollectiveMismatchError, match="in device memory"):
        reduced(collectives, Op.SUM, [array if others else to_device(array)])


def test_what_nccl_does_not_know_is_refused_where_it_is_asked_for(strategy, rank):
    collectives = with_ways(strategy, "nccl")
    nccl = ms.CommunicationImplementation.NCCL
    array = numbers(rank, (4,), "i2")
    with pytest.raises(TypeError, match="NCCL cannot reduce arrays of dtype int16 with SUM"):
        reduced(collectives, Op.SUM, [to_device(array)], implementation=nccl)
    expected = reduced(collectives, Op.SUM, [array])
    assert_same(reduced(collectives, Op.SUM, [to_device(array)]), expected)
    assert_same(reduced(collectives, Op.SUM, [array], implementation=nccl), expected)


def test_staged_is_the_same_as_mpi_for_host_arrays(strategy, counts, rank):
    collectives = strategy.extended._collectives
    for name in ("STAGED", "MPI"):
        counts.clear()
        implementation = ms.CommunicationImplementation[name]
        reduced(collectives, Op.SUM, [np.ones(10)], implementation=implementation)
        assert counts == {"all_reduce": 1}


def test_without_a_gpu_nothing_is_open(strategy):
    capabilities = open_device_capabilities(open_world(None), Device("cpu"), None)
    assert capabilities.places([np.ones(3), to_device(np.ones(3))]) == ()
    assert (capabilities.copier, capabilities.link, capabilities.why_not_mpi) == (None, None, "")
    assert capabilities == strategy.extended._collectives.capabilities


def test_where_some_ranks_have_no_gpu_all_know(strategy, rank, size, others):
    capabilities = open_device_capabilities(
        open_world(None), Device("gpu") if others else Device("cpu"), True
    )
    assert capabilities.copier is None
    assert (
        capabilities.why_not_mpi
        == capabilities.why_not_nccl
        == f"there is no GPU on rank {size - 1}"
    )


def test_stand_ins_are_distinguished_from_host_arrays(strategy):
    capabilities = capabilities_of("staged")
    assert isinstance(capabilities, FakeCapabilities)
    assert isinstance(to_device(np.ones(2)), OnDevice)
    assert capabilities.places([np.ones(2), to_device(np.ones(2))]) == (False, True)
