"""Train the network of train_digits.py on a file with a group for each image, a PNG.

    mpiexec -n 2 python jobs/train_on_groups.py --data data/groups.h5 --output runs/groups

The group `digits/digit_12` has the dataset `png`, bytes as many as they are, and the attribute
`label`. Some digits are rare in it, so examples for training are drawn by the weights of their
classes; a fifth of all images is left for the test. Threads decode the images in the first epoch,
and the ranks of a node keep them together. An absent file is made. All ranks write a checkpoint
after each epoch; the same command resumes from it, on any number of ranks.
"""

import argparse
import io
from pathlib import Path

import h5py
import numpy as np
from PIL import Image
from train_digits import backward, cross_entropy, forward, make_layers

import mpistrat as ms

RARE, KEPT = (3, 8), 60
"""Of these digits the file has so few."""
LABEL = ms.data.Field("digits/digit_*", attribute="label")


def make_groups(path):
    """Write scikit-learn's digits, a group for each; the file appears once it is complete."""
    from sklearn.datasets import load_digits  # here, because only rank 0 needs it

    digits = load_digits()
    rank_in_class = np.empty(len(digits.target), int)
    for label in range(10):
        (places,) = np.nonzero(digits.target == label)
        rank_in_class[places] = np.arange(len(places))
    kept = ~np.isin(digits.target, RARE) | (rank_in_class < KEPT)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path.with_suffix(".tmp"), "w") as file:
        for number, place in enumerate(np.flatnonzero(kept)):
            png = io.BytesIO()
            Image.fromarray(digits.images[place].astype(np.uint8)).save(png, "png")
            group = file.create_group(f"digits/digit_{number}")
            group["png"] = np.frombuffer(png.getvalue(), np.uint8)
            group.attrs["label"] = digits.target[place]
    path.with_suffix(".tmp").replace(path)


def read_labels(path):
    """Return the labels of all examples, without reading an image."""
    return np.array(list(ms.data.Dataset.from_hdf5(path, LABEL)))


def decode(png, label):
    """Return the image of `png` and its label. Pillow decodes outside of Python's lock."""
    return np.asarray(Image.open(io.BytesIO(png))), label


def open_data(path, labels, batch_size, threads):
    """Return the datasets to train on and to test with."""
    order = np.random.default_rng(0).permutation(len(labels))
    test, train = np.split(order, [len(order) // 5])
    examples = ms.data.Dataset.from_hdf5(path, ("digits/digit_*/png", LABEL))
    # Both parts share the cache, which is on the side of the files.
    decoded = examples.map(decode, num_parallel_calls=threads).cache("64 MiB")
    weights = 1 / np.bincount(labels[train])[labels[train]]
    balanced = decoded.select(train).sample(weights, seed=1)
    return balanced.batch(batch_size), decoded.select(test).batch(batch_size)


def parse_arguments():
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default=Path("data/groups.h5"), metavar="FILE", help="made if absent")
    add("--output", default="runs/groups", metavar="FOLDER", help="of the checkpoints")
    add("--epochs", type=int, default=30, metavar="N")
    add("--batch-size", type=int, default=64, metavar="N", help="examples over all ranks")
    add("--threads", type=int, default=ms.data.AUTOTUNE, metavar="N",
        help="to decode, on each rank; -1 for its share of the cores")  # fmt: skip
    add("--device", default="auto", help='"auto", "cpu", "gpu" or "gpu:K"')
    return parser.parse_args()


def main():
    """Train, and test after each epoch. **Collective**: every rank runs this program."""
    args = parse_arguments()
    strategy = ms.MPIStrategy(device=args.device)
    xp, is_first = strategy.extended.xp, strategy.extended.should_save_summary
    if is_first and not args.data.exists():
        make_groups(args.data)
    # Rank 0 reads the labels; the others wait until the file is there.
    labels = strategy.broadcast_object(read_labels(args.data) if is_first else None)
    data = open_data(args.data, labels, args.batch_size, args.threads)
    train_batches, test_batches = map(strategy.distribute_dataset, data)
    with strategy.scope():
        layers = make_layers(seed=0)
        optimizer = ms.optimizers.SGD(learning_rate=0.05, momentum=0.9)
        loss, accuracy = ms.metrics.Mean(name="loss"), ms.metrics.Accuracy(name="accuracy")
        epochs = ms.Variable(np.int64(0), name="epochs")
    saved = ms.Checkpoint(
        model={"layers": layers}, optimizer=optimizer, batches=train_batches, epochs=epochs
    )
    manager = ms.CheckpointManager(saved, args.output, step_counter=epochs)
    if is_first:
        counts = np.bincount(labels)
        print(f"{len(labels)} images, {counts.min()} to {counts.max()} of a digit")
    if (path := manager.restore_or_initialize()) and is_first:
        print(f"resumes from {path}")

    def train_step(image, label):
        logits, tape = forward(xp, layers, image, training=True)
        losses, error = cross_entropy(xp, logits, label)
        # Gradients are summed, and the last batch is short.
        num_examples = int(ms.get_replica_context().all_reduce("sum", len(label)))
        optimizer.apply_gradients(backward(layers, tape, error / num_examples))
        loss.update_state(losses)

    def test_step(image, label):
        logits, _ = forward(xp, layers, image, training=False)
        accuracy.update_state(label, logits.argmax(axis=1))

    def mean_over(batches, step, metric):
        metric.reset_state()
        for batch in batches:
            strategy.run(step, args=batch)
        return float(metric.result())  # over all ranks, so every rank calls it

    while epochs.numpy() < args.epochs:
        error = mean_over(train_batches, train_step, loss)
        epochs.assign_add(1)
        manager.save()
        found = mean_over(test_batches, test_step, accuracy)
        if is_first:
            print(f"epoch {int(epochs.numpy())}, loss: {error:.5f}, test accuracy: {found:.4f}")
    found = mean_over(test_batches, test_step, accuracy)
    if is_first:
        print(f"test accuracy: {found:.4f}")


if __name__ == "__main__":
    main()
