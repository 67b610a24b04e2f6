"""Find clusters in an HDF5 table by k-means (Lloyd's algorithm), on any number of MPI ranks.

    mpiexec -n 4 python jobs/kmeans.py --data data/table.h5 --output runs/kmeans

The table is the dataset `points`, one row per point; an absent file is made. After each iteration
the centres are saved to a checkpoint. The same command resumes from it.
"""

import argparse
from pathlib import Path

import h5py
import numpy as np

import mpistrat as ms


def make_table(path):
    """Write 20,000 points in 6 groups; the file appears once it is complete."""
    rng = np.random.default_rng(1)
    middles = rng.uniform(-10, 10, (6, 4))
    points = middles[rng.integers(6, size=20_000)] + rng.standard_normal((20_000, 4))
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path.with_suffix(".tmp"), "w") as file:
        file["points"], file["middles"] = points.astype("f4"), middles
    path.with_suffix(".tmp").replace(path)


def squared_distances(xp, points, centres):
    """Return an array of shape ``(len(points), len(centres))``."""
    squares = (points**2).sum(axis=1)[:, None] + (centres**2).sum(axis=1)
    return xp.maximum(squares - 2 * points @ centres.T, 0)


def spread_centres(sample, num_clusters, rng):
    """Choose rows of `sample` that are far from each other (k-means++)."""
    centres = sample[rng.integers(len(sample), size=1)]
    while len(centres) < num_clusters:
        weights = squared_distances(np, sample, centres).min(axis=1)
        chosen = rng.choice(sample, size=1, p=weights / weights.sum())
        centres = np.concatenate([centres, chosen])
    return centres


def farthest(xp, rows, num_rows):
    """Return the rows with the largest distances, which are in the first column."""
    return rows[xp.argsort(-rows[:, 0])[:num_rows]]


def parse_arguments():
    """Return the command line's options."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--data", type=Path, default=Path("data/table.h5"), metavar="FILE", help="made if absent")
    add("--output", default="runs/kmeans", metavar="FOLDER", help="of the checkpoints")
    add("--clusters", type=int, default=6, metavar="K")
    add("--init", choices=("spread", "first"), default="spread", help="spread: k-means++")
    add("--iterations", type=int, default=50, metavar="N", help="at most")
    add("--batch-size", type=int, default=8192, metavar="N", help="points over all ranks")
    add("--device", default="auto", help='"auto", "cpu", "gpu" or "gpu:K"')
    return parser.parse_args()


def main():
    """Iterate until the centres stop moving. **Collective**: every rank runs this program."""
    args = parse_arguments()
    strategy = ms.MPIStrategy(device=args.device)
    xp, is_first = strategy.extended.xp, strategy.extended.should_save_summary
    if is_first and not args.data.exists():
        make_table(args.data)
    strategy.reduce("sum", 0)  # the others wait until the file is there
    points = ms.data.Dataset.from_hdf5(args.data, fields="points").batch(args.batch_size)
    batches = strategy.distribute_dataset(points)
    sample = next(iter(points)).astype(np.float64)
    if args.init == "spread":
        sample = spread_centres(sample, args.clusters, np.random.default_rng(0))
    with strategy.scope():
        centres = ms.Variable(sample[: args.clusters], name="centres")
        totals = ms.Variable(
            np.zeros((args.clusters, centres.shape[1] + 2)),  # numbers, squared distances, sums
            synchronization=ms.VariableSynchronization.ON_READ,
            aggregation=ms.VariableAggregation.SUM,
        )
        iterations = ms.Variable(np.int64(0), name="iterations")
    saved = ms.Checkpoint(centres=centres, iterations=iterations)
    manager = ms.CheckpointManager(saved, args.output, step_counter=iterations)
    if (path := manager.restore_or_initialize()) and is_first:
        print(f"resumes from {path}")

    def step(points, far):
        points = points.astype(xp.float64)
        squares = squared_distances(xp, points, centres.value())
        members = xp.arange(args.clusters)[:, None] == squares.argmin(axis=1)
        rows = xp.concatenate([squares.min(axis=1)[:, None], points], axis=1)
        sums = members.astype(xp.float64) @ xp.concatenate([xp.ones((len(rows), 1)), rows], axis=1)
        totals.assign_add(sums, read_value=False)
        return farthest(xp, xp.concatenate([far, rows]), args.clusters)

    shift = np.inf
    while iterations.numpy() < args.iterations and shift > 1e-4:
        totals.assign(np.zeros(totals.shape), read_value=False)
        far = xp.empty((0, centres.shape[1] + 1))
        for part in batches:
            far = strategy.run(step, args=(part, far))
        sums = totals.numpy()  # over all ranks
        mean_square = sums[:, 1].sum() / sums[:, 0].sum()
        means = sums[:, 2:] / np.maximum(sums[:, :1], 1)
        empty = np.flatnonzero(sums[:, 0] == 0)  # these restart at far points
        means[empty] = farthest(np, strategy.gather(far, axis=0), len(empty))[:, 1:]
        shift = np.abs(means - centres.numpy()).max()
        centres.assign(means)
        iterations.assign_add(1)
        manager.save()
        if is_first:
            print(f"iteration {int(iterations.numpy())}, mean squared distance: {mean_square:.6f}")


if __name__ == "__main__":
    main()
