"""Which way an array in device memory takes, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.arrays import Device
from mpistrat.comm.choose import check_options, check_plan, choose_way
from mpistrat.comm.device_ways import DeviceWays
from mpistrat.comm.nccl import nccl_knows
from mpistrat.comm.plan import plan_reduction
from mpistrat.comm.staged import part_bytes, plan_parts
from mpistrat.cuda_awareness import Answer, CudaAwareness
from mpistrat.strategies.device_ways import Gpu, why_not_mpi, why_not_nccl

Op = ms.ReduceOp
Way = ms.CommunicationImplementation
F4 = np.dtype("f4")
GPU = Device("gpu", 0)


def asked(name):
    return ms.CommunicationOptions(implementation=Way[name])


@pytest.mark.parametrize(
    ("name", "no_mpi", "no_nccl", "dtype", "way", "why"),
    [
        ("AUTO", "", "", "f4", "NCCL", "each rank has a GPU of its own"),
        ("AUTO", "no MPI", "", "f4", "NCCL", "each rank has a GPU of its own"),
        ("AUTO", "", "no NCCL", "f4", "MPI", "MPI is proved CUDA-aware, and no NCCL"),
        ("AUTO", "", "", "i2", "MPI", "MPI is proved CUDA-aware, and NCCL knows no SUM of int16"),
        ("AUTO", "no MPI:\n  why", "no NCCL", "f4", "STAGED", "no MPI, and no NCCL"),
        ("AUTO", "no MPI", "", "i2", "STAGED", "no MPI, and NCCL knows no SUM of int16"),
        ("NCCL", "", "", "f4", "NCCL", "asked for: NCCL"),
        ("MPI", "", "", "f4", "MPI", "asked for: MPI"),
        ("STAGED", "", "", "f4", "STAGED", "asked for: STAGED"),
        ("SHARED", "", "", "f4", "STAGED", "asked for: SHARED"),
    ],
)
def test_the_way_and_the_reason(name, no_mpi, no_nccl, dtype, way, why):
    ways = DeviceWays(GPU, why_not_mpi=no_mpi, why_not_nccl=no_nccl)
    assert choose_way(asked(name), Op.SUM, np.dtype(dtype), ways) == (Way[way], why)


def test_what_cannot_be_had_is_refused_with_the_reason():
    ways = DeviceWays(GPU, why_not_mpi="it is off.", why_not_nccl="ranks 0-1 share one GPU")
    with pytest.raises(ValueError, match=r"NCCL reduces .* ranks 0-1 share one GPU. Use AUTO"):
        check_options(asked("NCCL"), ways)
    with pytest.raises(ValueError, match=r"(?s)MPI gives device memory .* it is off.*Use AUTO or"):
        check_options(asked("MPI"), ways)
    for name in ("AUTO", "STAGED", "SHARED"):
        check_options(asked(name), ways)


def test_on_the_host_only_nccl_is_refused():
    ways = DeviceWays(Device("cpu"))
    with pytest.raises(ValueError, match="the replica computes on the host"):
        check_options(asked("NCCL"), ways)
    for name in ("AUTO", "MPI", "STAGED", "SHARED"):
        check_options(asked(name), ways)


@pytest.mark.parametrize("answer", Answer)
def test_only_a_proof_opens_device_memory_to_mpi(answer):
    words = why_not_mpi(CudaAwareness(answer, ("a query says so", "a library is loaded"), 3))
    if answer is Answer.PROVED:
        assert words == ""
    else:
        first = f"MPI is not proved CUDA-aware ({answer.name.lower()}, as rank 3 has found):"
        assert words.split("\n  ") == [first, "a query says so", "a library is loaded"]


A, B, C = Gpu("a", 22000), Gpu("b", 22000), Gpu("c", 22000)


@pytest.mark.parametrize(
    ("gpus", "why"),
    [
        ([A], ""),
        ([A, B, C], ""),
        ([A, B, A, C, A], "ranks 0, 2, 4 share one GPU"),
        ([A, Gpu("b", 21800)], "rank 0 has NCCL 22000 and rank 1 has 21800"),
        ([A, B, Gpu("c", 0, "cupy does not find NCCL")], "rank 2 has no NCCL: cupy does not find"),
    ],
)
def test_nccl_needs_a_gpu_for_each_rank(gpus, why):
    found = why_not_nccl(gpus)
    assert found.startswith(why)
    assert bool(found) == bool(why)


@pytest.mark.parametrize("op", Op)
def test_what_nccl_knows(op):
    known = {char for char in "bBhHiIlLqQfdgFDG" if nccl_knows(op, np.dtype(char))}
    complexes = set("FD") if op in (Op.SUM, Op.MEAN) else set()
    assert known == set("bBiIlLqQfd") | complexes


def plan_of(op, dtypes, places, **options):
    kinds = [(np.dtype(dtype), (4,)) for dtype in dtypes]
    return plan_reduction(op, kinds, None, ms.CommunicationOptions(**options), places)


def test_a_pack_is_in_one_memory():
    plan = plan_of(Op.SUM, ["f4"] * 4 + ["f8"], [True, False, True, False, True])
    packs = [(pack.small + pack.large, pack.on_device) for pack in plan.packs]
    assert packs == [([0, 2], True), ([1, 3], False), ([4], True)]
    assert plan_of(Op.SUM, ["f4"], [True]).only_wire is None
    assert plan_of(Op.SUM, ["f4"], ()).only_wire == F4


def test_large_device_arrays_are_joined_up_to_a_pack():
    kinds = [(F4, (10**6,))] * 3
    plan = plan_reduction(Op.SUM, kinds, None, ms.CommunicationOptions(), [True] * 3)
    assert [(pack.small, pack.large, pack.small_size) for pack in plan.packs] == [
        ([0, 1, 2], [], 3 * 10**6)
    ]
    plan = plan_reduction(
        Op.SUM, kinds, None, ms.CommunicationOptions(bytes_per_pack=5 * 10**6), [True] * 3
    )
    assert [(pack.small, pack.large) for pack in plan.packs] == [([], [0]), ([], [1]), ([], [2])]


@pytest.mark.parametrize("options", [{"deterministic": True}, {"wire_dtype": "bfloat16"}])
def test_our_own_arithmetic_is_done_on_the_host(options):
    plan = plan_of(Op.SUM, ["f4", "f8"], [True, True], **options)
    assert not any(pack.on_device for pack in plan.packs)


def test_nccl_refuses_device_arrays_alone():
    options = asked("NCCL")
    for dtype, places, op in (("i2", [True], Op.MAX), ("F", [True], Op.PROD)):
        with pytest.raises(TypeError, match=f"NCCL cannot reduce .* by {op.name}"):
            check_plan(options, plan_of(op, [dtype], places))
    check_plan(options, plan_of(Op.MAX, ["i2"], ()))
    check_plan(options, plan_of(Op.SUM, ["f2", "F", "?"][:2], [True, True]))
    check_plan(ms.CommunicationOptions(), plan_of(Op.MAX, ["i2"], [True]))


@given(st.integers(0, 10**8), st.sampled_from([1, 2, 4, 8, 16]))
def test_parts_cover_a_message_in_order(num_elements, itemsize):
    parts = plan_parts(num_elements, itemsize)
    assert [part.start for part in parts] == [0, *(part.stop for part in parts)][: len(parts)]
    assert (parts[-1].stop if parts else 0) == num_elements
    lengths = [part.stop - part.start for part in parts]
    assert all(length == lengths[0] for length in lengths[:-1])
    assert all(0 < length * itemsize <= part_bytes(num_elements * itemsize) for length in lengths)


def test_a_message_of_a_mib_has_parts_to_overlap():
    assert len(plan_parts(2**20, 4)) == 4
    assert len(plan_parts(2**28, 4)) == 256
    assert len(plan_parts(10, 4)) == 1
