"""What the jobs with PyTorch share: the digits, the network, and the loop over epochs.

The jobs differ in who wraps the network and calls `backward`: `train_torch_ddp.py`,
`train_torch_fabric.py`, `train_torch_accelerate.py` and `train_torch_fsdp.py`. They train the same
network in the same order, so each resumes from the checkpoints of the others.
"""

import argparse

import mpistrat as ms

try:
    import torch
    import torch.distributed as dist
    from torch import nn
except ImportError:
    raise SystemExit("This job needs PyTorch: pip install torch") from None

import mpistrat.torch as mst


def parse_arguments(description):
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=description.split("\n")[0])
    add = parser.add_argument
    add("--data", default="data/digits.h5", metavar="FILE", help="made by prepare_digits.py")
    add("--output", default="runs/torch", metavar="FOLDER", help="of the checkpoints")
    add("--epochs", type=int, default=15, metavar="N")
    add("--batch-size", type=int, default=64, metavar="N", help="examples over all ranks")
    add("--seed", type=int, default=0, metavar="N", help="of the parameters and of the order")
    return parser.parse_args()


def make_network(seed):
    """Return a convolutional network for images of 8 x 8 pixels."""
    torch.manual_seed(seed)
    layers = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 10)
    return nn.Sequential(*layers)


def make_optimizer(model):
    """Return the optimizer of a network's parameters."""
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def make_batches(args, part, **batching):
    """Return the batches of one part of the file: this rank's share of each. **Collective**."""
    dataset = ms.data.Dataset.from_hdf5(args.data, fields=(f"{part}/image", f"{part}/label"))
    if part == "train":
        dataset = dataset.shuffle(seed=args.seed)
    return mst.HDF5Dataset(dataset.batch(args.batch_size, **batching))


def total(values):
    """Return the sums of some numbers over all ranks. **Collective**."""
    totals = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(totals)
    return totals.tolist()


def logits_of(model, image):
    """Return the output of the network for images of shape ``(n, 8, 8)``."""
    return model(image[:, None].float() / 16)


def weighted_loss(model, image, label):
    """Return a loss whose mean over the ranks is that of the global batch. **Collective**."""
    # Gradients are averaged over ranks, whose shares may differ by one example: weigh them.
    (global_size,) = total([len(label)])
    loss = nn.functional.cross_entropy(logits_of(model, image), label.long(), reduction="sum")
    return loss * dist.get_world_size() / global_size


@torch.no_grad()
def accuracy_of(model, batches):
    """Return the accuracy on all batches. **Collective**."""
    right = num_examples = 0
    for image, label in batches:
        right += int((logits_of(model, image).argmax(dim=1) == label).sum())
        num_examples += len(label)
    right, num_examples = total([right, num_examples])
    return right / num_examples


def fit(args, step, *, model, optimizer, parallel=False):
    """Train, test and save once per epoch, from the newest checkpoint on. **Collective**.

    `step(image, label)` trains on a batch and returns its loss. With `parallel`, all ranks write
    the checkpoint.
    """
    # DistributedDataParallel needs examples on every rank.
    train_batches = make_batches(args, "train", drop_remainder=True)
    test_batches = make_batches(args, "test")
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs)
    saved = ms.Checkpoint(
        model=model, optimizer=optimizer, scheduler=scheduler, batches=train_batches
    )
    manager = ms.CheckpointManager(saved, args.output, parallel=parallel)
    rank, size = dist.get_rank(), dist.get_world_size()
    if (path := manager.restore_or_initialize()) and rank == 0:
        print(f"resumes from {path} on {size} rank(s)", flush=True)
    while scheduler.last_epoch < args.epochs:
        losses = [step(image, label) for image, label in train_batches]
        scheduler.step()
        loss = total([sum(losses)])[0] / len(losses) / size
        accuracy = accuracy_of(model, test_batches)
        epoch = scheduler.last_epoch
        manager.save(epoch)
        if rank == 0:
            print(f"epoch {epoch}, loss: {loss:.4f}, test accuracy: {accuracy:.4f}", flush=True)
