"""Program of one rank: does the work of a stage, and then stands still until it may end.

    mpiexec -n 4 python benchmarks/machine/rank.py STAGE FOLDER

It is started by its path, because importing the package of the benchmarks would be counted too.
"""

import os
import sys
import time
from typing import Any

MARK = "end of the work"
"""Name of a file that is looked for after the work. A trace of the system calls ends there."""
DATA = "digits.h5"
_LIMIT_S = 1200.0
_POLL_S = 0.2


def plain(folder: str) -> None:
    """Import NumPy and mpi4py."""
    import numpy  # noqa: F401
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()


def imported(folder: str) -> None:
    """Import mpistrat too."""
    import mpistrat  # noqa: F401

    plain(folder)


def strategy(folder: str) -> Any:
    """Create a strategy, and reduce a number with it."""
    import mpistrat as ms

    made = ms.MPIStrategy()
    assert made.reduce("sum", 1.0) == made.size
    plain(folder)
    return made


def step(folder: str) -> dict[str, Any]:
    """Train one step with a batch of an HDF5 file."""
    import numpy as np

    import mpistrat as ms

    made = strategy(folder)
    with made.scope():
        weights = ms.Variable(np.zeros((64, 10)), name="weights")
        optimizer = ms.optimizers.SGD(learning_rate=0.5)
    dataset = ms.data.Dataset.from_hdf5(f"{folder}/{DATA}", ("image", "label"))
    batches = made.distribute_dataset(dataset.shuffle(seed=0).batch(1024).repeat())

    def train(image: Any, label: Any) -> None:
        x = image.reshape(-1, 64) / 16
        p = np.exp(x @ weights.value())
        p /= p.sum(axis=1, keepdims=True)
        optimizer.apply_gradients([(x.T @ (p - np.eye(10)[label]) / 1024, weights)])

    made.run(train, args=next(iter(batches)))
    plain(folder)
    return {"weights": weights, "optimizer": optimizer, "batches": batches}


def checkpoint(folder: str) -> None:
    """Save that and restore it."""
    import mpistrat as ms

    saved = ms.Checkpoint(**step(folder))
    manager = ms.CheckpointManager(saved, f"{folder}/checkpoints", max_to_keep=2)
    manager.save(step=1)
    assert manager.restore_or_initialize() is not None
    plain(folder)


def torch(folder: str) -> None:
    """Import PyTorch, NumPy and mpi4py."""
    import torch.distributed  # noqa: F401

    plain(folder)


def torch_mpistrat(folder: str) -> None:
    """Start torch.distributed with mpistrat, and reduce a tensor."""
    import torch
    import torch.distributed as dist

    import mpistrat.torch as mst

    mst.init()
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == dist.get_world_size()
    plain(folder)


def torch_gloo(folder: str) -> None:
    """Start torch.distributed with gloo, and reduce a tensor."""
    import torch
    import torch.distributed as dist
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    where = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=where, rank=comm.rank, world_size=comm.size)
    one = torch.ones(1)
    dist.all_reduce(one)
    assert one.item() == dist.get_world_size()
    plain(folder)


def main(stage: str, folder: str) -> None:
    """Do the work of a stage, report this process to the benchmark, and wait for its end."""
    globals()[stage](folder)
    os.access(f"{folder}/{MARK}", os.F_OK)
    # The name is complete before anybody can see it.
    with open(f"{folder}/.{os.getpid()}", "w"):
        pass
    os.rename(f"{folder}/.{os.getpid()}", f"{folder}/standing-{os.getpid()}")
    end = time.monotonic() + _LIMIT_S
    while not os.path.exists(f"{folder}/leave") and time.monotonic() < end:
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main(*sys.argv[1:])
