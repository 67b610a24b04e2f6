"""Train the network of train_digits.py asynchronously, or continue the same file synchronously.

    mpiexec -n 4 python jobs/train_digits_async.py --data data/digits.h5 --file runs/async.h5
    mpiexec -n 4 python jobs/train_digits_async.py --data data/digits.h5 --file runs/async.h5 --sync

The first rank is the chief, which schedules steps; the others take them, each on its own batches.
With --sync all ranks take each step together, from where the file is.
"""

import argparse
import sys
from pathlib import Path

import numpy as np
from train_digits import backward, cross_entropy, forward, make_layers

import mpistrat as ms


def parse_arguments():
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", default="data/digits.h5", metavar="FILE", help="made by prepare_digits.py")
    add("--file", type=Path, default=Path("runs/async.h5"), help="the checkpoint")
    add("--steps", type=int, default=600, metavar="N")
    add("--batch-size", type=int, default=64, metavar="N")
    add("--servers", type=int, default=0, metavar="N", help="ranks that hold the variables")
    add("--sync", action="store_true", help="continue the file under MPIStrategy")
    return parser.parse_args()


ARGS = parse_arguments()
STRATEGY = ms.MPIStrategy() if ARGS.sync else ms.ParameterServerStrategy(ARGS.servers)
with STRATEGY.scope():
    LAYERS = make_layers(seed=0)
    OPTIMIZER = ms.optimizers.SGD(learning_rate=0.05, momentum=0.5)
CHECKPOINT = ms.Checkpoint(model={"layers": LAYERS}, optimizer=OPTIMIZER)


def open_data(part):
    """Return a part of the data, ``"train"`` or ``"test"``."""
    return ms.data.Dataset.from_hdf5(ARGS.data, fields=(f"{part}/image", f"{part}/label"))


def make_batches():
    """Return the batches of one worker: all of the data, in an order of its own."""
    seed = ms.coordinator.experimental_get_current_worker_index()
    return open_data("train").shuffle(seed=seed).repeat().batch(ARGS.batch_size)


def step(image, label, num_examples):
    """Apply the gradients of a batch, or of this rank's part, of `num_examples` together."""
    logits, tape = forward(np, LAYERS, image, training=True)
    losses, error = cross_entropy(np, logits, label)
    OPTIMIZER.apply_gradients(backward(LAYERS, tape, error / num_examples))
    return float(losses.sum())


def take_steps(batches, num_steps):
    """Take some steps on this worker, and return the mean loss: one closure."""
    total = 0.0
    for _ in range(num_steps):
        image, label = next(batches)
        total += step(image, label, len(label)) / len(label)
    return total / num_steps


def accuracy():
    """Return the accuracy on the test part."""
    right = total = 0
    for image, label in open_data("test").batch(ARGS.batch_size):
        logits, _ = forward(np, LAYERS, image, training=False)
        right += int((logits.argmax(axis=1) == label).sum())
        total += len(label)
    return right / total


def train_asynchronously():
    """Schedule closures of ten steps each, and save. On the chief."""
    coordinator = ms.coordinator.ClusterCoordinator(STRATEGY)
    if ARGS.file.exists():
        CHECKPOINT.restore(ARGS.file)
    batches = iter(coordinator.create_per_worker_dataset(make_batches))
    losses = [coordinator.schedule(take_steps, (batches, 10)) for _ in range(ARGS.steps // 10)]
    coordinator.join()
    losses = coordinator.fetch(losses)
    CHECKPOINT.write(ARGS.file)
    print(f"loss {losses[0]:.3f} to {losses[-1]:.3f}, {int(OPTIMIZER.iterations.numpy())} steps")
    print(f"test accuracy: {accuracy():.4f}")
    STRATEGY.close()


def train_synchronously():
    """Continue from the file, all ranks together. **Collective**."""
    CHECKPOINT.restore(ARGS.file).assert_existing_objects_matched()
    before = int(OPTIMIZER.iterations.numpy())
    data = open_data("train").shuffle(seed=0).repeat().batch(ARGS.batch_size)
    batches = iter(STRATEGY.distribute_dataset(data))
    for _ in range(ARGS.steps):
        STRATEGY.run(step, args=(*next(batches), ARGS.batch_size))
    CHECKPOINT.write(ARGS.file)
    ms.print(f"from step {before} to {int(OPTIMIZER.iterations.numpy())}")
    found = accuracy()
    ms.print(f"test accuracy: {found:.4f}")


if __name__ == "__main__":
    if ARGS.sync:
        train_synchronously()
    elif STRATEGY.cluster_resolver.task_type == "chief":
        train_asynchronously()
    else:
        STRATEGY.serve()
        sys.exit()
