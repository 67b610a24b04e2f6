"""The copies of a GPU, on streams that do everything as late as they may."""

import types

import numpy as np
import pytest

import mpistrat as ms
from mpistrat.arrays import Device
from mpistrat.comm import device_reducers
from mpistrat.comm.device_reducers import DeviceCopier, StagedReducer
from mpistrat.comm.packing import Message
from mpistrat.comm.pool import Pool
from mpistrat.comm.reducers import MpiReducer
from tests.fake_cuda import Cuda


@pytest.fixture
def cuda(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr("mpistrat.cuda_api.cupy", lambda: types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(device_reducers, "_MIN_PART_BYTES", 64)
    monkeypatch.setattr(device_reducers, "_MAX_PART_BYTES", 64)
    return cuda


def compute(cuda, array, values):
    """Have the program write to `array` on its stream."""
    cuda.program.work.append(lambda: np.copyto(array, values))


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 17, 100])
@pytest.mark.parametrize("is_started", [False, True])
def test_every_copy_waits_for_what_it_needs(cuda, strategy, rank, size, length, is_started):
    transport = strategy.extended._collectives.channel.transport
    copier = DeviceCopier(Device("gpu"))
    reducer = StagedReducer(copier, MpiReducer(transport))
    results = []
    for step in range(3):
        source, target, seen = (np.zeros(length) for _ in range(3))
        numbers = np.arange(length) + step
        compute(cuda, source, numbers + rank)
        compute(cuda, target, -7)  # what the memory was used for before
        message = Message([source], [target], Pool())
        if is_started:
            end = reducer.start_all_reduce(ms.ReduceOp.SUM, message)
            compute(cuda, source, -1)
            end()
        else:
            reducer.all_reduce(ms.ReduceOp.SUM, message)
            compute(cuda, source, -1)
        cuda.program.work.append(lambda seen=seen, target=target: np.copyto(seen, target))
        results.append((seen, size * (size - 1) // 2 + size * numbers))
    cuda.program.run(len(cuda.program.work))
    for seen, total in results:
        assert (seen == total).all()


def test_a_buffer_is_kept_until_it_has_been_read(cuda):
    copier = DeviceCopier(Device("gpu"))
    copier.begin()
    buffer = copier.buffer(4, np.dtype("f4"))
    done = copier.put(np.zeros(4, np.float32), buffer)
    assert [source is buffer for _, source in copier._under_way] == [True]
    done.synchronize()
    copier.put(np.zeros(4, np.float32), copier.buffer(4, np.dtype("f4")))
    assert [source is buffer for _, source in copier._under_way] == [False]
