"""Broadcasts, gathers and exchanges of the backend, as a function of rank and size."""

import functools

import pytest
import torch
import torch.distributed as dist

import mpistrat.torch as mst
from mpistrat.errors import CollectiveMismatchError
from tests.helpers import CountingTransport, triangle
from tests.torch.tensors import FORMS, MOVED, dtype_of, equal, numbers, of_ranks

pytestmark = [
    pytest.mark.usefixtures("world"),
    # Names of torch 2.13 that are deprecated are the only ones that older versions have.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.mark.parametrize("dtype", MOVED)
def test_moves_of_each_dtype(rank, size, dtype):
    def own(rank):
        return (torch.arange(4) % 2 * rank).to(dtype_of(dtype)).view(torch.uint8)

    def typed(data):
        return data.view(dtype_of(dtype))

    root = size - 1
    tensor = typed(own(rank).clone())
    dist.broadcast(tensor, root)
    equal(tensor.view(torch.uint8), own(root))
    received = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_gather(received, typed(own(rank)))
    equal(torch.stack(received).view(torch.uint8), torch.stack(list(map(own, range(size)))))
    dist.gather(typed(own(rank)), received if rank == 0 else None, 0)
    dist.scatter(tensor, received if rank == 0 else None, 0)
    equal(tensor.view(torch.uint8), own(rank))
    exchanged = [torch.empty_like(tensor) for _ in range(size)]
    dist.all_to_all(exchanged, [typed(own(rank + to)) for to in range(size)])
    for sender, each in enumerate(exchanged):
        equal(each.view(torch.uint8), own(sender + rank))


@pytest.mark.parametrize("form", FORMS)
def test_moves_of_each_form(rank, size, form):
    expected = of_ranks(size, form=form)
    root = size // 2
    tensor = numbers(rank, form=form)
    dist.broadcast(tensor, root)
    equal(tensor, expected[root])
    received = [torch.zeros_like(numbers(0, form=form)) for _ in range(size)]
    dist.all_gather(received, numbers(rank, form=form))
    for each, right in zip(received, expected, strict=True):
        equal(each, right)
    received = of_ranks(size, form=form)[::-1]
    dist.gather(numbers(rank, form=form), received if rank == root else None, root)
    if rank == root:
        for each, right in zip(received, expected, strict=True):
            equal(each, right)
    tensor = torch.zeros_like(numbers(0, form=form))
    dist.scatter(tensor, expected if rank == root else None, root)
    equal(tensor, expected[rank])
    exchanged = of_ranks(size, form=form)[::-1]
    dist.all_to_all(exchanged, [numbers(rank + to, form=form) for to in range(size)])
    for sender, each in enumerate(exchanged):
        equal(each, numbers(sender + rank, form=form))


def test_all_gather_of_shapes_that_differ(rank, size):
    received = [torch.empty(r, 2) for r in range(size)]
    dist.all_gather(received, torch.full((rank, 2), float(rank)))
    for sender, each in enumerate(received):
        equal(each, torch.full((sender, 2), float(sender)))


def test_all_gather_in_place(rank, size):
    whole = torch.full((size, 3), -1.0)
    whole[rank] = rank
    dist.all_gather_into_tensor(whole, whole[rank])
    equal(whole, torch.arange(float(size))[:, None].expand(size, 3))
    overlapping = torch.full((size * 3 + 1,), float(rank))
    dist.all_gather_into_tensor(overlapping[: size * 3], overlapping[1:4])
    equal(overlapping[: size * 3], torch.arange(float(size)).repeat_interleave(3))
    transposed = torch.zeros(2, size).T
    dist.all_gather_into_tensor(transposed, torch.tensor([[rank, rank + 1.0]]))
    equal(transposed, torch.arange(float(size))[:, None] + torch.arange(2.0))
    rows = list(torch.zeros(size, 3).unbind())
    rows[rank].fill_(rank + 1)
    dist.all_gather(rows, rows[rank])
    for sender, each in enumerate(rows):
        equal(each, torch.full((3,), sender + 1.0))


def test_all_to_all_single_with_splits(rank, size):
    sent = torch.cat([torch.full((to + rank, 2), 10.0 * rank + to) for to in range(size)])
    received = torch.empty(triangle(size) + size * rank, 2)
    splits = [rank + other for other in range(size)]
    dist.all_to_all_single(received, sent, splits, splits)
    expected = [torch.full((rank + sender, 2), 10.0 * sender + rank) for sender in range(size)]
    equal(received, torch.cat(expected))
    even = torch.arange(float(size * 2)) + 100 * rank
    output = torch.empty(size * 2, 2)[:, 0]
    dist.all_to_all_single(output, even)
    equal(output, torch.tensor([100.0 * s + 2 * rank + i for s in range(size) for i in (0, 1)]))
    with pytest.raises(ValueError, match="split_sizes must be"):
        dist.all_to_all_single(torch.empty(3), torch.empty(3), [9] * size, [9] * size)


def test_all_to_all_single_in_place(rank, size):
    for splits in (None, [2] * size):
        tensor = torch.arange(2.0 * size) + 100 * rank
        dist.all_to_all_single(tensor, tensor, splits, splits)
        expected = [[100.0 * s + 2 * rank, 100.0 * s + 2 * rank + 1] for s in range(size)]
        equal(tensor, torch.tensor(expected).flatten())


def test_all_to_all_of_shapes_that_differ(rank, size):
    received = [torch.empty(sender, 2) for sender in range(size)]
    dist.all_to_all(received, [torch.full((rank, 2), 10.0 * rank + to) for to in range(size)])
    for sender, each in enumerate(received):
        equal(each, torch.full((sender, 2), 10.0 * sender + rank))


def test_without_split_sizes_only_the_agreement_is_exchanged(size, world, monkeypatch):
    channel = mst.strategy().extended._collectives.channel
    counting = CountingTransport(channel.transport)
    monkeypatch.setattr(channel, "transport", counting)
    tensor = torch.zeros(size)
    dist.all_to_all_single(tensor.clone(), tensor)
    assert counting.counts["all_gather"] == 0
    dist.all_to_all_single(tensor.clone(), tensor, [1] * size, [1] * size)
    assert counting.counts["all_gather"] == 1


def test_elements_of_ranks_that_do_not_fit_together(rank, size):
    if size == 1:
        pytest.skip("needs two ranks")
    sent = [1] * size
    sent[0] += rank == 1
    with pytest.raises(ValueError, match="rank 1 sends 2 elements to rank 0, which expects 1"):
        dist.all_to_all_single(torch.empty(size), torch.ones(sum(sent)), [1] * size, sent)
    dist.barrier()


def test_wrong_arguments_are_named_with_the_rank(rank, size, world):
    """By the methods of the group: torch's functions refuse some in words of their own."""
    here = rf"on rank {rank} of {size}: "
    two, other = torch.zeros(2), torch.zeros(2, dtype=torch.float64)
    lists = [two] * size, [other] * size
    mixed = [two] * (size - 1) + [other]
    short = torch.zeros(3)
    shared = torch.zeros(1).expand(size + 1)
    dense = torch.eye(size + 1)
    roots = {"group_src": size}, {"group_src": -1}
    for words, kind, call in (
        (r"all tensors must have one dtype", TypeError, lambda: world.alltoall(*lists).wait()),
        *[
            (r"float32 and float64", TypeError, lambda: world.alltoall(mixed, mixed).wait())
            for _ in range(size > 1)
        ],
        (
            r"must have \d tensors",
            ValueError,
            lambda: dist.all_to_all([two] * (size + 1), [two] * (size + 1)),
        ),
        (r"must have \d tensors", ValueError, lambda: dist.all_gather([two] * (size + 1), two)),
        (r"cannot be written", ValueError, lambda: dist.all_reduce(shared)),
        (r"cannot be written", ValueError, lambda: dist.all_gather([shared] * size, shared)),
        (r"sparse_csr", TypeError, lambda: dist.broadcast(dense.to_sparse_csr(), 0)),
        (
            r"sparse_csr",
            TypeError,
            lambda: dist.all_to_all(*[[dense.to_sparse_csr()] * size] * 2),
        ),
        (
            r"equally many",
            ValueError,
            lambda: dist.all_to_all_single(torch.zeros(2 * size), torch.zeros(size)),
        ),
        *[
            (r"the root must be", ValueError, functools.partial(dist.broadcast, two, **root))
            for root in roots
        ],
        (r"the root must be", ValueError, lambda: dist.reduce(two, group_dst=size)),
        (r"the root must be", ValueError, lambda: dist.gather(two, group_dst=size)),
        (r"the root must be", ValueError, lambda: dist.scatter(two, group_src=size)),
        (r"lists", ValueError, lambda: dist.all_gather_coalesced([[two]] * (size + 1), [two])),
        (r"output lists", ValueError, lambda: dist.all_gather_coalesced([[short]] * size, [two])),
        (r"AVG needs", ValueError, lambda: dist.reduce(two.bool(), 0, dist.ReduceOp.AVG)),
    ):
        with pytest.raises(kind, match=here + rf".*{words}"):
            call()
    dist.barrier()


def test_a_shared_tensor_can_be_broadcast(rank, size):
    tensor = torch.tensor(3.0).expand(4) if rank == size - 1 else torch.zeros(4)
    dist.broadcast(tensor, size - 1)
    assert tensor.tolist() == [3.0] * 4


def test_split_sizes_on_some_ranks_alone_are_a_disagreement(rank, size):
    if size == 1:
        pytest.skip("needs two ranks that can disagree")
    group = dist.new_group(range(size))
    own, received = torch.ones(size), torch.empty(size)
    sizes = [1] * size if rank == 0 else None
    with pytest.raises(
        CollectiveMismatchError, match=r"rank 0: +torch.all_to_all_single.*split sizes"
    ):
        dist.all_to_all_single(received, own, sizes, sizes, group=group)
    dist.destroy_process_group(group)
