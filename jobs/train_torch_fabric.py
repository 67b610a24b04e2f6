"""Train a convolutional network of PyTorch on handwritten digits with Lightning Fabric.

    python jobs/prepare_digits.py --output data/digits.h5
    mpiexec -n 4 python jobs/train_torch_fabric.py --data data/digits.h5 --output runs/torch

Fabric wraps the network and the optimizer, and uses the process group that is there. The data and
the checkpoints are those of `train_torch_ddp.py`.
"""

import os

import digits_torch
import torch
import torch.distributed as dist

import mpistrat.torch as mst

try:
    from lightning.fabric import Fabric
    from lightning.fabric.plugins.environments import MPIEnvironment
except ImportError:
    raise SystemExit("train_torch_fabric.py needs Lightning: pip install lightning") from None


def main():
    """Train and test. **Collective**: every rank runs this program."""
    args = digits_torch.parse_arguments(__doc__)
    mst.init()  # before Fabric looks for the other ranks
    local_size = int(os.environ["LOCAL_WORLD_SIZE"])
    fabric = Fabric(
        accelerator="cpu",
        devices=local_size,
        num_nodes=dist.get_world_size() // local_size,
        strategy="ddp",
        plugins=MPIEnvironment(),
    )
    fabric.launch()
    torch.set_num_threads(1)
    network = digits_torch.make_network(args.seed)
    model, optimizer = fabric.setup(network, digits_torch.make_optimizer(network))

    def step(image, label):
        loss = digits_torch.weighted_loss(model, image, label)
        optimizer.zero_grad()
        fabric.backward(loss)
        optimizer.step()
        return loss.item()

    digits_torch.fit(args, step, model=model, optimizer=optimizer)
    mst.assert_replicas_agree(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
