"""A training loop on 16 ranks: rank 5 computes longer, ranks 8 to 11 read slowly for a while."""

import time

import numpy as np

import mpistrat as ms

strategy = ms.MPIStrategy(device="cpu")
rank = strategy.cluster_resolver.task_id
with strategy.scope():
    weight = ms.Variable(np.zeros(50_000, np.float32), name="weight")
    optimizer = ms.optimizers.SGD(0.1)
checkpoint = ms.Checkpoint(weight=weight, optimizer=optimizer)


def read(number: np.integer) -> np.floating:
    """Return an example, slowly on some ranks, as from a file system that others use too."""
    is_slow = rank in range(8, 12) and 60 <= number // 16 < 100
    time.sleep(0.03 if is_slow else 0.004)
    x: np.floating = np.float32(number)
    return x


def step(x: np.ndarray) -> None:
    """Compute a gradient; that of rank 5 takes longer."""
    time.sleep(0.045 if rank == 5 else 0.025)
    gradient = np.full(weight.shape, x.mean() if x.size else 0, np.float32)
    optimizer.apply_gradients([(gradient, weight)])


data = ms.data.Dataset.from_arrays(np.arange(150 * 16)).map(read).batch(16)
for number, batch in enumerate(strategy.experimental_distribute_dataset(data)):
    strategy.run(step, args=(batch,))
    if number % 50 == 49:
        checkpoint.write("weights.h5")
