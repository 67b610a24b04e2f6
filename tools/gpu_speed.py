"""Speed on GPUs, beside peers in the same run: reductions, optimizer steps, batches, checkpoints.

    mpiexec -n 2 python -m tools.gpu_speed --output speed-2.json

Candidates take turns, and each figure is a median. Part of ``make gpu-report``.
"""

import argparse
import functools
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import mpistrat as ms
from mpistrat.bench.measure import SHAPES
from mpistrat.pytorch import import_torch

SIZES = tuple(2**k for k in range(16, 29, 2))
COPIED = 2**26

Times = dict[str, float]


def medians(candidates: dict[str, Callable[[], object]], count: int, settle: Any) -> Times:
    """Return the median time of each candidate, which take turns after a round of warm-up."""
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(count + 2):
        for name, function in candidates.items():
            settle()
            MPI.COMM_WORLD.Barrier()
            began = time.perf_counter()
            function()
            settle()
            if turn >= 2:
                samples[name].append(time.perf_counter() - began)
    slowest = MPI.COMM_WORLD.allgather({k: statistics.median(v) for k, v in samples.items()})
    return {name: max(each[name] for each in slowest) for name in candidates}


def reductions(strategy: Any, settle: Any, count: int) -> list[dict[str, Any]]:
    """Time sums of float32: staged, by NCCL if it connects, and MPI on host memory."""
    xp, kinds = strategy.extended.xp, ms.CommunicationImplementation
    has_nccl = not strategy.extended._collectives.capabilities.why_not_nccl
    rows = []
    for num_bytes in SIZES:
        on_gpu, host = xp.ones(num_bytes // 4, dtype=np.float32), np.ones(num_bytes // 4, "f4")
        target = np.empty_like(host)

        def by(name: str, array: Any = on_gpu) -> Callable[[], object]:
            options = ms.CommunicationOptions(implementation=kinds[name])

            def step() -> None:
                replica: Any = ms.get_replica_context()
                replica.all_reduce("sum", array, options)

            return lambda: strategy.run(step)

        candidates: dict[str, Callable[[], object]] = {
            "staged": by("STAGED"),
            "mpi_host": functools.partial(MPI.COMM_WORLD.Allreduce, host, target),
        }
        if has_nccl:
            candidates["nccl"] = by("NCCL")
        rows.append({"bytes": num_bytes} | medians(candidates, count, settle))
    return rows


def optimizer_steps(settle: Any, count: int) -> list[dict[str, Any]]:
    """Time one step on the device beside torch.optim on the same sizes."""
    torch = import_torch()
    if torch is not None and not torch.cuda.is_available():
        torch = None
    strategy = ms.OneDeviceStrategy("gpu:0")
    xp = strategy.extended.xp
    layouts = {
        "one array of 25.6 million": ((25_600_000,),),
        "ResNet-50, 161 arrays": SHAPES,
        "200 arrays of 1,000": ((1000,),) * 200,
    }
    rules: dict[str, tuple[Callable[[], Any], str, dict[str, float]]] = {
        "Adam": (lambda: ms.optimizers.Adam(1e-4), "Adam", {"lr": 1e-4}),
        "SGD, momentum": (
            lambda: ms.optimizers.SGD(0.01, 0.9),
            "SGD",
            {"lr": 0.01, "momentum": 0.9},
        ),
        "Adam, clipped": (
            lambda: ms.optimizers.Adam(1e-4, global_clipnorm=1.0),
            "Adam",
            {"lr": 1e-4},
        ),
    }
    rows = []
    for layout, shapes in layouts.items():
        for rule, (make, torch_name, options) in rules.items():
            with strategy.scope():
                variables = [
                    ms.Variable(np.zeros(s, np.float32), name=str(i)) for i, s in enumerate(shapes)
                ]
                optimizer = make()
            gradients = [xp.full(s, 1e-3, dtype=np.float32) for s in shapes]
            pairs = list(zip(gradients, variables, strict=True))
            with strategy.scope():
                candidates: dict[str, Callable[[], object]] = {
                    "cross_replica": functools.partial(optimizer.apply_gradients, pairs)
                }
                ours = medians(candidates, count, settle)
            step = functools.partial(optimizer.apply_gradients, pairs)
            in_run: dict[str, Callable[[], object]] = {
                "in_run": functools.partial(strategy.run, step)
            }
            if torch is not None:
                for mode in ("fused", "foreach"):
                    in_run[mode] = _torch_step(
                        torch, torch_name, options, mode, shapes, "clip" in rule
                    )
            row = {"optimizer": rule, "layout": layout} | ours | medians(in_run, count, settle)
            rows.append(row)
    return rows


def _torch_step(
    torch: Any, name: str, options: dict[str, float], mode: str, shapes: Any, clips: bool
) -> Callable[[], object]:
    parameters = [torch.nn.Parameter(torch.zeros(s, device="cuda")) for s in shapes]
    for each in parameters:
        each.grad = torch.full_like(each, 1e-3)
    optimizer = getattr(torch.optim, name)(parameters, **options, **{mode: True})

    def step() -> None:
        if clips:
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()

    return step


def batches(strategy: Any, settle: Any, folder: Path) -> dict[str, float]:
    """Return the rates in bytes per second and rank at which batches come to host and device."""
    rank, size = strategy.rank, strategy.size
    path, rows = folder / "rows.h5", 40_000
    if rank == 0:
        import h5py

        with h5py.File(path, "w") as file:
            block = np.random.default_rng(0).integers(0, 255, (2_000, 3072), np.uint8)
            data = file.create_dataset("x", (rows, 3072), np.uint8, chunks=(64, 3072))
            for begin in range(0, rows, len(block)):
                data[begin : begin + len(block)] = block
    strategy.barrier()
    rates = {}
    for device, other in (("gpu", strategy), ("cpu", ms.MPIStrategy(device="cpu"))):
        data = (
            ms.data.Dataset.from_hdf5(str(path), "x").shuffle(seed=1).batch(256 * size).prefetch(4)
        )
        distributed = other.experimental_distribute_dataset(data)
        took = []
        for _ in range(4):
            strategy.barrier()
            began, num_bytes = time.perf_counter(), 0
            for batch in distributed:
                num_bytes += batch.values[0].nbytes
            settle()
            took.append((time.perf_counter() - began, num_bytes))
        rates[f"shuffled_hdf5_to_{device}"] = statistics.median(n / t for t, n in took[1:])
    return rates


def copies(strategy: Any, settle: Any, count: int) -> Times:
    """Time copies of 64 MiB between host and device."""
    from mpistrat.arrays import host_view

    xp = strategy.extended.xp
    on_gpu, host = xp.ones(COPIED // 4, dtype=np.float32), np.ones(COPIED // 4, np.float32)
    candidates: dict[str, Callable[[], object]] = {
        "to_host_page_locked": lambda: host_view(on_gpu),
        "to_host_pageable": lambda: on_gpu.get(),
        "to_device": lambda: xp.asarray(host),
    }
    return medians(candidates, count, settle)


def checkpoints(strategy: Any, settle: Any, folder: Path, count: int) -> Times:
    """Time a checkpoint of 512 MiB of device memory, and of host memory."""
    times: Times = {}
    for device, other in (("gpu", strategy), ("cpu", ms.MPIStrategy(device="cpu"))):
        with other.scope():
            weight = ms.Variable(np.zeros(2**27, np.float32), name=f"w-{device}")
        checkpoint = ms.Checkpoint(weight=weight)
        path = folder / f"{device}.h5"
        candidates: dict[str, Callable[[], object]] = {
            f"write_from_{device}": functools.partial(checkpoint.write, path),
            f"read_to_{device}": functools.partial(checkpoint.restore, path),
        }
        times |= medians(candidates, count, settle)
    return times


def main() -> None:
    """Measure, and write the figures as JSON on rank 0."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", required=True, type=Path)
    parser.add_argument("--samples", type=int, default=9)
    parser.add_argument("--folder", default=None, help="for files; seen by all ranks")
    arguments = parser.parse_args()
    import cupy

    settle = cupy.cuda.runtime.deviceSynchronize
    strategy = ms.MPIStrategy(device="gpu")
    folder = strategy.broadcast_object(
        tempfile.mkdtemp(dir=arguments.folder) if strategy.rank == 0 else None
    )
    found: dict[str, Any] = {
        "ranks": strategy.size,
        "device": strategy.extended.device.describe_gpu(),
    }
    found["reductions"] = reductions(strategy, settle, arguments.samples)
    found["copies"] = copies(strategy, settle, arguments.samples)
    if strategy.size == 1:
        found["optimizers"] = optimizer_steps(settle, arguments.samples)
    found["batches"] = batches(strategy, settle, Path(folder))
    found["checkpoints"] = checkpoints(strategy, settle, Path(folder), 3)
    strategy.barrier()
    if strategy.rank == 0:
        shutil.rmtree(folder)
        arguments.output.write_text(json.dumps(found, indent=1) + "\n")
    strategy.close()


if __name__ == "__main__":
    main()
