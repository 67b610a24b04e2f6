"""NCCL: the calls of its reducer, on streams that do everything as late as they may."""

import ctypes
import types

import numpy as np
import pytest
from mpi4py import MPI

import mpistrat as ms
from mpistrat.arrays import Device
from mpistrat.comm.device_reducers import NcclLink, NcclReducer
from mpistrat.comm.packing import Message
from mpistrat.comm.pool import Pool
from tests.comm.fake_devices import OPS, private_world
from tests.fake_cuda import Cuda

GPU = Device("gpu")
UFUNCS = {
    ms.ReduceOp.SUM: np.add,
    ms.ReduceOp.PROD: np.multiply,
    ms.ReduceOp.MIN: np.minimum,
    ms.ReduceOp.MAX: np.maximum,
}
NAMES = [f"{kind}int{bits}" for kind in ("", "u") for bits in (8, 32, 64)] + ["float32", "float64"]


class Library:
    """As much of ``cupy.cuda.nccl`` as the link uses. MPI moves the numbers."""

    available = True
    unique = tuple(range(128))

    def __init__(self, broken=None, factor=1):
        self._broken, self._factor = broken, factor
        for name in NAMES:
            setattr(self, f"NCCL_{name.upper()}", np.dtype(name))
        for op, value in OPS.items():
            setattr(self, f"NCCL_{op.name}", value)

    def get_unique_id(self):
        if self._broken == "network":
            raise RuntimeError("there is no network")
        return self.unique

    def NcclCommunicator(self, size, unique, rank):  # noqa: N802
        assert unique == self.unique
        if self._broken == "system":
            raise RuntimeError("unhandled system error")
        communicator = Communicator(private_world(), self._factor)
        assert (size, rank) == (communicator.comm.size, communicator.comm.rank)
        return communicator


class Communicator:
    def __init__(self, comm, factor):
        self.comm, self._factor = comm, factor

    def allReduce(self, send, receive, count, dtype, op, stream):  # noqa: N802
        def work():
            reduced = np.empty(count, dtype)
            self.comm.Allreduce(memory(send, count, dtype).copy(), reduced, op)
            memory(receive, count, dtype)[...] = reduced * self._factor

        stream.work.append(work)

    def reduce(self, send, receive, count, dtype, op, root, stream):
        def work():
            reduced = np.empty(count, dtype)
            self.comm.Reduce(memory(send, count, dtype).copy(), reduced, op, root)
            if self.comm.rank == root:
                memory(receive, count, dtype)[...] = reduced

        stream.work.append(work)


def memory(address, count, dtype):
    raw = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return np.frombuffer(raw, dtype)


@pytest.fixture
def cuda(monkeypatch, strategy):
    cuda = Cuda()
    monkeypatch.setattr("mpistrat.cuda_api.cupy", lambda: types.SimpleNamespace(cuda=cuda))
    monkeypatch.setattr("mpistrat.comm.device_reducers.nccl_library", lambda: cuda.nccl)

    class Numbers(np.ndarray):
        def __eq__(self, other):
            cuda.program.run(len(cuda.program.work))
            return np.asarray(self) == other

    def full(*args, **kwargs):
        return np.full(*args, **kwargs).view(Numbers)

    monkeypatch.setattr(Device, "namespace", lambda device: types.SimpleNamespace(full=full))
    return cuda


def reducer_of(cuda, size):
    cuda.nccl = Library()
    communicator = cuda.nccl.NcclCommunicator(size, Library.unique, private_world().rank)
    return NcclReducer(NcclLink(GPU, communicator, size))


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize(
    "dtype",
    [
        *("i1", "f4", "D"),
        *(
            pytest.param(dtype, marks=pytest.mark.thorough)
            for dtype in ("u1", "i4", "u4", "i8", "u8", "f8", "F")
        ),
    ],
)
@pytest.mark.parametrize("is_for_all", [True, False])
@pytest.mark.parametrize("is_early", [True, False])
def test_the_program_goes_on_and_finds_the_result(
    cuda, rank, size, op, dtype, is_for_all, is_early
):
    if not NcclReducer.knows(op, np.dtype(dtype)):
        pytest.skip("NCCL does not know it")
    numbers = np.arange(10).reshape(2, 5) % 3
    source, target, dropped = (np.zeros((2, 5), dtype) for _ in range(3))
    cuda.program.work.append(lambda: np.copyto(source, numbers + rank % 2, casting="unsafe"))
    reducer = reducer_of(cuda, size)
    reducer.start_all_reduce(op, Message([source], [dropped], Pool()))
    message, root = Message([source], [target], Pool()), size - 1
    if is_for_all:
        end = reducer.start_all_reduce(op, message)
        end()
    else:
        reducer.reduce(op, message, root)
    assert not any(each.any() for each in (source, target, dropped))
    if is_early:
        cuda.run_others()
    cuda.program.run(len(cuda.program.work))
    rows = np.array([numbers + each % 2 for each in range(size)], dtype)
    expected = UFUNCS[op].reduce(rows, dtype=dtype)
    assert (dropped == expected).all()
    if is_for_all or rank == root:
        assert (target == expected).all()


def test_ranks_connect_and_try(cuda, size):
    cuda.nccl = Library()
    link = NcclLink.connect(MPI.COMM_WORLD, GPU)
    assert isinstance(link, NcclLink)
    assert link.size == size


@pytest.mark.parametrize(
    ("library", "why"),
    [
        (Library(factor=2), "RuntimeError: NCCL has returned wrong numbers"),
        (Library(broken="network"), "RuntimeError: there is no network"),
        (Library(broken="system"), "RuntimeError: unhandled system error"),
    ],
)
def test_without_a_link_all_ranks_know_why(cuda, library, why):
    cuda.nccl = library
    assert NcclLink.connect(MPI.COMM_WORLD, GPU) == f"rank 0: {why}"
