"""The operations again, in groups whose tensors of another device have another backend."""

import re

import pytest
import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d

import mpistrat.torch as mst
from mpistrat.errors import CollectiveMismatchError, LaunchError
from tests.helpers import triangle
from tests.torch import test_moves, test_operations, test_reductions
from tests.torch.conftest import world_group

IS_THERE = "rank" in (c10d.Backend.__init__.__doc__ or "")
"""Whether Python may make backends: from torch 2.14 on."""

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]
needs_backends = pytest.mark.skipif(not IS_THERE, reason="needs torch 2.14")

OTHERS = {
    "test_what_cannot_be_reduced_is_refused_on_all_ranks",  # torch finds no backend for "meta"
    "test_conjugated_tensors",  # by methods of the group, to which torch gives copies
    "test_wrong_arguments_are_named_with_the_rank",  # by methods of the group
}
if IS_THERE:
    globals().update(
        (name, case)
        for module in (test_operations, test_reductions, test_moves)
        for name, case in vars(module).items()
        if name.startswith("test_") and name not in OTHERS
    )


@pytest.fixture(scope="module")
def world():
    """The world group, with gloo for tensors of a device that need not be there."""
    yield from world_group("cpu:mpistrat,cuda:gloo" if IS_THERE else "mpistrat")


@needs_backends
def test_the_group_is_torchs_own(rank, size, world):
    assert type(world) is dist.ProcessGroup
    assert (dist.get_rank(), dist.get_world_size()) == (rank, size)
    assert mst.strategy().rank == rank
    mst.assert_replicas_agree(torch.arange(3))
    assert set(dist.get_backend_config().split(",")) == {"cpu:mpistrat", "cuda:gloo"}


@needs_backends
def test_messages_name_their_source(rank, size):
    to, source = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        request = dist.isend(torch.full((3,), float(rank)), to, tag=3)
        received = torch.empty(3, 2)[:, 0]
        assert dist.recv(received, source, tag=3) == source
        request.wait()
        assert received.tolist() == [source] * 3
        batch = [dist.P2POp(dist.isend, torch.tensor([rank]), to)]
        batch.append(dist.P2POp(dist.irecv, output := torch.empty(1, dtype=torch.int64), source))
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert output.item() == source
    with pytest.raises(NotImplementedError, match=r"Name the source, or .*new_group"):
        dist.recv(torch.empty(1))
    own = dist.new_group(backend="mpistrat")
    if rank == 0:
        assert {dist.recv(torch.empty(1), group=own) for _ in range(size - 1)} == {*range(1, size)}
    else:
        dist.send(torch.ones(1), 0, group=own)
    dist.destroy_process_group(own)


@needs_backends
def test_futures_and_errors_are_those_of_the_package(rank, size):
    tensor = torch.full((2,), float(rank))
    future = dist.all_reduce(tensor, async_op=True).get_future()
    assert future.wait()[0].tolist() == [triangle(size)] * 2
    for is_async in (False, True):
        group = dist.new_group()
        if size > 1:
            with pytest.raises(CollectiveMismatchError, match="test_backend_base.py"):
                work = dist.all_reduce(torch.ones(1 + rank), group=group, async_op=is_async)
                work.wait()
        dist.destroy_process_group(group)


@needs_backends
def test_a_network_is_trained_and_groups_are_made_and_freed(rank, size):
    for _ in range(3):
        group = dist.new_group(list(range(size)))
        assert type(group) is dist.ProcessGroup
        torch.manual_seed(rank)
        model = torch.nn.parallel.DistributedDataParallel(
            torch.nn.Linear(4, 2), process_group=group
        )
        model(torch.ones(3, 4) + rank).sum().backward()
        gradients = [torch.empty_like(model.module.weight) for _ in range(size)]
        dist.all_gather(gradients, model.module.weight.grad)
        assert all(each.equal(gradients[0]) for each in gradients)
        assert gradients[0][0, 0] == 3 * (1 + (size - 1) / 2)
        carrier = mst.strategy(group)
        dist.destroy_process_group(group)
        with pytest.raises(RuntimeError, match="was destroyed"):
            carrier.barrier()


