"""The copies of a GPU, on streams that do everything as late as they may."""

import ctypes
import types

import numpy as np
import pytest

import mpistrat as ms
from mpistrat import arrays
from mpistrat.arrays import Device
from mpistrat.comm import staged
from mpistrat.comm.device_copier import DeviceCopier
from mpistrat.comm.device_packing import DeviceMessage
from mpistrat.comm.pool import Pool
from mpistrat.comm.staged import StagedReducer
from mpistrat.comm.whole import WholeReducer


class Stream:
    """A queue of work; what has been done in it is never done before it must be."""

    ptr = property(lambda self: self)

    def __init__(self, non_blocking=False):
        self.work = []

    def wait_event(self, event):
        self.work.append(event.synchronize)

    def run(self, count):
        while count > 0:
            self.work.pop(0)()
            count -= 1


class Event:
    """How far a stream had to come; in `done` it says no as long as it can."""

    def __init__(self, disable_timing):
        assert disable_timing

    def record(self, stream):
        marks = stream.work
        self._stream = stream
        self._is_reached = False
        marks.append(self._reach)

    def _reach(self):
        self._is_reached = True

    @property
    def done(self):
        return self._is_reached

    def synchronize(self):
        while not self._is_reached:
            self._stream.run(1)


class Cuda:
    """As much of ``cupy.cuda`` as the copier uses, on the memory of the host."""

    def __init__(self):
        self.program = Stream()
        self.pinned = []
        self.Stream, self.Event = Stream, Event
        self.runtime = types.SimpleNamespace(
            memcpyDeviceToHost="to host", memcpyHostToDevice="to device", memcpyAsync=self.copy
        )

    def Device(self, index):  # noqa: N802
        return arrays.contextlib.nullcontext()

    def get_current_stream(self):
        return self.program

    def alloc_pinned_memory(self, num_bytes):
        return bytearray(b"\xab" * num_bytes)

    def copy(self, target, source, num_bytes, kind, stream):
        stream.work.append(lambda: ctypes.memmove(target, source, num_bytes))


@pytest.fixture
def cuda(monkeypatch):
    cuda = Cuda()
    monkeypatch.setattr(arrays, "_cupy", lambda: types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(staged, "_MIN_PART_BYTES", 64)
    monkeypatch.setattr(staged, "_MAX_PART_BYTES", 64)
    return cuda


def compute(cuda, array, values):
    """Have the program write to `array` on its stream."""
    cuda.program.work.append(lambda: np.copyto(array, values))


@pytest.mark.parametrize("length", [0, 1, 7, 8, 9, 16, 17, 100])
@pytest.mark.parametrize("is_started", [False, True])
def test_every_copy_waits_for_what_it_needs(cuda, strategy, rank, size, length, is_started):
    transport = strategy.extended.collectives.channel.transport
    copier = DeviceCopier(Device("gpu"))
    reducer = StagedReducer(copier, WholeReducer(transport))
    results = []
    for step in range(3):
        source, target, seen = (np.zeros(length) for _ in range(3))
        numbers = np.arange(length) + step
        compute(cuda, source, numbers + rank)
        compute(cuda, target, -7)  # what the memory was used for before
        message = DeviceMessage([source], [target], Pool())
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
    assert [source is buffer for _, source in copier._leaving] == [True]
    done.synchronize()
    copier.put(np.zeros(4, np.float32), copier.buffer(4, np.dtype("f4")))
    assert [source is buffer for _, source in copier._leaving] == [False]
