"""Tensors that share memory, and writes by address that autograd must know of."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tests.helpers import triangle

pytestmark = [
    pytest.mark.usefixtures("world"),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


def in_all(tensor, rank, size):
    return [tensor if each == rank else torch.empty_like(tensor) for each in range(size)]


def message(tensor, rank, size):
    """Receive from the rank before."""
    sent = dist.isend(tensor.clone(), (rank + 1) % size)
    dist.recv(tensor, (rank - 1) % size)
    sent.wait()


def broadcast(tensor, rank, size):
    for root in range(size):  # the root's own tensor is not written to
        dist.broadcast(tensor, root)


WRITES = {
    "all_reduce": lambda x, rank, size: dist.all_reduce(x),
    "all_reduce BAND": lambda x, rank, size: dist.all_reduce(
        x.view(torch.int32), dist.ReduceOp.BAND
    ),
    "async": lambda x, rank, size: dist.all_reduce(x, async_op=True).wait(),
    "coalesced": lambda x, rank, size: dist.all_reduce_coalesced([x, torch.ones(1)]),
    "reduce": lambda x, rank, size: [dist.reduce(x, root) for root in range(size)],
    "broadcast": broadcast,
    "scatter": lambda x, rank, size: dist.scatter(x, [x.clone()] * size if rank == 0 else None),
    "gather": lambda x, rank, size: [
        dist.gather(x.clone(), in_all(x, rank, size) if rank == root else None, root)
        for root in range(size)
    ],
    "all_gather": lambda x, rank, size: dist.all_gather(in_all(x, rank, size), x * 3),
    "into": lambda x, rank, size: dist.all_gather_into_tensor(x, x[: len(x) // size] * 5),
    "reduce_scatter": lambda x, rank, size: dist.reduce_scatter(x, [torch.ones_like(x)] * size),
    "reduce_scatter_tensor": lambda x, rank, size: dist.reduce_scatter_tensor(x, x.repeat(size)),
    "all_to_all": lambda x, rank, size: dist.all_to_all(in_all(x, rank, size), [x.clone()] * size),
    "all_to_all_single": lambda x, rank, size: dist.all_to_all_single(x, x * 4),
    "recv": message,
}


@pytest.mark.parametrize("write", WRITES)
def test_a_backward_pass_that_needs_what_was_overwritten_raises(rank, size, write):
    if size == 1 and write in ("recv", "broadcast"):
        pytest.skip("there is no other rank to receive from")
    weight = torch.ones(12, requires_grad=True)
    saved = weight * 2
    loss = (saved * saved).sum()
    WRITES[write](saved.detach(), rank, size)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_what_is_sent_may_be_needed(rank, size):
    weight = torch.ones(12, requires_grad=True)
    saved = weight * 2
    loss = (saved * saved).sum()
    own = saved.detach()
    dist.all_gather([torch.empty(12) for _ in range(size)], own)
    dist.all_gather_into_tensor(torch.empty(12 * size), own)
    dist.reduce_scatter(torch.empty(12), [own] * size)
    dist.all_to_all_single(torch.empty(12), own)
    dist.gather(own, [torch.empty(12) for _ in range(size)] if rank == 0 else None)
    dist.scatter(torch.empty(12), [own] * size if rank == 0 else None)
    dist.broadcast(own if rank == 0 else torch.empty(12), 0)
    loss.backward()
    assert weight.grad.tolist() == [8] * 12


def test_tensors_of_inference(rank, size):
    with torch.inference_mode():
        tensor = torch.full((3,), float(rank))
        dist.all_reduce(tensor)
    assert tensor.tolist() == [triangle(size)] * 3


@pytest.mark.parametrize("length", [3, 30_000])
def test_tensors_of_one_call_that_share_memory(rank, size, length):
    total = triangle(size)
    one = torch.full((length,), float(rank))
    dist.all_reduce_coalesced([one, one, one[1:]])
    assert (one == total).all()
    memory = torch.full((length + 1,), float(rank))
    dist.all_reduce_coalesced([memory[1:], memory[:-1]])
    assert (memory == total).all()


def test_outputs_of_one_call_that_are_its_next_inputs(rank, size):
    backend = c10d._get_default_group()._get_backend(torch.device("cpu"))
    gather = getattr(backend, "all_gather_single_coalesced", None)
    gather = gather or backend.allgather_into_tensor_coalesced
    memory = torch.zeros(2 * size)
    memory[0] = rank + 1
    second = torch.zeros(size)
    gather([memory[:size], second], [torch.full((1,), 10.0 + rank), memory[:1]]).wait()
    assert memory[:size].tolist() == [10.0 + each for each in range(size)]
    assert second.tolist() == [1.0 + each for each in range(size)]
    scatter = getattr(backend, "reduce_scatter_single_coalesced", None)
    scatter = scatter or backend.reduce_scatter_tensor_coalesced
    memory, second = torch.full((size,), float(rank)), torch.zeros(1)
    scatter([memory[:1], second], [torch.ones(size), memory]).wait()
    assert (memory[0], second[0]) == (size, triangle(size))


def test_outputs_in_one_column(rank, size):
    table = torch.zeros(size, 3)
    rows = [table[each : each + 1, 0] for each in range(size)]
    dist.all_gather(rows, torch.full((1,), rank + 1.0))
    assert table[:, 0].tolist() == [1.0 + each for each in range(size)]
    dist.all_to_all(rows, [torch.full((1,), 10.0 * rank + to) for to in range(size)])
    assert table[:, 0].tolist() == [10.0 * sender + rank for sender in range(size)]
    assert table[:, 1:].count_nonzero() == 0
