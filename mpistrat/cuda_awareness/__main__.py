"""Exchanges device memory by MPI, in processes that may crash: ``-m mpistrat.cuda_awareness``.

A library without support for device memory reads it as host memory. Then the process crashes, or
the numbers are wrong.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import resource
import sys
from collections.abc import Callable
from functools import partial
from itertools import accumulate, chain
from typing import TYPE_CHECKING, Any

import numpy as np

from mpistrat.arrays import Array, Device, host_view, place, synchronize
from mpistrat.cuda_api import count_gpus
from mpistrat.mpi.world import abort_world, communicator

if TYPE_CHECKING:
    from mpi4py import MPI

_LENGTHS = (1, 2**10, 2**14, 2**20)
"""Lengths in elements of 4 bytes. Libraries use different protocols for short and long messages."""

_Put = Callable[[np.ndarray], Array]
"""Copies a NumPy array to the memory under test."""


def _numbers(rank: int, length: int) -> np.ndarray:
    return np.arange(length, dtype=np.float32) % 97 + rank


def _total(size: int, length: int) -> np.ndarray:
    ranks = np.float32(size * (size - 1) // 2)  # 0 + 1 + ... + (size - 1)
    total: np.ndarray = _numbers(0, length) * np.float32(size) + ranks
    return total


def _ready(*arrays: Array) -> None:
    for array in arrays:
        synchronize(array)


def _parts(array: Array, counts: list[int]) -> list[object]:
    return [array, (counts, [0, *accumulate(counts)][:-1])]


def _sendrecv(comm: MPI.Intracomm, put: _Put, length: int) -> tuple[Array, np.ndarray]:
    # Fill the receive buffer with wrong numbers, so that an exchange that does nothing fails.
    own, received = put(_numbers(comm.rank, length)), put(_numbers(-1, length))
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    _ready(own, received)
    comm.Sendrecv(own, right, recvbuf=received, source=left)
    return received, _numbers(left, length)


def _bcast(comm: MPI.Intracomm, put: _Put, length: int) -> tuple[Array, np.ndarray]:
    buffer, root = put(_numbers(comm.rank, length)), comm.size - 1
    _ready(buffer)
    comm.Bcast(buffer, root)
    return buffer, _numbers(root, length)


def _allreduce(comm: MPI.Intracomm, put: _Put, length: int) -> tuple[Array, np.ndarray]:
    from mpi4py import MPI

    buffer = put(_numbers(comm.rank, length))
    _ready(buffer)
    comm.Allreduce(MPI.IN_PLACE, buffer, MPI.SUM)
    return buffer, _total(comm.size, length)


def _reduce(comm: MPI.Intracomm, put: _Put, length: int) -> tuple[Array, np.ndarray]:
    from mpi4py import MPI

    buffer = put(_numbers(comm.rank, length))
    _ready(buffer)
    if comm.rank == 0:
        comm.Reduce(MPI.IN_PLACE, buffer, MPI.SUM, 0)
        return buffer, _total(comm.size, length)
    comm.Reduce(buffer, None, MPI.SUM, 0)
    return buffer, _numbers(comm.rank, length)


def _lengths(comm: MPI.Intracomm, length: int) -> tuple[list[int], np.ndarray]:
    """Return a different length for each rank, and the concatenated numbers of all ranks."""
    counts = [length + rank for rank in range(comm.size)]
    return counts, np.concatenate([_numbers(rank, n) for rank, n in enumerate(counts)])


def _allgatherv(comm: MPI.Intracomm, put: _Put, length: int) -> tuple[Array, np.ndarray]:
    counts, expected = _lengths(comm, length)
    own, received = put(_numbers(comm.rank, counts[comm.rank])), put(np.zeros_like(expected))
    _ready(own, received)
    comm.Allgatherv(own, _parts(received, counts))
    return received, expected


def _gatherv(comm: MPI.Intracomm, put: _Put, length: int) -> tuple[Array, np.ndarray]:
    counts, expected = _lengths(comm, length)
    own, received = put(_numbers(comm.rank, counts[comm.rank])), put(np.zeros_like(expected))
    _ready(own, received)
    comm.Gatherv(own, _parts(received, counts) if comm.rank == 0 else None, 0)
    return received, expected if comm.rank == 0 else np.zeros_like(expected)


def _alltoallv(comm: MPI.Intracomm, put: _Put, length: int) -> tuple[Array, np.ndarray]:
    counts, sent = _lengths(comm, length)
    own_counts = [counts[comm.rank]] * comm.size
    expected = np.concatenate([_numbers(comm.rank, counts[comm.rank])] * comm.size)
    own, received = put(sent), put(np.zeros_like(expected))
    _ready(own, received)
    comm.Alltoallv(_parts(own, counts), _parts(received, own_counts))
    return received, expected


OPERATIONS: dict[str, Callable[[MPI.Intracomm, _Put, int], tuple[Array, np.ndarray]]] = {
    "Sendrecv": _sendrecv,
    "Bcast": _bcast,
    "Allreduce": _allreduce,
    "Reduce": _reduce,
    "Allgatherv": _allgatherv,
    "Gatherv": _gatherv,
    "Alltoallv": _alltoallv,
}
"""Operations to try. Each returns the received and the expected numbers of this rank."""


def wrong_operations(comm: MPI.Intracomm, put: _Put) -> list[str]:
    """Try all operations on memory from `put`, and return the wrong ones. **Collective**."""
    return [
        f"{name} of {length} numbers"
        for name, operate in OPERATIONS.items()
        for length in _LENGTHS
        if not _is_right(*operate(comm, put, length))
    ]


def _is_right(received: Array, expected: np.ndarray) -> bool:
    return np.array_equal(host_view(received), expected)


_PASSED, _FAILED, _UNABLE = 0, 1, 2
"""Exit codes: all numbers were right; some were wrong; the exchange could not be tried."""


def _device_of(memory: str, first: int, rank: int) -> Device:
    """Return the device of this rank. Neighbours use different ones if there are several."""
    if memory == "host":
        return Device("cpu")
    num_gpus = count_gpus()
    if num_gpus == 0:
        raise RuntimeError("cupy sees no GPU")
    return Device("gpu", (first + rank) % num_gpus)


def _print_report(stage: str, comm: MPI.Intracomm, text: str) -> None:
    report = {"exchange": stage, "num_processes": comm.size, "text": text}
    # Use a single write, because print() in an unbuffered Python writes the newline separately.
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
    # Check this before device memory is sent: the others would wait for a rank without a GPU.
    obstacles = list(filter(None, comm.allgather(obstacle)))
    if obstacles:
        if comm.rank == 0:
            _print_report("unable", comm, obstacles[0])
        return _UNABLE
    if comm.rank == 0:
        _print_report("begun", comm, f"{memory} memory")
    # No rank must crash before rank 0 has reported that the exchange has begun, because the parent
    # takes only a crash after that report for a failure of MPI.
    comm.Barrier()
    try:
        wrong = wrong_operations(comm, put)
    except Exception as error:  # MPI and cupy raise their own types
        _print_report("failed", comm, f"{type(error).__name__} on rank {comm.rank}: {error}")
        # The other ranks may be waiting inside an operation that this rank has left.
        abort_world(_FAILED)
        raise
    everywhere = dict.fromkeys(chain.from_iterable(comm.allgather(wrong)))
    if comm.rank == 0:
        if everywhere:
            _print_report("failed", comm, f"wrong numbers in {', '.join(everywhere)}")
        else:
            _print_report("passed", comm, f"{memory} memory, {', '.join(OPERATIONS)}")
    return _FAILED if everywhere else _PASSED


def main(arguments: list[str] | None = None) -> int:
    """Exchange memory among all ranks, print a report, and return an exit code. **Collective**."""
    parser = argparse.ArgumentParser(
        prog="python -m mpistrat.cuda_awareness",
        description="Exchange device memory by MPI between all ranks that are started, as a test.",
    )
    parser.add_argument(
        "--memory",
        choices=("device", "host"),
        default="device",
        help="the memory to exchange (default: %(default)s)",
    )
    parser.add_argument(
        "--device",
        type=int,
        default=0,
        metavar="N",
        help="GPU of rank 0; further ranks use the GPUs after it",
    )
    parser.add_argument(
        "--limit",
        type=float,
        default=60,
        metavar="SECONDS",
        help="time limit (default: %(default)s s)",
    )
    args = parser.parse_args(arguments)
    # The process may well crash, and should not leave a core file.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    # This timer ends the process even if the library hangs or the parent has ended.
    faulthandler.dump_traceback_later(args.limit, exit=True)
    return _try(communicator(None), args.memory, args.device)


if __name__ == "__main__":
    sys.exit(main())
