"""Messages between two ranks of the backend, by torch's public functions."""

import functools
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mpistrat.errors import CollectiveTimeoutError
from mpistrat.torch import point_to_point
from tests.torch.tensors import equal

pytestmark = [
    pytest.mark.usefixtures("world"),
    # Names of torch 2.13 that are deprecated are the only ones that older versions have.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]

LARGE = 300_000
"""More elements than travel before the receiver has come."""


def test_messages(rank, size):
    to, source = (rank + 1) % size, (rank - 1) % size
    if size > 1:
        received = torch.empty(3, 2)[:, 0]
        request = dist.isend(torch.full((3,), float(rank)), to, tag=3)
        assert dist.recv(received, source, tag=3) == source
        request.wait()
        equal(received, torch.full((3,), float(source)))
        outputs = [torch.empty(2), torch.empty(0)]
        sent = [torch.full((2,), rank + 1.0), torch.empty(0)]
        batch = [dist.P2POp(dist.isend, each, to) for each in sent]
        batch += [dist.P2POp(dist.irecv, each, source) for each in outputs]
        for work in dist.batch_isend_irecv(batch):
            work.wait()
        equal(outputs[0], torch.full((2,), source + 1.0))
        request = dist.isend(torch.tensor([1 + 1j, rank]), to)
        received = torch.zeros(2, dtype=torch.complex64)
        dist.recv(received, source)
        request.wait()
        equal(received, torch.tensor([1 + 1j, source]))
    dist.barrier()
    if rank == 0:
        seen = {}
        for _ in range(size - 1):
            tensor = torch.empty(1, dtype=torch.int64)
            sender = dist.recv(tensor)
            seen[sender] = tensor.item()
        assert seen == {sender: sender * 10 for sender in range(1, size)}
    else:
        dist.send(torch.tensor([rank * 10]), 0)
    dist.barrier()


def neighbours(rank, size):
    return (rank + 1) % size, (rank - 1) % size


def test_a_rank_sends_to_itself(rank):
    received = torch.zeros(3)
    batch = [
        dist.P2POp(dist.irecv, received, rank),
        dist.P2POp(dist.isend, torch.full((3,), rank + 1.0), rank),
    ]
    for work in dist.batch_isend_irecv(batch):
        work.wait()
    equal(received, torch.full((3,), rank + 1.0))


def test_messages_go_on_while_a_rank_waits_in_a_collective(rank, size):
    """The agreement is in shared memory, where MPI moves nothing."""
    to, source = neighbours(rank, size)
    if size == 1:
        pytest.skip("needs two ranks")
    received = torch.zeros(LARGE)
    if rank == 0:
        dist.send(torch.ones(LARGE), to)
        dist.barrier()
    else:
        request = dist.irecv(received, source) if rank == 1 else None
        dist.barrier()
        if request is not None:
            request.wait()
            assert received.eq(1).all()


def test_a_work_that_is_dropped_keeps_its_memory(rank, size):
    to, source = neighbours(rank, size)
    received = [torch.zeros(LARGE) for _ in range(2)]
    dist.irecv(received[0], source, tag=1)
    dist.isend(torch.full((LARGE,), rank + 1.0), to, tag=1)
    dist.isend(torch.full((LARGE,), rank + 2.0), to, tag=2)
    reused = [torch.zeros(LARGE) for _ in range(4)]
    dist.irecv(received[1], source, tag=2).wait()
    assert received[1].eq(source + 2).all()
    assert not any(map(torch.any, reused))
    end = time.monotonic() + 20
    while not received[0].eq(source + 1).all():
        assert time.monotonic() < end
        time.sleep(0.001)


def test_several_threads_wait_for_one_message(rank, size):
    to, source = neighbours(rank, size)
    received = torch.zeros(4)
    request = dist.irecv(received, source)
    with ThreadPoolExecutor(4) as pool:
        waits = [pool.submit(request.wait) for _ in range(4)]
        dist.isend(torch.full((4,), float(rank)), to).wait()
        assert all(wait.result(20) for wait in waits)
    assert request.wait()
    assert request.is_success()
    equal(received, torch.full((4,), float(source)))


def test_a_future_is_completed_without_a_wait(rank, size):
    to, source = neighbours(rank, size)
    request = dist.irecv(torch.zeros(1), source)
    seen = threading.Event()
    request.get_future().then(lambda _: seen.set())
    dist.isend(torch.ones(1), to).wait()
    assert seen.wait(20)


@pytest.mark.parametrize("length", [1, 4])
def test_lengths_that_differ(rank, size, length):
    to, source = neighbours(rank, size)
    request = dist.irecv(torch.zeros(2), source)
    sent = dist.isend(torch.zeros(length), to)
    came = "4" if length == 1 else "more"
    for _ in range(2):
        with pytest.raises(
            ValueError, match=rf"on rank {rank} of .*: expected 8 bytes, but {came}"
        ):
            request.wait()
    assert not request.is_success()
    assert isinstance(request.exception(), ValueError)
    sent.wait()


def test_wrong_messages_are_refused(rank, size):
    tensor = torch.zeros(2)
    for words, call in (
        ("the tag must be", functools.partial(dist.isend, tensor, rank, tag=-1)),
        ("the other rank must be", functools.partial(dist.isend, tensor, group_dst=size)),
        ("the other rank must be", functools.partial(dist.irecv, tensor, group_src=-1)),
        ("the other rank must be", functools.partial(dist.irecv, tensor, group_src=-2)),
        ("cannot be written", functools.partial(dist.irecv, tensor[:1].expand(2), rank)),
    ):
        with pytest.raises(ValueError, match=rf"on rank {rank} of {size}: .*{words}"):
            call()


def test_a_message_that_does_not_come(rank, size):
    received = torch.zeros(2)
    request = dist.irecv(received, rank)
    match = rf"torch.recv from rank {rank} at .* on rank {rank} of {size} .* timeout of 0.1 s"
    with pytest.raises(CollectiveTimeoutError, match=match):
        request.wait(timedelta(seconds=0.1))
    dist.isend(torch.ones(2), rank).wait()
    assert request.wait()
    equal(received, torch.ones(2))


def test_types_of_messages_that_mpi_cannot_count():
    for num_bytes in (2**20, 2**20 + 1, 2**31, 2**33 + 7):
        assert point_to_point._type_of(num_bytes).Get_size() == num_bytes


@pytest.mark.parametrize("length", [10, 100_000])
def test_what_nobody_receives_ends_with_its_group(rank, size, length):
    if size == 1:
        pytest.skip("needs two ranks")
    for number in range(5):
        group = dist.new_group(range(size))
        if rank == 0:
            # Only the first of them is received.
            for shift in range(3):
                dist.isend(torch.full((length,), float(number + 100 * shift)), 1, group=group)
        elif rank == 1:
            received = torch.empty(length)
            dist.recv(received, 0, group=group)
            assert torch.equal(received, torch.full((length,), float(number)))
        dist.barrier(group=group)
        dist.destroy_process_group(group)
