"""A stand-in for CUDA as CuPy offers it, on the memory of the host: as late as it may be."""

import contextlib
import ctypes
import types


class Stream:
    """A queue of work; what has been done in it is never done before it must be."""

    ptr = property(lambda self: self)

    def __init__(self):
        self.work = []

    def wait_event(self, event):
        self.work.append(event.synchronize)

    def run(self, count):
        while count > 0:
            self.work.pop(0)()
            count -= 1


class Event:
    """How far a stream has to come."""

    def __init__(self, disable_timing):
        assert disable_timing

    def record(self, stream):
        self._stream = stream
        self._is_reached = False
        stream.work.append(self._reach)

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

    class PinnedMemoryPointer(bytearray):
        """Page-locked memory."""

    def __init__(self):
        self.program = Stream()
        self.others = []
        self.Event = Event
        self.runtime = types.SimpleNamespace(
            memcpyDeviceToHost="to host", memcpyHostToDevice="to device", memcpyAsync=self.copy
        )

    def Stream(self, non_blocking):  # noqa: N802
        assert non_blocking
        self.others.append(Stream())
        return self.others[-1]

    def run_others(self):
        """Do what other streams than the program's need not wait for."""
        for stream in self.others:
            stream.run(len(stream.work))

    def Device(self, index):  # noqa: N802
        return contextlib.nullcontext()

    def get_current_stream(self):
        return self.program

    def alloc_pinned_memory(self, num_bytes):
        return self.PinnedMemoryPointer(b"\xab" * num_bytes)

    def copy(self, target, source, num_bytes, kind, stream):
        stream.work.append(lambda: ctypes.memmove(target, source, num_bytes))
