"""Which GPU a rank gets, which way its arrays take, and what is refused."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mpistrat as ms
from mpistrat.arrays import Device
from mpistrat.comm.device_reducers import DeviceCapabilities, NcclReducer, part_bytes, plan_parts
from mpistrat.comm.pack_plan import plan_reduction
from mpistrat.comm.selection import check_options, check_plan, choose_way
from mpistrat.cuda_awareness import Answer, CudaAwareness
from mpistrat.strategies import devices
from mpistrat.strategies.devices import (
    Gpu,
    Offer,
    choose_devices,
    choose_gpus,
    make_offer,
    why_not_mpi,
    why_not_nccl,
)
from mpistrat.system.cpu import cores_near_pci, cores_of_mask, mask_of_cores, parse_core_list

Op = ms.ReduceOp
Way = ms.CommunicationImplementation
F4 = np.dtype("f4")
GPU = Device("gpu", 0)


def asked(name):
    return ms.CommunicationOptions(implementation=Way[name])


@pytest.mark.parametrize(
    ("name", "no_mpi", "no_nccl", "dtype", "way", "why"),
    [
        ("AUTO", "", "", "f4", "NCCL", "each rank has its own GPU"),
        ("AUTO", "no MPI", "", "f4", "NCCL", "each rank has its own GPU"),
        ("AUTO", "", "no NCCL", "f4", "MPI", "MPI is proved CUDA-aware, and no NCCL"),
        ("AUTO", "", "", "i2", "MPI", "MPI is proved CUDA-aware, and NCCL has no SUM for int16"),
        ("AUTO", "no MPI:\n  why", "no NCCL", "f4", "STAGED", "no MPI, and no NCCL"),
        ("AUTO", "no MPI", "", "i2", "STAGED", "no MPI, and NCCL has no SUM for int16"),
        ("NCCL", "", "", "f4", "NCCL", "asked for: NCCL"),
        ("MPI", "", "", "f4", "MPI", "asked for: MPI"),
        ("STAGED", "", "", "f4", "STAGED", "asked for: STAGED"),
        ("SHARED", "", "", "f4", "STAGED", "asked for: SHARED"),
    ],
)
def test_the_way_and_the_reason(name, no_mpi, no_nccl, dtype, way, why):
    capabilities = DeviceCapabilities(GPU, why_not_mpi=no_mpi, why_not_nccl=no_nccl)
    assert choose_way(asked(name), Op.SUM, np.dtype(dtype), capabilities) == (Way[way], why)


def test_what_cannot_be_had_is_refused_with_the_reason():
    capabilities = DeviceCapabilities(
        GPU, why_not_mpi="it is off.", why_not_nccl="ranks 0-1 share one GPU"
    )
    with pytest.raises(ValueError, match=r"NCCL reduces .* ranks 0-1 share one GPU. Use AUTO"):
        check_options(asked("NCCL"), capabilities)
    with pytest.raises(ValueError, match=r"(?s)MPI gives device memory .* it is off.*Use AUTO or"):
        check_options(asked("MPI"), capabilities)
    for name in ("AUTO", "STAGED", "SHARED"):
        check_options(asked(name), capabilities)


def test_on_the_host_only_nccl_is_refused():
    capabilities = DeviceCapabilities(Device("cpu"))
    with pytest.raises(ValueError, match="the replica computes on the host"):
        check_options(asked("NCCL"), capabilities)
    for name in ("AUTO", "MPI", "STAGED", "SHARED"):
        check_options(asked(name), capabilities)


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
    known = {char for char in "bBhHiIlLqQfdgFDG" if NcclReducer.knows(op, np.dtype(char))}
    complexes = set("FD") if op in (Op.SUM, Op.MEAN) else set()
    assert known == set("bBiIlLqQfd") | complexes


def plan_of(op, dtypes, places, **options):
    kinds = [(np.dtype(dtype), (4,)) for dtype in dtypes]
    return plan_reduction(op, kinds, None, ms.CommunicationOptions(**options), places)


def test_a_pack_is_in_one_memory():
    plan = plan_of(Op.SUM, ["f4"] * 4 + ["f8"], [True, False, True, False, True])
    packs = [(pack.small + pack.large, pack.on_device) for pack in plan.packs]
    assert packs == [([0, 2], True), ([1, 3], False), ([4], True)]
    assert not plan_of(Op.SUM, ["f4"], [True]).is_single
    assert plan_of(Op.SUM, ["f4"], ()).is_single


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
        with pytest.raises(TypeError, match=f"NCCL cannot reduce .* with {op.name}"):
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


def offer(gpus, preferred=0, near=None, is_fixed=False):
    is_near = tuple(near is None or gpu in near for gpu in gpus)
    return Offer(tuple(gpus), is_near, preferred, is_fixed)


def taken(offers):
    """Return the GPU that each rank of a node gets."""
    return [
        None if each is None else each.gpus[index]
        for each, index in zip(offers, choose_gpus(offers), strict=True)
    ]


@pytest.mark.parametrize(
    ("offers", "gpus"),
    [
        # all see all, and take that of their local rank
        ([offer("abcd", preferred=rank) for rank in range(4)], "abcd"),
        # CUDA_VISIBLE_DEVICES or --gpus-per-task shows each its own, always as number 0
        ([offer("a"), offer("b"), offer("c")], "abc"),
        # --gpu-bind=closest with tasks dealt out over the sockets: ranks 0 and 2 see the same two
        ([offer("ab"), offer("cd"), offer("ab"), offer("cd")], "acbd"),
        # the same where all are visible and the system tells what is near
        ([offer("abcd", 0, "ab"), offer("abcd", 2, "cd"), offer("abcd", 0, "ab")], "acb"),
        # a far one is better than a shared one
        ([offer("ab", 0, "a"), offer("ab", 0, "a")], "ab"),
        # who can give way does: the second sees one only
        ([offer("ab", 0), offer("a")], "ba"),
        # a named one is left to who named it
        ([offer("ab", 0), offer("ab", 0, is_fixed=True)], "ba"),
    ],
)
def test_each_rank_of_a_node_gets_a_gpu_of_its_own(offers, gpus):
    assert taken(offers) == list(gpus)
    both = [*offers, None, *(offer([gpu + "2" for gpu in each.gpus]) for each in offers[:1])]
    nodes = [0] * len(offers) + [0, 1]
    devices = choose_devices(both, nodes, may_share=False)
    assert devices[len(offers)] == Device("cpu")
    assert [each.kind for each in devices].count("gpu") == len(offers) + 1


@given(st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=6), st.data())
def test_a_gpu_is_shared_only_where_it_must_be(visible, data):
    offers = [
        Offer(
            tuple(str(gpu) for gpu in sorted(gpus)),
            tuple(data.draw(st.booleans()) for _ in gpus),
            data.draw(st.integers(0, len(gpus) - 1)),
        )
        for gpus in visible
    ]
    gpus = taken(offers)
    assert all(gpu in each.gpus for gpu, each in zip(gpus, offers, strict=True))
    # Hall: all can have their own if no group of ranks sees fewer GPUs than it has ranks
    groups = [
        [each for rank, each in enumerate(offers) if mask >> rank & 1]
        for mask in range(1, 2 ** len(offers))
    ]
    is_possible = all(
        len({g for each in group for g in each.gpus}) >= len(group) for group in groups
    )
    assert (len(set(gpus)) == len(gpus)) == is_possible


def test_shared_gpus_are_refused_with_ranks_and_remedy():
    nodes = [0, 0, 1, 1, 1]
    offers = [offer("a"), offer("b"), *[offer("cd", preferred=rank % 2) for rank in range(3)]]
    with pytest.raises(ms.errors.LaunchError, match="ranks 2, 4 .* 3 ranks, which see 2 GPUs") as e:
        choose_devices(offers, nodes, may_share=False)
    assert "--ntasks-per-node=2" in str(e.value)
    shared = choose_devices(offers, nodes, may_share=True)
    assert [each.index for each in shared] == [0, 0, 0, 1, 0]
    named = [offer("ab", is_fixed=True), offer("ab", is_fixed=True)]
    with pytest.raises(ms.errors.LaunchError, match='ranks 0-1 .* shows 2 GPUs .* device="auto"'):
        choose_devices(named, [0, 0], may_share=False)


def test_an_offer_tells_what_is_near(monkeypatch):
    monkeypatch.setattr(devices, "count_gpus", lambda: 4)
    monkeypatch.setattr("mpistrat.cuda_api.count_gpus", lambda: 4)
    monkeypatch.setattr(Device, "gpu_identity", lambda device: f"gpu {device.index}")
    monkeypatch.setattr(Device, "pci_address", lambda device: str(device.index))
    sockets = {"0": {0, 1}, "1": {0, 1}, "2": {2, 3}, "3": set()}
    monkeypatch.setattr(devices, "cores_near_pci", lambda address: sockets[address])
    monkeypatch.setattr(devices, "own_cores", lambda: {2})
    found = make_offer("auto", local_rank=5)
    assert (found.is_near, found.preferred) == ((False, False, True, False), 2)
    monkeypatch.setattr(devices, "own_cores", lambda: {0, 1, 2, 3})  # not bound
    found = make_offer("gpu", local_rank=5)
    assert (found.is_near, found.preferred, found.is_fixed) == ((True,) * 4, 1, False)
    found = make_offer("gpu:3", local_rank=5)
    assert (found.preferred, found.is_fixed) == (3, True)
    assert make_offer("cpu", local_rank=5) is None
    with pytest.raises(ms.errors.LaunchError, match="asks for GPU 4, but cupy sees 4"):
        make_offer("gpu:4", local_rank=0)


def test_device_arguments():
    assert Device.parse("auto") == ("auto", None)
    assert Device.parse("CPU:0") == Device.parse("cpu") == ("cpu", None)
    assert Device.parse("gpu:12") == Device.parse("cuda:12") == ("gpu", 12)
    assert Device.parse("cuda") == ("gpu", None)
    for bad in ("", "auto:0", "cpu:1", "gpu:", "gpu:-1", "gpu:x", "tpu"):
        with pytest.raises(ValueError, match="Unknown device"):
            Device.parse(bad)


def test_lists_of_cores(tmp_path):
    assert parse_core_list("0-2,5,8-9\n") == {0, 1, 2, 5, 8, 9}
    assert parse_core_list("\n") == set()
    assert cores_of_mask(mask_of_cores([0, 3, 64, 3])) == {0, 3, 64}
    (tmp_path / "0000:3b:00.0").mkdir()
    (tmp_path / "0000:3b:00.0" / "local_cpulist").write_text("4-5\n")
    assert cores_near_pci("0000:3B:00.0", tmp_path) == {4, 5}
    assert cores_near_pci("0000:3C:00.0", tmp_path) == set()
