"""The reducers of device arrays, on GPUs."""

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arrays import host_view
from mpistrat.comm.device_reducers import NcclReducer
from mpistrat.comm.wire import is_narrow
from mpistrat.cuda_api import count_gpus
from tests.comm.test_device_reducers import DTYPES, Op, nest, numbers
from tests.helpers import as_bytes, result_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(count_gpus() == 0, reason="needs a GPU and cupy"),
]


@pytest.fixture(params=["AUTO", "NCCL", "MPI", "STAGED"])
def options(request, gpus):
    capabilities = gpus.extended._collectives.capabilities
    why_not = {"NCCL": capabilities.why_not_nccl, "MPI": capabilities.why_not_mpi}.get(
        request.param
    )
    options = ms.CommunicationOptions(implementation=ms.CommunicationImplementation[request.param])
    if why_not:
        with pytest.raises(ValueError, match="Use AUTO"):
            result_of(gpus, lambda: all_reduce(Op.SUM, [np.ones(1)], options))
        pytest.skip(why_not)
    return options


@pytest.fixture
def gpus(monkeypatch):
    monkeypatch.setenv("MPISTRAT_SHARE_GPUS", "on")
    return ms.MPIStrategy(device="gpu")


def knows(options, op, dtype):
    """Return whether device arrays of `dtype` may be reduced with `options`."""
    is_nccl = options.implementation is ms.CommunicationImplementation.NCCL
    travels_as = np.float32 if is_narrow(np.dtype(dtype)) else dtype
    return not is_nccl or NcclReducer.knows(op, np.dtype(travels_as))


def all_reduce(op, values, options):
    return ms.get_replica_context().all_reduce(op, values, options)


def put(arrays):
    import cupy

    return [cupy.asarray(each) for each in arrays]


@pytest.mark.parametrize("op", Op)
def test_devices_give_the_bits_of_the_host(gpus, rank, op, options):
    arrays = [each for each in nest(rank, op) if knows(options, op, each.dtype)]
    sources = put(arrays)
    expected = result_of(gpus, lambda: all_reduce(op, arrays, ms.CommunicationOptions()))
    found = result_of(gpus, lambda: all_reduce(op, sources, options))
    assert all(each.device == source.device for each, source in zip(found, sources, strict=True))
    assert list(map(as_bytes, map(host_view, found))) == list(map(as_bytes, expected))
    assert list(map(as_bytes, map(host_view, sources))) == list(map(as_bytes, arrays))


@pytest.mark.parametrize("length", [2**20, 5 * 2**20 + 1])
def test_large_messages_in_many_parts(gpus, rank, options, length):
    array = numbers(rank, (length,), "f4")
    (source,) = put([array])
    default = ms.CommunicationOptions()
    expected = as_bytes(result_of(gpus, lambda: all_reduce(Op.SUM, array, default)))
    for _ in range(3):  # buffers and results are recycled
        found = result_of(gpus, lambda: all_reduce(Op.SUM, source, options))
        assert as_bytes(host_view(found)) == expected


def test_numbers_that_are_still_computed_are_waited_for(gpus, size, options):
    import cupy

    with cupy.cuda.Stream(non_blocking=True):
        array = cupy.ones((2048, 2048), cupy.float32)
        for _ in range(20):
            array = array @ array / 2048
        found = result_of(gpus, lambda: all_reduce(Op.SUM, array, options))
        assert (host_view(found) == size).all()


def test_started_reductions_overlap_and_end_in_any_order(gpus, rank, size, options):
    import cupy

    def step():
        arrays = [cupy.full(10**6, rank + i, cupy.float32) for i in range(3)]
        replica = ms.get_replica_context()
        handles = [replica.start_all_reduce("sum", each, options) for each in arrays]
        for each in arrays:
            each.fill(-1)
        return [float(handle.wait().max()) for handle in reversed(handles)]

    triangle = size * (size - 1) // 2
    assert result_of(gpus, step) == [triangle + size * i for i in (2, 1, 0)]


@pytest.mark.parametrize("dtype", DTYPES[Op.SUM])
def test_one_rank_alone_may_get_the_result(gpus, rank, size, dtype, options):
    (source,) = put([numbers(rank, (100,), dtype)])
    place = f"/job:worker/task:{size - 1}/device:CPU:0"
    if not knows(options, Op.SUM, dtype):
        with pytest.raises(TypeError, match="NCCL cannot reduce"):
            gpus.extended.reduce_to("sum", source, place, options)
        return
    found = gpus.extended.reduce_to("sum", source, place, options)
    expected = gpus.extended.reduce_to("sum", numbers(rank, (100,), dtype), place)
    assert (found is None) == (rank != size - 1)
    if found is not None:
        assert as_bytes(host_view(found)) == as_bytes(expected)
