"""Train a convolutional network of PyTorch on handwritten digits with FSDP2: in shards.

    python jobs/prepare_digits.py --output data/digits.h5
    mpiexec -n 4 python jobs/train_torch_fsdp.py --data data/digits.h5 --output runs/torch

Each rank keeps its shard of the parameters and of the optimizer's state. A checkpoint has whole
tensors, to which all ranks write. The same command resumes from the newest one, also at another
number of ranks, and so does `train_torch_ddp.py`.
"""

import digits_torch
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import mpistrat.torch as mst


def main():
    """Train and test. **Collective**: every rank runs this program."""
    args = digits_torch.parse_arguments(__doc__)
    mst.init()
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = digits_torch.make_network(args.seed)
    for layer in model:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = digits_torch.make_optimizer(model)

    def step(image, label):
        loss = digits_torch.weighted_loss(model, image, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    digits_torch.fit(args, step, model=model, optimizer=optimizer, parallel=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
