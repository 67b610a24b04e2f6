"""Messages between two ranks of the backend, by torch's public functions."""

import pytest
import torch
import torch.distributed as dist

from tests.torch.tensors import equal

pytestmark = [
    pytest.mark.usefixtures("world"),
    # Names of torch 2.13 that are deprecated are the only ones that older versions have.
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning"),
]


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
