"""Devices, streams, events and pinned memory, on the memory of the host."""

import contextlib
import ctypes
import os
import sys
import threading
import types
import weakref

_local = threading.local()


def num_devices():
    return int(os.environ.get("FAKE_CUPY_GPUS", 1))


def current_device_id():
    return getattr(_local, "device", 0)


class Device:
    """A device, which is the current one inside ``with``."""

    def __init__(self, device=None):
        if isinstance(device, Device):
            device = device.id
        self.id = current_device_id() if device is None else int(device)
        self._before = []

    def use(self):
        if not 0 <= self.id < num_devices():
            raise runtime.CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        _local.device = self.id

    def __enter__(self):
        self._before.append(current_device_id())
        self.use()
        return self

    def __exit__(self, *exc):
        _local.device = self._before.pop()

    def __eq__(self, other):
        return isinstance(other, Device) and other.id == self.id

    def __hash__(self):
        return hash(("device", self.id))

    def __int__(self):
        return self.id

    def __repr__(self):
        return f"<CUDA Device {self.id}>"

    def synchronize(self):
        synchronize_all()

    @property
    def pci_bus_id(self):
        return f"0000:{self.id + 1:02X}:00.0"

    compute_capability = "90"


_streams = {}
_in_turn = threading.RLock()


class Stream:
    """A queue of work. Of streams other than the null stream, nothing is done before it must be."""

    null: "Stream"

    def __init__(self, null=False, non_blocking=False, ptds=False, priority=None):
        self.ptr = 0 if null else id(self)
        self.work = []
        self.is_null = null
        _streams[self.ptr] = self

    def __enter__(self):
        stack = _local.__dict__.setdefault("streams", [])
        stack.append(self)
        return self

    def __exit__(self, *exc):
        _local.streams.pop()

    def use(self):
        _local.__dict__.setdefault("streams", []).append(self)
        return self

    def synchronize(self):
        self.run(len(self.work))

    def run(self, count):
        with _in_turn:  # a thread that prefetches and the program may run one stream
            for _ in range(count):
                if self.work:
                    self.work.pop(0)()

    def wait_event(self, event):
        self.add(event.synchronize)

    def record(self, event=None):
        event = Event() if event is None else event
        event.record(self)
        return event

    def add(self, work):
        self.work.append(work)
        if self is get_current_stream():  # what the program computes is done at once, in order
            self.synchronize()


class Event:
    """How far a stream has to come."""

    def __init__(self, block=False, disable_timing=False, interprocess=False):
        self._stream, self._is_reached = None, True

    def record(self, stream=None):
        self._stream = get_current_stream() if stream is None else stream
        self._is_reached = False
        self._stream.add(self._reach)

    def _reach(self):
        self._is_reached = True

    @property
    def done(self):
        if not self._is_reached and _in_turn.acquire(blocking=False):  # a question never waits
            with contextlib.ExitStack() as stack:
                stack.callback(_in_turn.release)
                work = self._stream.work
                if work and not getattr(work[0], "waits_for_others", False):
                    self._stream.run(1)  # time passes
        return self._is_reached

    def synchronize(self):
        while not self._is_reached:
            self._stream.run(1)


Stream.null = Stream(null=True)


def get_current_stream(device_id=-1):
    stack = getattr(_local, "streams", None)
    return stack[-1] if stack else Stream.null


def synchronize_all():
    """Do what the streams with which the program computes have queued."""
    get_current_stream().synchronize()


class _Runtime(types.ModuleType):
    class CUDARuntimeError(RuntimeError):
        pass

    memcpyHostToDevice, memcpyDeviceToHost, memcpyDeviceToDevice, memcpyDefault = 1, 2, 3, 4

    @staticmethod
    def getDeviceCount():  # noqa: N802
        return num_devices()

    @staticmethod
    def getDevice():  # noqa: N802
        return current_device_id()

    @staticmethod
    def getDeviceProperties(device):  # noqa: N802
        if not 0 <= device < num_devices():
            raise runtime.CUDARuntimeError("cudaErrorInvalidDevice: invalid device ordinal")
        return {
            "name": b"Stand-in", "totalGlobalMem": 2**34, "uuid": bytes([device] * 16),
            "multiProcessorCount": 2, "major": 9, "minor": 0,
        }  # fmt: skip

    @staticmethod
    def memcpyAsync(dst, src, size, kind, stream):  # noqa: N802
        if kind not in (1, 2, 3, 4):
            raise runtime.CUDARuntimeError("cudaErrorInvalidMemcpyDirection")
        _streams[stream].add(lambda: ctypes.memmove(dst, src, size))

    @staticmethod
    def deviceSynchronize():  # noqa: N802
        for stream in list(_streams.values()):
            stream.synchronize()

    @staticmethod
    def driverGetVersion():  # noqa: N802
        return 13000

    @staticmethod
    def runtimeGetVersion():  # noqa: N802
        return 13000


runtime = _Runtime("cupy.cuda.runtime")
sys.modules["cupy.cuda.runtime"] = runtime


class PinnedMemoryPointer:
    """Page-locked memory, which goes back to the pool and is overwritten when it is dropped."""

    size = property(ctypes.sizeof)
    ptr = property(ctypes.addressof)


_free_pinned = {}


def alloc_pinned_memory(size):
    size = max(int(size), 1)
    free = _free_pinned.setdefault(size, [])
    block = free.pop() if free else bytearray(b"\xab" * size)
    # A subclass of what exports a buffer, as the real one does. As CuPy's, it knows no events.
    kind = type("PinnedMemoryPointer", (PinnedMemoryPointer, ctypes.c_char * size), {})
    pointer = kind.from_buffer(block)
    weakref.finalize(pointer, _take_back, block, free).atexit = False
    return pointer


def _take_back(block, free):
    ctypes.memset((ctypes.c_char * len(block)).from_buffer(block), 0xCD, len(block))
    free.append(block)


nvtx = types.ModuleType("cupy.cuda.nvtx")
nvtx.RangePush = lambda message, id_color=-1: None
nvtx.RangePop = lambda: None
sys.modules["cupy.cuda.nvtx"] = nvtx


class _Pool:
    def free_all_blocks(self):
        pass


# As in CuPy, `nccl` is a module that has to be imported.
