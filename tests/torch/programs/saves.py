"""Saves a DDP-wrapped module of each rank and restores it, outside of any scope: see `main`."""

import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from joining import join
from torch.distributed.fsdp import FullyShardedDataParallel

import mpistrat as ms


def main(path):
    join()
    rank = dist.get_rank()
    torch.manual_seed(rank)
    module = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 2))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(torch.full((2, 3), float(rank))).sum().backward()
    optimizer.step()
    checkpoint = ms.Checkpoint(model=module, optimizer=optimizer)
    checkpoint.write(path)
    assert Path(path).is_file(), "every rank waits for the file"
    plain = torch.nn.Linear(3, 2)
    status = ms.Checkpoint(model=plain, optimizer=torch.optim.SGD(plain.parameters())).restore(path)
    status.assert_consumed()
    assert torch.equal(plain.weight, module.module.weight)
    generator = torch.Generator().manual_seed(rank)
    if dist.get_world_size() > 1:
        with pytest.raises(ms.errors.CheckpointError, match="generator: differs"):
            ms.Checkpoint(generator=generator).write(path)
    flat = FullyShardedDataParallel(torch.nn.Linear(2, 2), device_id=torch.device("cpu"))
    with pytest.raises(TypeError, match="whose parameters are flat: use fully_shard"):
        ms.Checkpoint(model=torch.nn.Sequential(flat)).write(path)
    dist.destroy_process_group()


main(sys.argv[1])
