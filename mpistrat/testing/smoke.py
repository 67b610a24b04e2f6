"""Smoke test of an installation: ``python -m mpistrat.testing smoke``, with or without a launcher.

The checks compute every expected value from the rank and the number of ranks. So the same command
works in a recipe, on a login node and in a job of a thousand ranks.
"""

from __future__ import annotations

import argparse
import platform
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mpistrat import context, hdf5
from mpistrat.arrays import host_copy, is_on_host
from mpistrat.checkpoint import Checkpoint
from mpistrat.checkpoint.reader import open_checkpoint
from mpistrat.cuda_api import count_gpus
from mpistrat.data import Dataset
from mpistrat.errors import CollectiveMismatchError, LaunchError
from mpistrat.mpi.world import library_version
from mpistrat.native import missing_libraries
from mpistrat.optimizers import SGD
from mpistrat.options import ReduceOp
from mpistrat.pytorch import import_torch
from mpistrat.strategies import get_replica_context
from mpistrat.strategies.mpi import MPIStrategy
from mpistrat.variables import Variable
from mpistrat.version import __version__

_NUM_EXAMPLES = 240
_BATCH = 24


@dataclass(frozen=True)
class _Job:
    """Arguments of the checks."""

    strategy: Any
    rank: int
    size: int
    folder: Path
    """A temporary folder that all ranks see."""

    @property
    def uses_gpu(self) -> bool:
        """Whether the arrays of this rank are in GPU memory."""
        return not is_on_host(self.strategy.extended.xp.zeros(1))


def main(argv: Sequence[str] | None = None) -> int:
    """Run all checks, and return 0. Return 1 if MPI does not start."""
    parser = argparse.ArgumentParser(
        prog="python -m mpistrat.testing smoke",
        description="Try an installation: collectives, data, training and checkpoints, in seconds. "
        "Run it on one process and under the launcher of the machine.",
    )
    parser.add_argument(
        "--folder", default=".", help="folder that all ranks see, for temporary files"
    )
    arguments = parser.parse_args(argv)
    try:
        strategy: Any = MPIStrategy()
    except (LaunchError, ImportError, RuntimeError) as error:
        print(f"smoke: MPI does not start: {error}", file=sys.stderr)
        return 1
    collectives = context.collectives_of(strategy)
    rank, size = collectives.rank, collectives.size
    folder = None
    with collectives.all_or_none("smoke"):
        if rank == 0:
            folder = tempfile.mkdtemp(prefix=".mpistrat-smoke-", dir=arguments.folder)
    job = _Job(strategy, rank, size, Path(collectives.broadcast_json(folder)))
    try:
        for check in CHECKS:
            _perform(check, job)
    finally:
        if rank == 0:
            shutil.rmtree(job.folder, ignore_errors=True)
    if rank == 0:
        print(f"smoke: all is well on {size} rank{'s' if size > 1 else ''}", flush=True)
    return 0


def _perform(check: Callable[[_Job], str], job: _Job) -> None:
    name = check.__name__.strip("_").replace("_", " ")
    start = time.monotonic()
    try:
        found = check(job)
    except BaseException as error:
        # The exception ends the job on all ranks.
        text = f"smoke: {name} failed on rank {job.rank} of {job.size}: {error!r}"
        print(text, file=sys.stderr, flush=True)
        raise
    if job.rank == 0:
        print(f"ok  {name:<13} {found} ({time.monotonic() - start:.2f} s)", flush=True)


def _expect(found: Any, expected: Any, what: str) -> None:
    """Raise AssertionError unless two arrays are equal."""
    found, expected = np.asarray(found), np.asarray(expected)
    if found.shape != expected.shape or not np.array_equal(found, expected):
        raise AssertionError(
            f"{what}: got {found.reshape(-1)[:4]}, expected {expected.reshape(-1)[:4]}"
        )


def _installation(job: _Job) -> str:
    lacking = missing_libraries()
    compiled = "compiled: yes" if not lacking else f"compiled: no ({' and '.join(lacking)} slower)"
    python = f"Python {platform.python_version()}, NumPy {np.__version__}"
    library = library_version().partition(",")[0].splitlines()[0]
    return f"mpistrat {__version__}, {python}, {library}, {compiled}"


def _launch(job: _Job) -> str:
    (ranks,) = {tuple(context.collectives_of(job.strategy).gather_json(job.rank, "smoke"))}
    _expect(ranks, range(job.size), "ranks")
    device = job.strategy.extended.device
    own = device.gpu_identity() if job.uses_gpu else None
    gpus = context.collectives_of(job.strategy).gather_json(own, "smoke")
    who = f"{job.size} rank{'s' if job.size > 1 else ''}"
    return f"{who} found each other, {_describe_gpus(gpus)}"


def _describe_gpus(gpus: Sequence[str | None]) -> str:
    """Return how many ranks use a GPU, as text; `gpus` has ``None`` for host memory."""
    with_gpu = [gpu for gpu in gpus if gpu is not None]
    num_gpus = len(set(with_gpu))
    if not with_gpu:
        return "with host memory"
    if len(with_gpu) < len(gpus):
        return f"{len(with_gpu)} with a GPU, the others with host memory"
    if num_gpus == len(gpus):
        return "with a GPU each"
    return f"and share {num_gpus} GPU{'s' if num_gpus > 1 else ''}"


