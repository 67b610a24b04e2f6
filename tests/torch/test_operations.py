"""Operations of the backend: several at a time, and by other interfaces of torch."""

import math

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d as c10d

from tests.helpers import triangle
from tests.torch.tensors import equal

pytestmark = [
    pytest.mark.usefixtures("world"),
    # Names of torch 2.13 that are deprecated are the only ones that older versions have.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


def test_conjugated_tensors(rank, size, world):
    """By the methods of the group: torch's functions refuse some."""
    parts = torch.complex(torch.ones(size), torch.full((size,), float(rank))).conj()
    total = torch.tensor([complex(size, -triangle(size))] * size)
    whole = torch.empty(1, dtype=torch.complex64)
    world.reduce_scatter_single(whole, parts).wait()
    equal(whole, total[:1])
    world.broadcast([parts]).wait()
    assert parts.tolist() == [1] * size
    received = list(torch.zeros(size, size, dtype=torch.complex64).conj().unbind())
    world.allgather([received], [parts + 1j * rank]).wait()
    for sender, each in enumerate(received):
        assert each.tolist() == [1 + 1j * sender] * size
    own = torch.full((2,), 1 + 1j * rank).conj()
    world.allreduce([own]).wait()
    assert own.tolist() == total[:1].tolist() * 2
    dist.barrier()


@pytest.mark.parametrize("number", [1, 2, 3])
def test_all_gather_of_several_tensors_per_rank(rank, size, world, number):
    given = [torch.full((2, 3), float(rank * number + k)) for k in range(number)]
    outputs = [[torch.empty(2, 3) for _ in range(number * size)] for _ in range(number)]
    work = world.allgather(outputs, given)
    work.wait()
    expected = [torch.full((2, 3), float(k)) for k in range(number * size)]
    for each in outputs:
        equal(torch.stack(each), torch.stack(expected))
    if number > 1:
        assert work.get_future().value() == outputs
        with pytest.raises(ValueError, match=f"as many lists of {number * size} tensors"):
            world.allgather(outputs[:1], given).wait()


ONE, WIDE, DOUBLE = torch.zeros(1), torch.zeros(2), torch.zeros(1, dtype=torch.float64)


def with_root_tensor(options, number):
    options.rootTensor = number
    return options


@pytest.mark.parametrize(
    "call",
    [
        lambda group: group.broadcast([], c10d.BroadcastOptions()),
        lambda group: group.broadcast([ONE, DOUBLE], c10d.BroadcastOptions()),
        lambda group: group.broadcast([ONE, WIDE], c10d.BroadcastOptions()),
        lambda group: group.broadcast([ONE], with_root_tensor(c10d.BroadcastOptions(), 1)),
        lambda group: group.reduce([ONE, ONE], c10d.ReduceOptions()),
        lambda group: group.reduce([ONE], with_root_tensor(c10d.ReduceOptions(), 1)),
        lambda group: group.gather([], [ONE, ONE], c10d.GatherOptions()),
        lambda group: group.scatter([ONE, ONE], [], c10d.ScatterOptions()),
        lambda group: group.reduce_scatter([ONE, ONE], [[ONE], [ONE]], c10d.ReduceScatterOptions()),
        lambda group: group.allreduce_coalesced([], c10d.AllreduceCoalescedOptions()),
        lambda group: group.allreduce_coalesced([ONE, DOUBLE], c10d.AllreduceCoalescedOptions()),
        lambda group: group.allreduce([ONE, WIDE], c10d.AllreduceOptions()),
    ],
)
def test_tensors_that_do_not_fit_are_refused_on_every_rank(world, call):
    with pytest.raises(ValueError, match="expected"):
        call(world).wait()
    dist.barrier()


def test_coalesced(rank, size):
    tensors = [torch.full((3,), float(rank)), torch.tensor(float(rank))]
    dist.all_reduce_coalesced(tensors)
    equal(tensors[0], torch.full((3,), float(triangle(size))))
    equal(tensors[1], torch.tensor(float(triangle(size))))
    outputs = [[torch.empty(2), torch.empty(1)] for _ in range(size)]
    dist.all_gather_coalesced(outputs, [torch.full((2,), rank + 0.5), torch.ones(1) * rank])
    for sender, (first, second) in enumerate(outputs):
        equal(first, torch.full((2,), sender + 0.5))
        equal(second, torch.ones(1) * sender)


def test_groups_used_in_different_order(rank, size):
    groups = [dist.new_group(list(range(size)), backend="mpistrat") for _ in range(2)]
    tensors = [torch.full((4,), float(rank + i)) for i in range(2)]
    order = (0, 1) if rank % 2 else (1, 0)
    works = [dist.all_reduce(tensors[i], group=groups[i], async_op=True) for i in order]
    for work in works:
        work.wait()
    for i in range(2):
        assert tensors[i].tolist() == [triangle(size) + i * size] * 4
    for group in groups:
        dist.destroy_process_group(group)
    evens = dist.new_group(list(range(0, size, 2)), backend="mpistrat")
    if rank % 2 == 0:
        tensor = torch.tensor(rank)
        dist.broadcast(tensor, (size - 1) // 2 * 2, group=evens)
        assert tensor == (size - 1) // 2 * 2
        dist.destroy_process_group(evens)


def test_objects(rank, size):
    gathered = [None] * size
    dist.all_gather_object(gathered, {"rank": rank, "text": "x" * rank})
    assert gathered == [{"rank": r, "text": "x" * r} for r in range(size)]
    objects = [rank, "from"] if rank == size - 1 else [None, None]
    dist.broadcast_object_list(objects, size - 1)
    assert objects == [size - 1, "from"]
    gathered = [None] * size if rank == 0 else None
    dist.gather_object((rank,), gathered, 0)
    assert gathered == ([(r,) for r in range(size)] if rank == 0 else None)
    received = [None]
    dist.scatter_object_list(received, list("abcdefgh"[:size]) if rank == 0 else None, 0)
    assert received == ["abcdefgh"[rank]]


def test_functional_collectives(rank, size, world):
    own = torch.full((2, 2), float(rank))
    reduced = functional.all_reduce(own, "sum", world)
    assert (functional.wait_tensor(reduced) == triangle(size)).all()
    assert (own == rank).all()
    gathered = functional.wait_tensor(functional.all_gather_tensor(own, 0, world))
    equal(gathered, torch.arange(float(size)).repeat_interleave(4).reshape(-1, 2))
    gathered = functional.wait_tensor(functional.all_gather_tensor(own, 1, world))
    equal(gathered, torch.arange(float(size)).repeat_interleave(2).expand(2, -1))
    whole = torch.arange(float(size * 2)) + rank
    part = functional.wait_tensor(functional.reduce_scatter_tensor(whole, "avg", 0, world))
    mean = triangle(size) / size
    torch.testing.assert_close(part, torch.tensor([2 * rank + mean, 2 * rank + 1 + mean]))
    both = functional.all_reduce_coalesced([own, own[0]], "max", world)
    assert all((functional.wait_tensor(each) == size - 1).all() for each in both)
    pair = functional.all_gather_into_tensor_coalesced([own, own[0]], world)
    assert [functional.wait_tensor(each).shape[0] for each in pair] == [2 * size, 2 * size]
    sent = functional.broadcast(own, size - 1, world)
    assert (functional.wait_tensor(sent) == size - 1).all()
    moved = functional.wait_tensor(functional.all_to_all_single(whole, None, None, world))
    equal(moved, torch.tensor([2.0 * rank + i + s for s in range(size) for i in (0, 1)]))
    differing = functional.reduce_scatter_tensor_coalesced([whole, whole], "sum", [0, 0], world)
    for each in differing:
        assert math.isclose(functional.wait_tensor(each)[0], 2 * rank * size + triangle(size))
