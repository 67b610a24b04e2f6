"""Train a convolutional network of PyTorch on handwritten digits with DistributedDataParallel.

    python jobs/prepare_digits.py --output data/digits.h5
    mpiexec -n 4 python jobs/train_torch_ddp.py --data data/digits.h5 --output runs/torch
    torchrun --nproc-per-node=4 jobs/train_torch_ddp.py --data data/digits.h5 --output runs/torch

Three things are not PyTorch's: the backend over MPI, the data, which are read in one order at any
number of ranks, and the checkpoints. torchrun starts the program without MPI, with the backend
gloo. Either command resumes from the newest checkpoint, also at another number of ranks.
"""

import digits_torch
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import mpistrat.torch as mst


def main():
    """Train and test. **Collective**: every rank runs this program."""
    args = digits_torch.parse_arguments(__doc__)
    if dist.is_torchelastic_launched():  # by torchrun
        dist.init_process_group("gloo")
    else:
        mst.init()
    torch.set_num_threads(1)
    network = digits_torch.make_network(args.seed)
    model = DistributedDataParallel(network, gradient_as_bucket_view=True)
    optimizer = digits_torch.make_optimizer(model)

    def step(image, label):
        loss = digits_torch.weighted_loss(model, image, label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss.item()

    digits_torch.fit(args, step, model=model, optimizer=optimizer)
    mst.assert_replicas_agree(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
