"""Train a PyTorch model on scans of handwritten digits, on any number of MPI ranks.

    python jobs/prepare_digits.py --output data/digits.h5
    mpiexec -n 4 python jobs/torch_digits.py --data data/digits.h5 --output runs/torch

The model, its optimizer and autograd are PyTorch's; mpistrat reads the data, reduces the gradients
and saves a checkpoint per epoch. The same command resumes from the newest checkpoint.
"""

import argparse

import numpy as np

import mpistrat as ms

try:
    import torch
    from torch import nn
except ImportError:
    raise SystemExit("torch_digits.py needs PyTorch: pip install torch") from None


def converted(state, kind, convert, key):
    """Return nested dicts with values of type `kind` and all keys converted."""
    if isinstance(state, dict):
        return {key(k): converted(v, kind, convert, key) for k, v in state.items()}
    return convert(state) if isinstance(state, kind) else state


class Saved:
    """A PyTorch module or optimizer in checkpoint form: values are arrays, keys are text."""

    def __init__(self, owner):
        self.owner = owner

    def state_dict(self):
        """Return the state with arrays in place of tensors."""
        return converted(self.owner.state_dict(), torch.Tensor, lambda t: t.numpy(force=True), str)

    def load_state_dict(self, state):
        """Load the state from a checkpoint; an optimizer's keys are parameter numbers."""
        state = converted(state, np.ndarray, torch.tensor, lambda k: int(k) if k.isdigit() else k)
        self.owner.load_state_dict(state)


def parse_arguments():
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", default="data/digits.h5", metavar="FILE", help="made by prepare_digits.py")
    add("--output", default="runs/torch", metavar="FOLDER", help="of the checkpoints")
    add("--epochs", type=int, default=15, metavar="N")
    add("--batch-size", type=int, default=64, metavar="N", help="examples over all ranks")
    add("--device", default="auto", help='"auto", "cpu", "gpu" or "gpu:K"')
    return parser.parse_args()


def main():
    """Train and test. **Collective**: every rank runs this program."""
    args = parse_arguments()
    strategy = ms.MPIStrategy(device=args.device)
    is_first = strategy.extended.should_save_summary
    device = torch.device(str(strategy.extended.device).replace("gpu", "cuda"))
    train, test = (
        ms.data.Dataset.from_hdf5(args.data, fields=(f"{part}/image", f"{part}/label"))
        for part in ("train", "test")
    )
    train, test = train.shuffle(seed=0).batch(args.batch_size), test.batch(args.batch_size)
    batches = strategy.experimental_distribute_dataset(train)
    test_batches = strategy.experimental_distribute_dataset(test)
    torch.manual_seed(0)  # the same initial parameters on every rank
    layers = nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(144, 10)
    model = nn.Sequential(*layers).to(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with strategy.scope():
        accuracy = ms.metrics.Accuracy(name="accuracy")
        epochs = ms.Variable(np.int64(0), name="epochs")
    saved = ms.Checkpoint(model=Saved(model), optimizer=Saved(optimizer), epochs=epochs)
    saved.batches = batches
    manager = ms.CheckpointManager(saved, args.output, step_counter=epochs)
    if (path := manager.restore_or_initialize()) and is_first:
        print(f"resumes from {path}")

    def forward(image, label):
        image = torch.as_tensor(image, device=device)[:, None] / 16
        return model(image), torch.as_tensor(label, device=device).long()

    def train_step(image, label):
        logits, label = forward(image, label)
        replica = ms.get_replica_context()
        global_batch_size = int(replica.all_reduce("sum", len(label)))
        loss = nn.functional.cross_entropy(logits, label, reduction="sum")
        (loss / global_batch_size).backward()
        totals = replica.all_reduce("sum", [each.grad for each in model.parameters()])
        for parameter, total in zip(model.parameters(), totals, strict=True):
            parameter.grad = total
        optimizer.step()  # the same numbers on every rank
        optimizer.zero_grad()

    @torch.no_grad()
    def test_step(image, label):
        logits, label = forward(image, label)
        accuracy.update_state(label, logits.argmax(dim=1))

    while epochs.numpy() < args.epochs:
        for image, label in batches:
            strategy.run(train_step, args=(image, label))
        accuracy.reset_state()
        for image, label in test_batches:
            strategy.run(test_step, args=(image, label))
        share = accuracy.result()
        epochs.assign_add(1)
        manager.save()
        if is_first:
            print(f"epoch {int(epochs.numpy())}, test accuracy: {share:.4f}", flush=True)


if __name__ == "__main__":
    main()
