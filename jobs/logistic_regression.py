"""Fit a logistic regression with L2 to examples in several HDF5 files, on any number of MPI ranks.

    mpiexec -n 4 python jobs/logistic_regression.py --data data/clicks --output runs/clicks

The folder holds part-*.h5 for training and test.h5, each with the datasets `x` and `y`; an absent
folder is made. Each rank reads its slice of every batch, or its own files with `--policy file`. The
run saves regularly, and when it is about to be stopped (then it exits with code 75). The same
command resumes at the next batch; with slices, on any number of ranks.
"""

import argparse
from pathlib import Path

import h5py
import numpy as np

import mpistrat as ms


def make_data(folder):
    """Write 7 files of examples whose labels come from a logistic model."""
    rng = np.random.default_rng(2)
    truth = rng.standard_normal(20)
    temporary = folder.with_suffix(".tmp")
    temporary.mkdir(parents=True, exist_ok=True)
    for name in [f"part-{number}.h5" for number in range(6)] + ["test.h5"]:
        x = rng.standard_normal((2000, 20)).astype(np.float32)
        y = rng.random(len(x)) < 1 / (1 + np.exp(-x @ truth))
        with h5py.File(temporary / name, "w") as file:
            file.create_dataset("x", data=x, chunks=(500, 20), compression="gzip")
            file.create_dataset("y", data=y.astype(np.uint8), chunks=(500,))
    temporary.replace(folder)  # the folder appears with all its files


def forward(xp, weight, bias, x, y):
    """Return the loss of each example, its derivative with respect to the logit, and the logits."""
    logits = x @ weight.value() + bias.value()
    losses = xp.logaddexp(xp.zeros_like(logits), logits) - y * logits
    return losses, 1 / (1 + xp.exp(-logits)) - y, logits


def parse_arguments():
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default=Path("data/clicks"), metavar="FOLDER", help="made if absent")
    add("--output", default="runs/clicks", metavar="FOLDER", help="of the checkpoints")
    add("--epochs", type=int, default=5, metavar="N")
    add("--max-steps", type=int, metavar="N", help="save here and end, as if time were up")
    add("--save-every", type=int, default=100, metavar="N", help="steps between checkpoints")
    add("--batch-size", type=int, default=200, metavar="N", help="examples over all ranks")
    add("--l2", type=float, default=1e-3, metavar="X", help="times half the squared weights")
    add("--policy", choices=("data", "file"), default="data", help="slices, or files, per rank")
    add("--device", default="auto", help='"auto", "cpu", "gpu" or "gpu:K"')
    return parser.parse_args()


def open_data(strategy, args, pattern):
    """Return the batches of the files that match. **Collective**."""
    examples = ms.data.Dataset.from_hdf5(args.data / pattern, fields=("x", "y"))
    if pattern != "test.h5":
        policy = ms.data.AutoShardPolicy[args.policy.upper()]
        examples = examples.shuffle(seed=0).with_options(auto_shard_policy=policy)
    return strategy.distribute_dataset(examples.batch(args.batch_size))


def main():
    """Train and test. **Collective**: every rank runs this program."""
    args = parse_arguments()
    strategy = ms.MPIStrategy(device=args.device)
    xp, is_first = strategy.extended.xp, strategy.extended.should_save_summary
    if is_first and not args.data.exists():
        make_data(args.data)
    strategy.reduce("sum", 0)  # the others wait until the files are there
    batches, test_batches = (open_data(strategy, args, each) for each in ("part-*.h5", "test.h5"))
    num_steps = args.epochs * batches.cardinality()
    with strategy.scope():
        weight = ms.Variable(np.zeros(batches.element_spec[0].shape[1], np.float32), name="weight")
        bias = ms.Variable(np.float32(0), name="bias")
        optimizer = ms.optimizers.Adam(ms.optimizers.schedules.CosineDecay(0.05, num_steps))
        loss, accuracy = ms.metrics.Mean(name="loss"), ms.metrics.Accuracy(name="accuracy")
    saved = ms.Checkpoint(weight=weight, bias=bias, optimizer=optimizer, batches=batches)
    manager = ms.CheckpointManager(saved, args.output, step_counter=optimizer.iterations)
    handler = ms.PreemptionCheckpointHandler(manager, walltime_margin_s=60)
    if (path := manager.restore_or_initialize()) and is_first:
        print(f"resumes from {path}")

    def train_step(x, y):
        _, slope, _ = forward(xp, weight, bias, x, y)
        replica = ms.get_replica_context()
        size = int(replica.all_reduce("sum", len(y)))  # the last batch is short
        # Gradients are summed over the replicas, and the penalty counts once.
        penalty = args.l2 * weight.value() / replica.num_replicas_in_sync
        gradients = x.T @ slope / size + penalty, slope.sum() / size
        optimizer.apply_gradients(zip(gradients, (weight, bias), strict=True))

    def test_step(x, y):
        losses, _, logits = forward(xp, weight, bias, x, y)
        loss.update_state(losses)
        accuracy.update_state(y, (logits > 0).astype(y.dtype))

    while (step := int(optimizer.iterations.numpy())) < num_steps:
        for x, y in batches:
            strategy.run(train_step, args=(x, y))
            step += 1
            if step == args.max_steps or step % args.save_every == 0:
                manager.save()
            if step == args.max_steps or handler.save_checkpoint_if_preempted():
                raise SystemExit(handler.EXIT_CODE)
        manager.save()
    for x, y in test_batches:
        strategy.run(test_step, args=(x, y))
    figures = loss.result(), accuracy.result()  # over all ranks, so every rank calls them
    if is_first:
        print("test loss {:.4f}, accuracy: {:.4f}".format(*figures))


if __name__ == "__main__":
    main()
