"""Stand-ins for device memory and what copies and reduces it, in host memory.

They keep to what the protocols promise and to nothing more: what may be late is late.
"""

import functools
from dataclasses import dataclass

import numpy as np
from mpi4py import MPI

import mpistrat as ms
from mpistrat.arrays import Device
from mpistrat.comm.device_reducers import DeviceCapabilities

OPS = {
    ms.ReduceOp.SUM: MPI.SUM,
    ms.ReduceOp.PROD: MPI.PROD,
    ms.ReduceOp.MIN: MPI.MIN,
    ms.ReduceOp.MAX: MPI.MAX,
}
WAYS = ("staged", "mpi", "nccl")


class OnDevice(np.ndarray):
    """An array that counts as one in device memory."""


def to_device(array):
    return np.array(array, order="K").view(OnDevice)


@dataclass(frozen=True, eq=False)
class FakeCapabilities(DeviceCapabilities):
    """The capabilities of a strategy whose device is the host."""

    def is_on_device(self, array):
        return isinstance(array, OnDevice)


def capabilities_of(name):
    """Return capabilities of which AUTO takes the one with `name`."""
    return FakeCapabilities(
        Device("cpu"),
        LateCopier(),
        why_not_mpi="MPI is not proved" if name == "staged" else "",
        why_not_nccl="" if name == "nccl" else "there is no NCCL",
        link=MpiLink() if name == "nccl" else None,
    )


class Copy:
    """A copy that is made when something waits for it, after those before it on its stream."""

    def __init__(self, target, source, before):
        assert target.shape == source.shape
        assert target.dtype == source.dtype
        self._copy = (target, source)
        self._before = [each for each in before if each is not None]

    def synchronize(self):
        for each in self._before:
            each.synchronize()
        self._before = []
        if self._copy is not None:
            target, source = self._copy
            target[...] = source
            self._copy = None


class LateCopier:
    """Copies as late as the waits allow, so that a missing one is a wrong number."""

    def __init__(self):
        self.num_fetches = 0
        self._last_fetch = self._last_put = None
        self._is_begun = False

    def buffer(self, size, dtype):
        return np.frombuffer(bytearray(b"\xab" * size * dtype.itemsize), dtype)

    def begin(self):
        self._is_begun = True

    def fetch(self, target, source, after=None):
        assert self._is_begun
        self.num_fetches += 1
        self._last_fetch = Copy(target, source, [self._last_fetch, after])
        return self._last_fetch

    def put(self, target, source):
        assert self._is_begun
        self._last_put = Copy(target, source, [self._last_put])
        return self._last_put

    def end(self):
        if self._last_put is not None:
            self._last_put.synchronize()


@functools.cache
def private_world():
    return MPI.COMM_WORLD.Dup()


class MpiLink:
    """Reduces real numbers in the order given, as NCCL does, but not before the first wait."""

    def __init__(self):
        self._comm = private_world()
        self.size = self._comm.size
        self._queue = []

    def all_reduce(self, op, source, target):
        def work():
            reduced = np.empty_like(source, subok=False)
            self._comm.Allreduce(np.array(source), reduced, OPS[op])
            target[...] = reduced

        return self._queued(work)

    def reduce(self, op, source, target, root):
        def work():
            reduced = np.empty_like(source, subok=False)
            self._comm.Reduce(np.array(source), reduced, OPS[op], root)
            target[...] = reduced

        return self._queued(work)

    def _queued(self, work):
        self._queue.append(work)

        def end():
            while work in self._queue:
                self._queue.pop(0)()

        return end
