"""The exchange itself, for processes that may die of it.

A library that does not know device memory reads it as host memory: the process dies, or the
numbers are wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import resource
import sys
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Device, count_gpus, place
from mpistrat.cuda_awareness.operations import OPERATIONS, wrong_operations
from mpistrat.world import abort_world, communicator

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["main"]

_PASSED, _FAILED, _UNABLE = 0, 1, 2
"""Exit codes."""


def _device_of(memory: str, first: int, rank: int) -> Device:
    """Return the device of this rank: neighbours take different ones where there are several."""
    if memory == "host":
        return Device("cpu")
    num_gpus = count_gpus()
    if num_gpus == 0:
        raise RuntimeError("cupy sees no GPU")
    return Device("gpu", (first + rank) % num_gpus)


def _say(stage: str, comm: MPI.Intracomm, words: str) -> None:
    report = {"exchange": stage, "num_processes": comm.size, "words": words}
    # In one piece: an unbuffered Python prints a line and its end apart, and others come between.
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()


def _try(comm: MPI.Intracomm, memory: str, first_device: int) -> int:
    put: Any = None
    obstacle = None
    try:
        device = _device_of(memory, first_device, comm.rank)
        put = partial(place, device=device)
        put(np.zeros(2**20, np.float32))
    except Exception as error:  # cupy raises its own types
        obstacle = f"{type(error).__name__} on rank {comm.rank}: {error}"
    obstacles = list(filter(None, comm.allgather(obstacle)))
    if obstacles:
        if comm.rank == 0:
            _say("unable", comm, obstacles[0])
        return _UNABLE
    if comm.rank == 0:
        _say("begun", comm, f"{memory} memory")
    comm.Barrier()
    try:
        wrong = wrong_operations(comm, put)
    except Exception as error:  # of MPI or cupy
        _say("failed", comm, f"{type(error).__name__} on rank {comm.rank}: {error}")
        abort_world(_FAILED)
        raise
    everywhere = dict.fromkeys(chain.from_iterable(comm.allgather(wrong)))
    if comm.rank == 0:
        if everywhere:
            _say("failed", comm, f"wrong numbers in {', '.join(everywhere)}")
        else:
            _say("passed", comm, f"{memory} memory, {', '.join(OPERATIONS)}")
    return _FAILED if everywhere else _PASSED


def main(arguments: list[str] | None = None) -> int:
    """Exchange memory among all ranks, say how it went, and return an exit code. **Collective**.

    0 where all numbers were right, 1 where not, 2 where it could not be tried.
    """
    parser = argparse.ArgumentParser(
        prog="python -m mpistrat.cuda_awareness",
        description="Try whether MPI takes device memory, among the ranks that are started.",
    )
    parser.add_argument("--memory", choices=("device", "host"), default="device")
    parser.add_argument("--device", type=int, default=0, help="GPU of rank 0; others take the next")
    parser.add_argument("--limit", type=float, default=60, help="seconds")
    args = parser.parse_args(arguments)
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # Also where the library hangs, or who started this process is gone.
    faulthandler.dump_traceback_later(args.limit, exit=True)
    return _try(communicator(None), args.memory, args.device)
