"""Learn embeddings of users and items from ratings, in tables that no rank holds whole.

    mpiexec -n 2 python jobs/embedding.py --data data/ratings.h5 --output runs/embedding

A rank holds at most `--rows-per-rank` rows of a table: more rows need more ranks, so the tables
may be larger than the memory of one. Ratings are the datasets `user`, `item` and `rating`; an
absent file is made. All ranks write a checkpoint after each epoch. The same command resumes from
it, on any number of ranks that have room for the tables.
"""

import argparse
from pathlib import Path

import h5py
import numpy as np

import mpistrat as ms

DIMENSION = 16  # a multiple of 4, see `first_rows`
NUM_USERS, NUM_ITEMS, NUM_RATINGS = 3000, 500, 60_000
SUM = ms.VariableAggregation.SUM


def make_ratings(path):
    """Write ratings that follow from hidden vectors; the file appears once it is complete."""
    rng = np.random.default_rng(1)
    users, items = (rng.standard_normal((rows, 4)) / 2 for rows in (NUM_USERS, NUM_ITEMS))
    user, item = (rng.integers(rows, size=NUM_RATINGS) for rows in (NUM_USERS, NUM_ITEMS))
    noise = 0.1 * rng.standard_normal(NUM_RATINGS)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path.with_suffix(".tmp"), "w") as file:
        file["user"], file["item"] = user, item
        file["rating"] = ((users[user] * items[item]).sum(axis=1) + noise).astype(np.float32)
        file.attrs["users"], file.attrs["items"] = NUM_USERS, NUM_ITEMS
    path.with_suffix(".tmp").replace(path)


def first_rows(seed):
    """Return a function that makes some rows of a table, the same whoever makes them."""

    def rows(partition_shape, partition_offset):
        # A step of Philox gives four random numbers, so any row is found without those before it.
        steps = partition_offset[0] * partition_shape[1] // 4
        generator = np.random.Generator(np.random.Philox(seed).advance(steps))
        return 0.5 * (generator.random(partition_shape) - 0.5)

    return rows


def make_table(name, num_rows, seed):
    """Return a table of random rows, of which each rank makes its own. **Collective**."""
    shape = (num_rows, DIMENSION)
    return ms.Variable(first_rows(seed), shape=shape, dtype=np.float32, name=name, aggregation=SUM)


def parse_arguments():
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default=Path("data/ratings.h5"), metavar="FILE", help="made if absent")
    add("--output", default="runs/embedding", metavar="FOLDER", help="of the checkpoints")
    add("--rows-per-rank", type=int, default=2000, metavar="N", help="of one table, at most")
    add("--epochs", type=int, default=8, metavar="N")
    add("--batch-size", type=int, default=1000, metavar="N", help="ratings over all ranks")
    add("--device", default="auto", help='"auto", "cpu", "gpu" or "gpu:K"')
    return parser.parse_args()


def main():
    """Train, and say the error of each epoch. **Collective**: every rank runs this program."""
    args = parse_arguments()
    limit = args.rows_per_rank * DIMENSION * np.dtype(np.float32).itemsize
    partitioner = ms.partitioners.MaxSizePartitioner(limit)
    strategy = ms.MPIStrategy(device=args.device, variable_partitioner=partitioner)
    xp, is_first = strategy.extended.xp, strategy.extended.should_save_summary
    if is_first and not args.data.exists():
        make_ratings(args.data)
    strategy.barrier()  # the others wait until the file is there
    with h5py.File(args.data) as file:
        num_users, num_items = int(file.attrs["users"]), int(file.attrs["items"])
    most = max(num_users, num_items)
    (num_parts, _) = partitioner((most, DIMENSION), np.float32)
    if num_parts > strategy.size:
        raise SystemExit(
            f"{most} rows need {num_parts} ranks of {args.rows_per_rank} rows, but there are "
            f"{strategy.size}: start more, or raise --rows-per-rank."
        )
    ratings = ms.data.Dataset.from_hdf5(args.data, fields=("user", "item", "rating"))
    batches = strategy.distribute_dataset(ratings.shuffle(seed=0).batch(args.batch_size))
    with strategy.scope():
        users, items = make_table("users", num_users, 1), make_table("items", num_items, 2)
        optimizer = ms.optimizers.Adam(0.02)
        squares = ms.metrics.Mean(name="squares")
        epochs = ms.Variable(np.int64(0), name="epochs")
    saved = ms.Checkpoint(
        users=users, items=items, optimizer=optimizer, batches=batches, epochs=epochs
    )
    manager = ms.CheckpointManager(saved, args.output, step_counter=epochs, parallel=True)
    if (path := manager.restore_or_initialize()) and is_first:
        print(f"resumes from {path}")
    if is_first:
        print(f"{users.shape[0]} users, at most {len(users.part)} of them on one rank")

    def step(user, item, rating):
        of_users, of_items = users.lookup(user), items.lookup(item)
        error = (of_users * of_items).sum(axis=1) - rating
        squares.update_state(error**2)
        slope = 2 * error[:, None] / xp.float32(args.batch_size)
        gradients = [
            (ms.IndexedSlices(slope * of_items, user, users.shape), users),
            (ms.IndexedSlices(slope * of_users, item, items.shape), items),
        ]
        optimizer.apply_gradients(gradients)

    while epochs.numpy() < args.epochs:
        squares.reset_state()
        for batch in batches:
            strategy.run(step, args=batch)
        epochs.assign_add(1)
        manager.save()
        error = float(squares.result()) ** 0.5  # over all ranks, so every rank calls it
        if is_first:
            print(f"epoch {int(epochs.numpy())}, root mean square error: {error:.4f}")


if __name__ == "__main__":
    main()