def calls_of(backend, rank, size):
    """Return calls of each operation with tensors that have no numbers."""
    own, whole = torch.empty(2, device="meta"), torch.empty(2 * size, device="meta")
    parts = [own] * size
    root = rank == 0
    return {
        'all_reduce("sum"': lambda: backend.allreduce([own], c10d.AllreduceOptions()),
        'all_reduce_coalesced("sum"': lambda: backend.allreduce_coalesced(
            [own, whole], c10d.AllreduceCoalescedOptions()
        ),
        "broadcast(rank 0": lambda: backend.broadcast([own], c10d.BroadcastOptions()),
        'reduce("sum"': lambda: backend.reduce([own], c10d.ReduceOptions()),
        "gather(rank 0": lambda: backend.gather(
            [parts] if root else [], [own], c10d.GatherOptions()
        ),
        "scatter(rank 0": lambda: backend.scatter(
            [own], [parts] if root else [], c10d.ScatterOptions()
        ),
        "all_gather(float32": lambda: backend.allgather([parts], [own], c10d.AllgatherOptions()),
        "all_gather_into_tensor(float32": lambda: backend.all_gather_single(
            whole, own, c10d.AllgatherOptions()
        ),
        "all_gather_into_tensor_coalesced(float32": lambda: backend.all_gather_single_coalesced(
            [whole], [own], c10d.AllgatherOptions()
        ),
        'reduce_scatter("sum"': lambda: backend.reduce_scatter(
            [own], [parts], c10d.ReduceScatterOptions()
        ),
        'reduce_scatter_tensor("sum"': lambda: backend.reduce_scatter_single(
            own, whole, c10d.ReduceScatterOptions()
        ),
        'reduce_scatter_tensor_coalesced("sum"': lambda: backend.reduce_scatter_single_coalesced(
            [own], [whole], c10d.ReduceScatterOptions()
        ),
        "all_to_all(float32": lambda: backend.alltoall(parts, parts, c10d.AllToAllOptions()),
        "all_to_all_single(float32": lambda: backend.all_to_all_single(
            whole, whole, [], [], c10d.AllToAllOptions()
        ),
    }


@needs_backends
def test_ranks_agree_before_the_backend_of_the_other_device(rank, size, monkeypatch):
    """By torch's fake backend and meta tensors, as neither needs a device."""
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "meta", "fake")
    kinds = list(calls_of(None, rank, size))
    for kind in kinds:
        group = dist.new_group(backend="cpu:mpistrat,meta:mpistrat")
        backend = group._get_backend(torch.device("meta"))
        tensor = torch.ones(2)
        dist.all_reduce(tensor, group=group)
        assert tensor.tolist() == [size] * 2
        calls = calls_of(backend, rank, size)
        assert calls[kind]().wait()
        if size > 1:
            words = rf"torch\.{re.escape(kind)}.*  test_backend_base.py(.*\n)+.*torch.barrier"
            with pytest.raises(CollectiveMismatchError, match=words):
                dist.barrier(group=group) if rank else calls[kind]()
        dist.destroy_process_group(group)


@needs_backends
def test_batches_of_messages_beside_the_backend_of_the_other_device(rank, size, monkeypatch):
    pytest.importorskip("torch.testing._internal.distributed.fake_pg")
    monkeypatch.setitem(dist.Backend.default_device_backend_map, "meta", "fake")
    group = dist.new_group(backend="cpu:mpistrat,meta:mpistrat")
    if size > 1:
        to, source = (rank + 1) % size, (rank - 1) % size
        batch = [dist.P2POp(dist.isend, torch.tensor([rank]), to, group)]
        output = torch.empty(1, dtype=torch.int64)
        batch.append(dist.P2POp(dist.irecv, output, source, group))
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        assert output.item() == source
    dist.barrier(group=group)
    dist.destroy_process_group(group)


@pytest.mark.skipif(not hasattr(dist, "gather_single"), reason="needs torch 2.14")
def test_gather_into_one_tensor(rank, size):
    group, root = dist.new_group(backend="mpistrat"), size - 1
    for shape in ((2 * size, 3), (size, 2, 3)):
        whole = torch.empty(*shape, 2)[..., 0]
        own = torch.full((2, 3), float(rank))
        dist.gather_single(own, whole if rank == root else None, dst=root, group=group)
        if rank == root:
            assert whole.reshape(size, 6).tolist() == [[sender] * 6 for sender in range(size)]
    dist.destroy_process_group(group)


@pytest.mark.parametrize("backend", ["cuda:mpistrat", "cpu:gloo,cuda:mpistrat"])
def test_tensors_of_other_devices_alone_are_refused(backend):
    with pytest.raises(ValueError, match=f'The backend "{backend}" is not possible'):
        mst.init(backend=backend)
    dist.barrier()


@pytest.mark.parametrize("backend", ["cpu:mpistrat,cuda:nccl", "cpu:mpistrat,cuda:mpistrat"])
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without GPU")
def test_what_torch_or_the_machine_cannot_do_is_refused(backend):
    kind = LaunchError if IS_THERE else NotImplementedError
    words = "needs a GPU" if IS_THERE else rf"needs PyTorch 2.14 .* {torch.__version__[:4]}"
    with pytest.raises(kind, match=words):
        mst.init(backend=backend)
    with pytest.raises(kind, match=words):
        dist.new_group(backend=backend)
    dist.barrier()
