"""What Lightning Fabric does with a process group. Argument: a folder."""

import os
import sys

import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.fabric.plugins.environments import MPIEnvironment
from lightning.fabric.strategies import DDPStrategy
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms
import mpistrat.torch as mst

folder = sys.argv[1]
mst.set_environment()
local_size = int(os.environ["LOCAL_WORLD_SIZE"])
fabric = Fabric(
    accelerator="cpu",
    devices=local_size,
    num_nodes=int(os.environ["WORLD_SIZE"]) // local_size,
    strategy=DDPStrategy(process_group_backend="mpistrat"),
    plugins=MPIEnvironment(),
)
fabric.launch()
rank, size = fabric.global_rank, fabric.world_size
assert dist.get_backend() == "mpistrat"
assert (rank, size) == (dist.get_rank(), dist.get_world_size())

# Collectives
assert fabric.all_gather(torch.tensor([float(rank)])).flatten().tolist() == list(range(size))
assert fabric.all_gather({"rank": rank})["rank"].tolist() == list(range(size))
assert fabric.all_reduce(torch.tensor(float(rank))).item() == (size - 1) / 2
assert fabric.all_reduce(torch.tensor(rank), reduce_op="sum").item() == size * (size - 1) // 2
assert fabric.broadcast({"from": rank}, src=size - 1) == {"from": size - 1}
with fabric.rank_zero_first():
    pass
fabric.barrier()

# Its own samplers: each example on one rank, in a shuffled order.
numbers = DataLoader(TensorDataset(torch.arange(6 * size)), batch_size=2, shuffle=True)
seen = torch.cat([batch for (batch,) in fabric.setup_dataloaders(numbers)])
assert sorted(fabric.all_gather(seen).flatten().tolist()) == list(range(6 * size))

# Gradients of several batches, clipped.
torch.manual_seed(rank)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
model, optimizer = fabric.setup(model, optimizer)
for step in range(3):
    with fabric.no_backward_sync(model, enabled=step < 2):
        fabric.backward(model(torch.full((2, 3), float(rank + step))).square().mean())
norm = fabric.clip_gradients(model, optimizer, max_norm=0.1)
assert torch.equal(fabric.all_gather(norm).flatten(), norm.expand(size))
optimizer.step()
mst.assert_replicas_agree(model)

# Checkpoints, Fabric's and ours
fabric.save(f"{folder}/fabric.ckpt", {"model": model, "optimizer": optimizer, "step": 3})
ms.Checkpoint(model=model, optimizer=optimizer).write(f"{folder}/run.h5")
expected = model.weight.detach().clone()
for restore in (
    lambda: fabric.load(f"{folder}/fabric.ckpt", {"model": model, "optimizer": optimizer}),
    lambda: ms.Checkpoint(model=model, optimizer=optimizer).restore(f"{folder}/run.h5"),
):
    torch.nn.init.zeros_(model.weight)
    restore()
    assert torch.equal(model.weight, expected)
    assert len(optimizer.state_dict()["state"]) == 2
plain = torch.nn.Linear(3, 1)
ms.Checkpoint(model=plain).restore(f"{folder}/run.h5").expect_partial()
assert torch.equal(plain.weight, expected)
print(f"rank {rank} is done", flush=True)
dist.destroy_process_group()
