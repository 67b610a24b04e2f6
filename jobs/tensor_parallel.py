"""Train a perceptron whose two layers are divided among the ranks of each replica.

    python jobs/prepare_digits.py --output data/digits.h5
    mpiexec -n 4 python jobs/tensor_parallel.py --data data/digits.h5 --ranks-per-replica 2

Each rank of a replica holds some columns of the first layer and the same rows of the second, as in
Megatron-LM (arXiv 1909.08053); the replicas share the batches. What is learned does not depend on
how many ranks there are, nor on how they are divided. The checkpoint has whole layers.
"""

import argparse
from pathlib import Path

import numpy as np

import mpistrat as ms

NUM_PIXELS, NUM_CLASSES = 64, 10


def make_model(num_hidden, seed):
    """Return the variables: two layers, each divided along the hidden units, and biases."""
    rng = np.random.default_rng(seed)
    first = rng.standard_normal((NUM_PIXELS, num_hidden)) / np.sqrt(NUM_PIXELS)
    second = rng.standard_normal((num_hidden, NUM_CLASSES)) / np.sqrt(num_hidden)
    return {
        "first": ms.Variable(first.astype(np.float32), split_axis=1, name="first"),
        "first_bias": ms.Variable(
            np.zeros(num_hidden, np.float32), split_axis=0, name="first_bias"
        ),
        "second": ms.Variable(second.astype(np.float32), split_axis=0, name="second"),
        "second_bias": ms.Variable(np.zeros(NUM_CLASSES, np.float32), name="second_bias"),
    }


def forward(xp, model, image):
    """Return the logits, the same on all ranks of a replica, and what `backward` needs."""
    x = image.reshape(-1, NUM_PIXELS).astype(xp.float32) / 16
    hidden = xp.tanh(x @ model["first"].value() + model["first_bias"].value())
    # Each rank has its hidden units' share of every sum.
    shares = hidden @ model["second"].value()
    logits = ms.get_replica_context().shards.all_reduce("sum", shares)
    return logits + model["second_bias"].value(), (x, hidden)


def backward(model, tape, error):
    """Return ``(gradient, variable)`` pairs, given the gradient with respect to the logits."""
    # All ranks of a replica have the same error, and so the gradient of their part without a
    # message. Only a gradient with respect to `x` would be a sum over them: shards.all_reduce.
    x, hidden = tape
    inner = (error @ model["second"].value().T) * (1 - hidden * hidden)  # the slope of tanh
    return [
        (x.T @ inner, model["first"]),
        (inner.sum(axis=0), model["first_bias"]),
        (hidden.T @ error, model["second"]),
        (error.sum(axis=0), model["second_bias"]),
    ]


def cross_entropy(xp, logits, label):
    """Return the loss of each example, and the gradient of their sum with respect to the logits."""
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probability = shifted - xp.log(xp.exp(shifted).sum(axis=1, keepdims=True))
    target = (label[:, None] == xp.arange(NUM_CLASSES)).astype(xp.float32)
    return -(target * log_probability).sum(axis=1), xp.exp(log_probability) - target


def parse_arguments():
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default=Path("data/digits.h5"), metavar="FILE")
    add("--output", default="runs/tensor_parallel.h5", metavar="FILE", help="the checkpoint")
    add("--ranks-per-replica", type=int, default=1, metavar="M")
    add("--hidden", type=int, default=128, metavar="N", help="units of the hidden layer")
    add("--epochs", type=int, default=5, metavar="N")
    add("--batch-size", type=int, default=128, metavar="N", help="over all replicas")
    add("--seed", type=int, default=0, metavar="N")
    add("--device", default="auto", help='"auto", "cpu", "gpu" or "gpu:K"')
    return parser.parse_args()


def main():
    """Train and save. **Collective**: every rank runs this program."""
    args = parse_arguments()
    strategy = ms.MPIStrategy(device=args.device, ranks_per_replica=args.ranks_per_replica)
    xp = strategy.extended.xp
    fields = {"image": "train/image", "label": "train/label"}
    dataset = ms.data.Dataset.from_hdf5(args.data, fields=fields)
    batches = strategy.distribute_dataset(dataset.shuffle(seed=args.seed).batch(args.batch_size))
    with strategy.scope():
        model = make_model(args.hidden, args.seed)
        optimizer = ms.optimizers.SGD(0.1, momentum=0.9)
        loss, accuracy = ms.metrics.Mean(name="loss"), ms.metrics.Accuracy(name="accuracy")

    def step(batch):
        label = batch["label"]
        logits, tape = forward(xp, model, batch["image"])
        losses, error = cross_entropy(xp, logits, label)
        # The loss is the mean over the global batch. The sizes are summed: the last is short.
        global_batch_size = int(ms.get_replica_context().all_reduce("sum", len(label)))
        optimizer.apply_gradients(backward(model, tape, error / global_batch_size))
        loss.update_state(losses)
        accuracy.update_state(label, logits.argmax(axis=1))

    for epoch in range(args.epochs):
        for batch in batches:
            strategy.run(step, args=(batch,))
        mean, share = loss.result(), accuracy.result()
        with strategy.scope():
            ms.print(f"epoch {epoch + 1}, accuracy {share:.4f}, loss: {mean:.6f}")
        loss.reset_state()
        accuracy.reset_state()
    ms.Checkpoint(model=model, optimizer=optimizer).write(args.output)


if __name__ == "__main__":
    main()
