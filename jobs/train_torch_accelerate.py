"""Train a convolutional network of PyTorch on handwritten digits with Hugging Face Accelerate.

    python jobs/prepare_digits.py --output data/digits.h5
    mpiexec -n 4 python jobs/train_torch_accelerate.py --data data/digits.h5 --output runs/torch

Accelerate wraps the network and the optimizer, and uses the process group that is there. The data,
which must not be prepared, and the checkpoints are those of `train_torch_ddp.py`.
"""

import digits_torch
import torch
import torch.distributed as dist

import mpistrat.torch as mst

try:
    from accelerate import Accelerator
except ImportError:
    raise SystemExit("train_torch_accelerate.py needs Accelerate: pip install accelerate") from None


def main():
    """Train and test. **Collective**: every rank runs this program."""
    args = digits_torch.parse_arguments(__doc__)
    mst.init()  # before Accelerate looks for the other ranks
    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    network = digits_torch.make_network(args.seed)
    # Batches are not prepared: each rank reads its own share already.
    model, optimizer = accelerator.prepare(network, digits_torch.make_optimizer(network))

    def step(image, label):
        loss = digits_torch.weighted_loss(model, image, label)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        return loss.item()

    digits_torch.fit(args, step, model=model, optimizer=optimizer)
    mst.assert_replicas_agree(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
