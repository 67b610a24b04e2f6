"""Call traces of the package on two ranks: which files a value passes, by `sys.setprofile`.

Run under mpiexec; rank 0 prints one JSON object. `tools/house.py` starts it and shows the table.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import h5py
import numpy as np

import mpistrat as ms

PACKAGE = os.path.dirname(os.path.abspath(ms.__file__)) + os.sep


class Walk:
    """Calls of functions of the package on this thread, as a context manager.

    Attributes
    ----------
    files : list of str
        The file of each call, in order.
    num_rounds : int
        The number of agreement rounds of the strategy meanwhile.
    """

    def __init__(self, strategy: Any) -> None:
        self.files: list[str] = []
        self.num_rounds = 0
        self._channel = strategy.extended._collectives.channel

    def __enter__(self) -> Walk:
        self._before = self._channel.ledger.sequence
        gc.disable()  # a collection calls the package too, at any time
        sys.setprofile(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        gc.enable()
        self.num_rounds = self._channel.ledger.sequence - self._before

    def _note(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PACKAGE):
            self.files.append(name[len(PACKAGE) :])

    def figures(self) -> dict[str, Any]:
        """Return what the table shows."""
        changes = sum(a != b for a, b in zip(self.files, self.files[1:], strict=False))
        return {
            "calls": len(self.files),
            "files": len(set(self.files)),
            "changes": changes,
            "rounds": self.num_rounds,
            "passed": list(dict.fromkeys(self.files)),
        }


def is_chief(strategy: ms.Strategy) -> bool:
    """Return whether this is rank 0, which writes and prints."""
    return bool(strategy.extended.should_checkpoint)


def shortest(strategy: ms.Strategy, call: Callable[[], object]) -> Walk:
    """Return the walk of the call that passed the fewest files of ten: others met a late rank."""
    walks = []
    for _ in range(10):
        with Walk(strategy) as walk:
            call()
        walks.append(walk)
    return min(walks, key=lambda walk: len(set(walk.files)))


def walk_step(strategy: ms.Strategy) -> Walk:
    """Return the walk of a warm step that applies the gradients of two arrays."""
    with strategy.scope():
        weights = [
            ms.Variable(np.ones(shape, np.float32), aggregation=ms.VariableAggregation.MEAN)
            for shape in ((64, 10), (10,))
        ]
        optimizer = ms.optimizers.SGD(learning_rate=0.1, momentum=0.9)
    gradients = [np.ones(weight.shape, np.float32) for weight in weights]

    def step() -> None:
        optimizer.apply_gradients(zip(gradients, weights, strict=True))

    for _ in range(3):
        strategy.run(step)
    return shortest(strategy, lambda: strategy.run(step))


def walk_all_reduce(strategy: ms.Strategy) -> Walk:
    """Return the walk of a warm reduction of one array of 1.2 MB."""
    array = np.ones(300_000, np.float32)

    def reduce() -> None:
        replica = ms.get_replica_context()
        assert replica is not None
        replica.all_reduce("SUM", array)

    for _ in range(3):
        strategy.run(reduce)
    return shortest(strategy, lambda: strategy.run(reduce))


def walk_batch(strategy: ms.Strategy, folder: str) -> Walk:
    """Return the walk of a batch of an HDF5 file that is not the first one."""
    path = os.path.join(folder, "data.h5")
    if is_chief(strategy):
        with h5py.File(path, "w") as file:
            images = np.zeros((1024, 32, 32), np.float32)
            file.create_dataset("image", data=images, chunks=(64, 32, 32), compression="gzip")
    strategy.reduce("SUM", 0)  # the file is there
    dataset = ms.data.Dataset.from_hdf5(path, fields=("image",)).shuffle(seed=0).batch(32)
    batches = iter(strategy.experimental_distribute_dataset(dataset))
    for _ in range(4):
        next(batches)
    return shortest(strategy, lambda: next(batches))


def walk_checkpoint(strategy: ms.Strategy, folder: str) -> tuple[Walk, Walk]:
    """Return the walks of a write and of a restore of four small variables."""
    path = os.path.join(folder, "checkpoint.h5")
    with strategy.scope():
        variables = [ms.Variable(np.ones(5, np.float32), name=f"v{i}") for i in range(4)]
    checkpoint = ms.Checkpoint(variables=variables)
    write = shortest(strategy, lambda: checkpoint.write(path))
    return write, shortest(strategy, lambda: checkpoint.restore(path))


def main() -> None:
    """Print the figures of all walks, on rank 0. The argument is an empty folder of all ranks."""
    strategy, folder = ms.MPIStrategy(device="cpu"), sys.argv[1]
    walks = {"step": walk_step(strategy), "all_reduce": walk_all_reduce(strategy)}
    # Of the thread of the first replica, which works for all of its rank.
    with_replicas = ms.MPIStrategy(device="cpu", num_replicas=8)
    walks["step of 4 replicas"] = walk_step(with_replicas)
    walks["batch"] = walk_batch(strategy, folder)
    walks["write"], walks["restore"] = walk_checkpoint(strategy, folder)
    if is_chief(strategy):
        print(json.dumps({name: walk.figures() for name, walk in walks.items()}))


if __name__ == "__main__":
    main()
