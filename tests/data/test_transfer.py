"""Batches on the way to a GPU, on streams that do everything as late as they may."""

import types

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import nests
from mpistrat.arrays import Device, host_view
from mpistrat.cuda_api import count_gpus
from mpistrat.data import Dataset
from mpistrat.data.distribute import distribute
from mpistrat.data.distributed_dataset import transfer_to
from tests.devices import assert_array_equal
from tests.fake_cuda import Cuda

GPU = Device("gpu")

pytestmark = pytest.mark.host_memory  # these bring a GPU of their own


@pytest.fixture
def cuda(monkeypatch):
    """CUDA whose memory has always been used before, by what the program has still to do."""
    cuda = Cuda()

    def empty(shape, dtype):
        array = np.zeros(shape, dtype)
        cuda.program.work.append(lambda: array.fill(7))
        return array

    monkeypatch.setattr("mpistrat.cuda_api.cupy", lambda: types.SimpleNamespace(cuda=cuda))
    namespace = types.SimpleNamespace(empty=empty, asarray=np.asarray)
    monkeypatch.setattr(Device, "namespace", lambda device: namespace)
    return cuda


@pytest.mark.parametrize("prefetch", [None, 1, 3])
def test_batches_are_there_when_they_are_handed_out(cuda, strategy, rank, size, prefetch):
    numbers = np.arange(22 * size)
    dataset = Dataset.from_arrays({"x": numbers, "y": numbers[:, None] * 0.5}).batch(4 * size)
    if prefetch:
        dataset = dataset.prefetch(prefetch)
    batches = distribute(dataset, None, strategy.extended._collectives, GPU)
    for _ in range(2):
        found = []
        for batch in batches:
            x, y = batch["x"].values[0], batch["y"].values[0]
            cuda.program.run(len(cuda.program.work))
            assert_array_equal(y[:, 0], x * 0.5)
            found.append(x)
        starts = range(0, len(numbers), 4 * size)
        assert len(found) == len(starts)
        for x, start in zip(found, starts, strict=True):
            share = -(-len(numbers[start : start + 4 * size]) // size)
            mine = numbers[start : start + 4 * size][rank * share : (rank + 1) * share]
            assert_array_equal(x, mine)


def test_a_pass_that_is_broken_off_leaves_no_copy_under_way(cuda, strategy, size):
    dataset = Dataset.range(64 * size).batch(4 * size).prefetch(4)
    iterator = iter(distribute(dataset, None, strategy.extended._collectives, GPU))
    next(iterator)
    iterator.close()
    assert len(cuda.others) == 1
    assert not cuda.others[0].work


def test_anything_goes_through_or_stays(cuda):
    to_gpu = transfer_to(GPU)
    given = {
        "foreign order": np.arange(6, dtype=">f4").reshape(2, 3).T,
        "number": 2.5,
        "nothing": np.empty((0, 3)),
        "text": np.array([b"a", b"bc"]),
        "word": "word",
    }
    arrived = nests.map_nest(to_gpu.end, to_gpu.begin(given))
    cuda.program.run(len(cuda.program.work))  # the program uses them after the copies
    assert arrived["foreign order"].dtype == np.dtype("f4")
    assert arrived["word"] == "word"
    for name in list(given)[:-1]:
        assert_array_equal(arrived[name], given[name])
    assert arrived["nothing"].shape == (0, 3)


def test_without_a_device_arrays_stay_where_they_are():
    to_host = transfer_to(None)
    x = np.arange(3)
    arrived = nests.map_nest(to_host.end, to_host.begin((x, "word")))
    assert arrived[0] is x
    assert arrived[1] == "word"
    to_host.close()


@pytest.mark.gpu
@pytest.mark.skipif(count_gpus() == 0, reason="needs a GPU and cupy")
def test_on_a_gpu_batches_are_those_of_the_host(rank, size):
    dataset = Dataset.range(10_000).map(lambda n: n * np.ones(500)).batch(64 * size).prefetch(3)
    on_host = ms.MPIStrategy(device="cpu").experimental_distribute_dataset(dataset)
    on_gpu = ms.MPIStrategy(device="gpu").experimental_distribute_dataset(dataset)
    for expected, found in zip(on_host, on_gpu, strict=True):
        doubled = found.values[0] * 2
        assert_array_equal(host_view(doubled), expected.values[0] * 2)
