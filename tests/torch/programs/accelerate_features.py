"""What Hugging Face Accelerate does with a process group. Argument: a folder."""

import sys

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedType
from accelerate.utils import broadcast_object_list, gather_object, set_seed
from torch.utils.data import DataLoader, TensorDataset

import mpistrat as ms
import mpistrat.torch as mst

folder = sys.argv[1]
mst.init()
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
rank, size = accelerator.process_index, accelerator.num_processes
assert (rank, size) == (dist.get_rank(), dist.get_world_size())
if size > 1:
    assert accelerator.distributed_type == DistributedType.MULTI_CPU
assert accelerator.local_process_index == mst.strategy().local_rank

# Collectives
assert accelerator.gather(torch.tensor([float(rank)])).tolist() == list(range(size))
assert accelerator.reduce(torch.tensor(float(rank)), "sum").item() == size * (size - 1) / 2
padded = accelerator.pad_across_processes(torch.ones(rank + 1))
assert padded.shape == (size,)
assert gather_object([{"rank": rank}]) == [{"rank": each} for each in range(size)]
assert broadcast_object_list([rank], from_process=size - 1) == [size - 1]
with accelerator.split_between_processes(list(range(2 * size))) as own:
    assert own == [2 * rank, 2 * rank + 1]
with accelerator.main_process_first():
    pass
accelerator.wait_for_everyone()

# Its own shards of a data set whose last batch is short: examples added to fill it are dropped.
numbers = DataLoader(TensorDataset(torch.arange(2 * size + 1)), batch_size=2)
prepared = accelerator.prepare(numbers)
seen = [accelerator.gather_for_metrics(batch) for (batch,) in prepared]
assert torch.cat(seen).tolist() == list(range(2 * size + 1))

# Gradients of several batches, clipped.
set_seed(rank)
model = torch.nn.Linear(3, 1)
model, optimizer = accelerator.prepare(model, torch.optim.Adam(model.parameters(), lr=0.1))
for step in range(4):
    with accelerator.accumulate(model):
        loss = model(torch.full((2, 3), float(rank + step))).square().mean()
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.1)
            assert torch.equal(accelerator.gather(norm.reshape(1)), norm.expand(size))
        optimizer.step()
        optimizer.zero_grad()
mst.assert_replicas_agree(model)

# Checkpoints, Accelerate's and ours
accelerator.save_state(f"{folder}/accelerate")
accelerator.wait_for_everyone()
ms.Checkpoint(model=model, optimizer=optimizer).write(f"{folder}/run.h5")
expected = accelerator.unwrap_model(model).weight.detach().clone()
for restore in (
    lambda: accelerator.load_state(f"{folder}/accelerate"),
    lambda: ms.Checkpoint(model=model, optimizer=optimizer).restore(f"{folder}/run.h5"),
):
    torch.nn.init.zeros_(accelerator.unwrap_model(model).weight)
    restore()
    assert torch.equal(accelerator.unwrap_model(model).weight, expected)
    assert len(optimizer.state_dict()["state"]) == 2
plain = torch.nn.Linear(3, 1)
ms.Checkpoint(model=plain).restore(f"{folder}/run.h5").expect_partial()
assert torch.equal(plain.weight, expected)
print(f"rank {rank} is done", flush=True)
accelerator.end_training()  # which destroys the group
assert not dist.is_initialized()
