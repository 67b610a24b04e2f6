"""Training with DistributedDataParallel over MPI, started by mpiexec."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import mpistrat.torch as mst

mst.init()
torch.manual_seed(0)
image = torch.randn(512, 1, 8, 8)
dataset = TensorDataset(image, image.mean(dim=(1, 2, 3)).gt(0).long())

sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=32 // dist.get_world_size(), sampler=sampler)

layers = nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 2)
model = DistributedDataParallel(nn.Sequential(*layers))
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)

for epoch in range(3):
    sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
    if dist.get_rank() == 0:
        print(f"epoch {epoch}, loss: {loss.item():.4f}")

if dist.get_rank() == 0:
    torch.save(model.module.state_dict(), "model.pt")
dist.destroy_process_group()