def _collectives(job: _Job) -> str:
    strategy, xp = job.strategy, job.strategy.extended.xp
    total = job.size * (job.size + 1) // 2
    dtypes = (np.float32, np.float64, np.int32, np.uint8)

    def step() -> None:
        replica: Any = get_replica_context()
        for dtype in dtypes:
            for length in (1, 1000, 2**20 // np.dtype(dtype).itemsize):
                own = xp.full(length, job.rank + 1, dtype=dtype)
                found = host_copy(replica.all_reduce(ReduceOp.SUM, own))
                expected = np.full(length, total).astype(dtype)  # small integers wrap around
                _expect(found, expected, f"all_reduce of {np.dtype(dtype)}")
        own = xp.full((job.rank + 1, 2), job.rank)  # each rank has a different number of rows
        found = host_copy(replica.all_gather(own, axis=0))
        rows = np.repeat(np.arange(job.size), np.arange(1, job.size + 1))
        _expect(found[:, 0], rows, "all_gather")

    strategy.run(step)
    return f"sums of {len(dtypes)} dtypes up to 1 MiB, and a gather of uneven parts"


def _disagreement(job: _Job) -> str:
    if job.size == 1:
        return "not tried on one rank"
    own = np.ones(2 + job.rank % 2)

    def step() -> None:
        replica: Any = get_replica_context()
        replica.all_reduce(ReduceOp.SUM, own)

    try:
        job.strategy.run(step)
    except CollectiveMismatchError:
        return "ranks with different shapes got an error"
    raise AssertionError("ranks with different shapes did not get an error")


def _data(job: _Job) -> str:
    path = job.folder / "data.h5"
    if job.rank == 0:
        with hdf5.h5py().File(path, "w") as file:
            x = np.arange(_NUM_EXAMPLES, dtype=np.float32)
            file.create_dataset("x", data=x, chunks=(16,), compression="gzip")
    context.collectives_of(job.strategy).gather_json(None, "smoke")  # wait for the file
    data = Dataset.from_hdf5(str(path), "x").shuffle(seed=1).batch(_BATCH)
    batches = job.strategy.distribute_dataset(data)
    own: list[float] = []
    for batch in batches:
        job.strategy.run(lambda part: own.append(float(part.sum())), (batch,))
    of_ranks = context.collectives_of(job.strategy).gather_json(sum(own), "smoke")
    _expect(sum(of_ranks), _NUM_EXAMPLES * (_NUM_EXAMPLES - 1) / 2, "sum of all examples")
    return f"{_NUM_EXAMPLES} shuffled rows of a gzip-compressed HDF5 file"


def _trained(job: _Job) -> tuple[Any, Any]:
    with job.strategy.scope():
        weight = Variable(np.zeros(1000, np.float32), name="weight")
        optimizer = SGD(learning_rate=0.5, momentum=0.5)
    gradient = job.strategy.extended.xp.full(1000, job.rank + 1, dtype=np.float32)
    for _ in range(2):
        job.strategy.run(lambda: optimizer.apply_gradients([(gradient, weight)]))
    return weight, optimizer


def _training(job: _Job) -> str:
    weight, _ = _trained(job)
    total = job.size * (job.size + 1) / 2
    expected = np.full(1000, -total * (0.5 + 0.5 * 1.5), np.float32)
    _expect(weight.numpy(), expected, "the weights after two steps")
    return "two steps of SGD with momentum, the same weights on every rank"


def _checkpoint(job: _Job) -> str:
    weight, optimizer = _trained(job)
    saved = weight.numpy().copy()
    path = Checkpoint(weight=weight, optimizer=optimizer).write(job.folder / "run.h5")
    if job.rank == 0:
        with open_checkpoint(path) as reader:
            reader.verify()
    with job.strategy.scope():
        weight = Variable(np.zeros(1000, np.float32), name="weight")
    Checkpoint(weight=weight).restore(path).expect_partial()
    _expect(weight.numpy(), saved, "the restored weights")
    return "written, verified and restored"


def _gpu(job: _Job) -> str:
    if not count_gpus():
        return "not tried: no CuPy with a GPU here"
    if not job.uses_gpu:
        return "not tried: there is a GPU, but this strategy uses host memory"
    return "the collectives and the training above used it"


def _torch(job: _Job) -> str:
    torch: Any = import_torch()
    if torch is None:
        return "not tried: PyTorch is not installed"
    from mpistrat import torch as backend  # it needs PyTorch

    backend.init()
    tensor = torch.full((1000,), float(job.rank + 1))
    torch.distributed.all_reduce(tensor)
    torch.distributed.destroy_process_group()
    _expect(tensor.numpy(), np.full(1000, job.size * (job.size + 1) / 2), "torch's all_reduce")
    return f"PyTorch {torch.__version__}: all_reduce by the backend mpistrat"


CHECKS = (
    *(_installation, _launch, _collectives, _data, _training, _checkpoint, _gpu, _torch),
    _disagreement,  # must be last, because after it the ranks cannot work together
)
