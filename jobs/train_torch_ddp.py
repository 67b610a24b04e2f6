"""Train a convolutional network of PyTorch on handwritten digits with DistributedDataParallel.

    python jobs/prepare_digits.py --output data/digits.h5
    mpiexec -n 4 python jobs/train_torch_ddp.py --data data/digits.h5 --output runs/torch

Three things are not PyTorch's: the backend over MPI, the data, which are read in one order at any
number of ranks, and the checkpoints. The same command resumes from the newest one, also at another
number of ranks.
"""

import argparse

import numpy as np

import mpistrat as ms

try:
    import torch
    import torch.distributed as dist
    from torch import nn
except ImportError:
    raise SystemExit("train_torch_ddp.py needs PyTorch: pip install torch") from None

import mpistrat.torch as mst


def parse_arguments():
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", default="data/digits.h5", metavar="FILE", help="made by prepare_digits.py")
    add("--output", default="runs/torch", metavar="FOLDER", help="of the checkpoints")
    add("--epochs", type=int, default=15, metavar="N")
    add("--batch-size", type=int, default=64, metavar="N", help="examples over all ranks")
    add("--seed", type=int, default=0, metavar="N", help="of the parameters and of the order")
    return parser.parse_args()


def make_loader(args, part, **batching):
    """Return the batches of one part of the file: this rank's share of each. **Collective**."""
    dataset = ms.data.Dataset.from_hdf5(args.data, fields=(f"{part}/image", f"{part}/label"))
    if part == "train":
        dataset = dataset.shuffle(seed=args.seed)
    # The batches of DDP must not be empty on any rank.
    return mst.HDF5Dataset(dataset.batch(args.batch_size, **batching))


def count(values):
    """Return the sums of some numbers over all ranks. **Collective**."""
    totals = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(totals)
    return totals.tolist()


def logits_of(model, image):
    """Return the output of the network for images of shape ``(n, 8, 8)``."""
    return model(image[:, None].float() / 16)


def train(model, optimizer, batches):
    """Train for one pass; return the mean loss. **Collective**."""
    total = num_examples = 0.0
    for image, label in batches:
        # DDP averages over ranks, whose shares may differ by one example: weigh them.
        (global_size,) = count([len(label)])
        loss = nn.functional.cross_entropy(logits_of(model, image), label.long(), reduction="sum")
        optimizer.zero_grad()
        (loss * dist.get_world_size() / global_size).backward()
        optimizer.step()
        total += loss.item()
        num_examples += len(label)
    total, num_examples = count([total, num_examples])
    return total / num_examples


@torch.no_grad()
def test(module, batches):
    """Return the accuracy on all batches. **Collective** at its end."""
    right = num_examples = 0
    for image, label in batches:
        right += int((logits_of(module, image).argmax(dim=1) == label).sum())
        num_examples += len(label)
    right, num_examples = count([right, num_examples])
    return right / num_examples


def main():
    """Train and test. **Collective**: every rank runs this program."""
    args = parse_arguments()
    mst.init()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    train_batches = make_loader(args, "train", drop_remainder=True)
    test_batches = make_loader(args, "test")
    layers = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 10)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*layers), gradient_as_bucket_view=True
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    strategy = mst.strategy()
    with strategy.scope():
        epochs = ms.Variable(np.int64(0), name="epochs")
    saved = ms.Checkpoint(
        model=model, optimizer=optimizer, scheduler=scheduler, batches=train_batches, epochs=epochs
    )
    manager = ms.CheckpointManager(saved, args.output, step_counter=epochs)
    if (path := manager.restore_or_initialize()) and strategy.is_chief:
        print(f"resumes from {path} on {strategy.size} rank(s)", flush=True)
    while epochs.numpy() < args.epochs:
        loss = train(model, optimizer, train_batches)
        scheduler.step()
        accuracy = test(model.module, test_batches)
        epochs.assign_add(1)
        manager.save()
        if strategy.is_chief:
            print(f"epoch {int(epochs.numpy())}, loss: {loss:.4f}, test accuracy: {accuracy:.4f}")
    mst.assert_replicas_agree(model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
