"""NCCL by MPI, for a communicator of this process alone or of all processes."""

import ctypes
import threading
import time

import numpy as np

from .._array import GARBAGE
from . import _streams

available = True
NCCL_SUM, NCCL_PROD, NCCL_MAX, NCCL_MIN, NCCL_AVG = range(5)
(NCCL_INT8, NCCL_UINT8, NCCL_INT32, NCCL_UINT32, NCCL_INT64, NCCL_UINT64, NCCL_FLOAT16,
 NCCL_FLOAT32, NCCL_FLOAT64, NCCL_BFLOAT16) = range(10)  # fmt: skip
NCCL_CHAR, NCCL_INT, NCCL_HALF, NCCL_FLOAT, NCCL_DOUBLE = (
    NCCL_INT8, NCCL_INT32, NCCL_FLOAT16, NCCL_FLOAT32, NCCL_FLOAT64)  # fmt: skip
_DTYPES = ["i1", "u1", "i4", "u4", "i8", "u8", "f2", "f4", "f8"]


class NcclError(RuntimeError):
    pass


def get_version():
    return 22800


def get_build_version():
    return 22800


def get_unique_id():
    return tuple(range(128))


class NcclCommunicator:
    def __init__(self, ndev, comm_id, rank):
        from mpi4py import MPI

        if ndev not in (1, MPI.COMM_WORLD.size):
            raise NcclError("the stand-in connects one process or all")
        self._comm = (MPI.COMM_SELF if ndev == 1 else MPI.COMM_WORLD).Dup()
        self._is_aborted = False

    def allReduce(self, sendbuf, recvbuf, count, datatype, op, stream):  # noqa: N802
        def work():
            source, target = self._arrays(sendbuf, recvbuf, count, datatype)
            self._wait(self._comm.Iallreduce(source, target, self._op(op)), target)

        self._queue(work, stream)

    def reduce(self, sendbuf, recvbuf, count, datatype, op, root, stream):
        def work():
            source, target = self._arrays(sendbuf, recvbuf, count, datatype)
            found = target if self._comm.rank == root else None
            self._wait(self._comm.Ireduce(source, found, self._op(op), root), target)

        self._queue(work, stream)

    def _queue(self, work, stream):
        if self._is_aborted:
            raise NcclError("NCCL_ERROR_INVALID_USAGE: the communicator was aborted")
        work.waits_for_others = True
        _streams[stream].add(work)

    def _wait(self, request, target):
        for _ in range(1000):
            if request.Test():
                return
        ended = threading.Lock()
        ended.acquire()

        def poll():
            while not request.Test():
                if self._is_aborted:  # the kernel ends, whatever it has written
                    target.view(np.uint8).fill(GARBAGE)
                    break
                time.sleep(1e-4)
            ended.release()

        threading.Thread(target=poll, daemon=True).start()
        ended.acquire()  # like a wait in C, it is not ended by an exception for this thread

    def _arrays(self, sendbuf, recvbuf, count, datatype):
        dtype = np.dtype(_DTYPES[datatype])
        source, target = (
            np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(each), dtype)
            for each in (sendbuf, recvbuf)
        )
        return source.copy(), target

    def _op(self, op):
        from mpi4py import MPI

        return [MPI.SUM, MPI.PROD, MPI.MAX, MPI.MIN][op]

    def check_async_error(self):
        return 0

    def abort(self):
        self._is_aborted = True

    def destroy(self):
        self._is_aborted = True

    def rank_id(self):
        return self._comm.rank

    def size(self):
        return self._comm.size

    def device_id(self):
        return 0
