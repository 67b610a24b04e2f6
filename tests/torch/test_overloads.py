"""Methods of a group take both forms of torch's arguments."""

import functools
import operator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from mpistrat.torch.overloads import FORMS, nested
from tests.helpers import triangle

pytestmark = pytest.mark.usefixtures("world")

LIMIT = timedelta(seconds=60)


def own(rank):
    return torch.full((2,), float(rank))


def largest(options):
    found = options()
    if hasattr(found, "reduceOp"):
        found.reduceOp = dist.ReduceOp.MAX
    return found


@pytest.mark.parametrize(
    "call",
    [
        lambda group, x: group.allreduce(x, dist.ReduceOp.MAX),
        lambda group, x: group.allreduce(tensor=x, op=dist.ReduceOp.MAX, timeout=LIMIT),
        lambda group, x: group.allreduce([x], dist.ReduceOp.MAX, LIMIT),
        lambda group, x: group.allreduce(tensors=[x], opts=largest(c10d.AllreduceOptions)),
        lambda group, x: group.allreduce([x], largest(c10d.AllreduceOptions)),
    ],
)
def test_all_reduce(rank, size, world, call):
    tensor = own(rank)
    call(world, tensor).wait()
    assert tensor.tolist() == [size - 1.0] * 2


def test_by_default_it_sums(rank, size, world):
    tensor, other = own(rank), own(rank)
    world.allreduce(tensor).wait()
    world.allreduce([other]).wait()
    assert tensor.tolist() == other.tolist() == [triangle(size)] * 2


def test_broadcast_and_reduce(rank, size, world):
    root = size - 1
    for call in (
        lambda x: world.broadcast(x, root),
        lambda x: world.broadcast(tensor=x, root=root, timeout=LIMIT),
    ):
        tensor = own(rank)
        call(tensor).wait()
        assert tensor.tolist() == [float(root)] * 2
    tensor = own(rank)
    world.reduce(tensor, root, dist.ReduceOp.SUM).wait()
    if rank == root:
        assert tensor.tolist() == [triangle(size)] * 2


def test_gather_and_scatter(rank, size, world):
    parts = [torch.zeros(2) for _ in range(size)]
    world.allgather(parts, own(rank)).wait()
    assert [part[0].item() for part in parts] == list(range(size))
    others = [torch.zeros(2) for _ in range(size)] if rank == 0 else []
    world.gather(others, own(rank), 0).wait()
    assert [part[0].item() for part in others] == list(range(size if rank == 0 else 0))
    received = torch.zeros(2)
    world.scatter(received, parts if rank == 0 else [], root=0).wait()
    assert received.tolist() == own(rank).tolist()


def test_reduce_scatter_and_all_to_all(rank, size, world):
    output = torch.zeros(2)
    world.reduce_scatter(output, [own(each) for each in range(size)], dist.ReduceOp.SUM).wait()
    assert output.tolist() == [float(size * rank)] * 2
    world.reduce_scatter(output=output, input=[own(each) for each in range(size)]).wait()
    assert output.tolist() == [float(size * rank)] * 2
    received = torch.zeros(size)
    world.alltoall_base(received, torch.full((size,), float(rank)), [], [], LIMIT).wait()
    assert received.tolist() == list(range(size))


def test_barriers(world):
    world.barrier(timeout=LIMIT).wait()
    world.barrier().wait()
    assert world.monitored_barrier(LIMIT, wait_all_ranks=True) is None


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((), {}),
        ((torch.ones(1), dist.ReduceOp.SUM, LIMIT, 4), {}),
        ((torch.ones(1),), {"root": 0}),
        ((torch.ones(1),), {"tensors": [torch.ones(1)]}),
        (([torch.ones(1)],), {"opts": c10d.AllreduceOptions(), "op": dist.ReduceOp.MAX}),
        (([torch.ones(1)], dist.ReduceOp.MAX, c10d.AllreduceOptions()), {}),
    ],
)
def test_other_arguments_are_refused(world, args, kwargs):
    with pytest.raises(TypeError, match="allreduce takes tensors and either opts or op, timeout"):
        world.allreduce(*args, **kwargs)


def test_each_form_is_one_of_torch():
    for name, form in FORMS.items():
        text = getattr(dist.ProcessGroup, name).__doc__
        assert form.options.__name__ in text
        assert all(f" {each}: " in text for each in form.settings)


def test_nesting():
    tensor = torch.ones(1)
    assert nested(tensor, 0) is tensor
    assert nested(tensor, 2) == [[tensor]]
    assert nested([tensor], 2) == [[tensor]]
    assert nested([[tensor]], 2) == [[tensor]]
    assert nested([], 2) == []


@pytest.mark.parametrize(
    ("op", "expected"),
    [
        (dist.ReduceOp.SUM, lambda values: sum(values)),
        (dist.ReduceOp.MIN, min),
        (dist.ReduceOp.MAX, max),
        (dist.ReduceOp.BXOR, lambda values: functools.reduce(operator.xor, values)),
    ],
)
def test_several_tensors_of_a_rank_are_reduced_as_those_of_several_ranks(
    rank, size, world, op, expected
):
    tensors = [torch.tensor([2 * rank]), torch.tensor([2 * rank + 1])]
    world.allreduce(tensors, op).wait()
    assert [int(each) for each in tensors] == [expected(list(range(2 * size)))] * 2


@pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning")
def test_several_sparse_tensors_of_a_rank_are_added_up(rank, size, world):
    tensors = []
    for place in (2 * rank, 2 * rank + 1):
        dense = torch.zeros(2 * size)
        dense[place] = rank + 1.0
        tensors.append(dense.to_sparse())
    world.allreduce(tensors).wait()
    expected = [place // 2 + 1.0 for place in range(2 * size)]
    assert [each.to_dense().tolist() for each in tensors] == [expected] * 2


def test_several_tensors_must_be_alike_and_have_no_average(world):
    for tensors, op in (
        ([torch.ones(2), torch.ones(3)], dist.ReduceOp.SUM),
        ([torch.ones(2), torch.ones(2)], dist.ReduceOp.AVG),
        ([], dist.ReduceOp.SUM),
    ):
        with pytest.raises(ValueError, match="expected one tensor, or several"):
            world.allreduce(tensors, op).wait()


@pytest.mark.parametrize("chosen", [0, 1])
def test_all_tensors_of_all_ranks_become_the_chosen_one_of_the_root(rank, size, world, chosen):
    options = c10d.BroadcastOptions()
    options.rootRank, options.rootTensor = size - 1, chosen
    tensors = [own(2 * rank), own(2 * rank + 1)]
    world.broadcast(tensors, options).wait()
    assert [each.tolist() for each in tensors] == [[2.0 * (size - 1) + chosen] * 2] * 2


def test_works_have_flat_lists(rank, size, world):
    received = [torch.empty(2) for _ in range(size)]
    work = world.allgather([received], [own(rank)])
    of_root = [[torch.empty(2) for _ in range(size)]] if rank == 0 else []
    gathered = world.gather(of_root, [own(rank)], root=0)
    expected = [[float(each)] * 2 for each in range(size)]
    assert [each.tolist() for each in work.get_future().wait()] == expected
    assert [each.tolist() for each in work.result()] == expected
    future = gathered.get_future().wait()
    assert [each.tolist() for each in future] == (expected if rank == 0 else [])
