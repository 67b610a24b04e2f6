"""One answer for all ranks of a world: the weakest that any of them has found."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from mpistrat.arrays import Device
from mpistrat.cuda_awareness.answer import Answer, CudaAwareness, Evidence, Trial, judge, weigh
from mpistrat.cuda_awareness.claims import gather_claims
from mpistrat.cuda_awareness.trial import try_exchange
from mpistrat.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = ["cuda_awareness"]

_POLL_S = 0.001
"""A rank that waits leaves its core to the children of another one."""


def cuda_awareness(
    world: World,
    device: Device,
    override: bool | None = None,
    *,
    gather: Callable[[MPI.Intracomm], Sequence[Evidence]] = gather_claims,
    attempt: Callable[[int], Sequence[Trial]] = try_exchange,
) -> CudaAwareness:
    """Return whether MPI may be given the device memory of these ranks, and why.

    **Collective** over the communicator of `world`, in host memory; the same on every rank. Where
    any rank answers no, nothing is tried. Else the first rank of each node tries for all of its
    node, which may take some seconds, once a process.

    Parameters
    ----------
    world : World
    device : Device
        Where the replica of this rank computes.
    override : bool, optional
        The setting ``MPISTRAT_CUDA_AWARE``. True holds where all ranks have it.
    gather : callable
        What gives the evidence without a trial.
    attempt : callable
        What makes the trial on the GPU with the given number.
    """
    comm = world.comm
    own = _found(device, override, lambda: gather(comm))
    agreed = _weakest(comm, own)
    if agreed.answer is not Answer.CLAIMED:
        return agreed
    # The others have no word in it: each rank's children would load cupy from the same disk.
    own = CudaAwareness(Answer.PROVED, ())
    if world.local_rank == 0:
        own = _tried(agreed, lambda: attempt(device.index))
    return _weakest(comm, own)


def _found(
    device: Device, override: bool | None, gather: Callable[[], Sequence[Evidence]]
) -> CudaAwareness:
    try:
        asks = device.kind == "gpu" and override is None
        return judge(device.kind, override, gather() if asks else ())
    except Exception as error:  # the others wait for an answer, whatever happens here
        return CudaAwareness(Answer.NO, (f"the search for evidence failed: {error!r}",))


def _tried(claimed: CudaAwareness, attempt: Callable[[], Sequence[Trial]]) -> CudaAwareness:
    try:
        return weigh(claimed, attempt())
    except Exception as error:
        return replace(claimed, reasons=(*claimed.reasons, f"the trial failed: {error!r}"))


def _weakest(comm: MPI.Intracomm, own: CudaAwareness) -> CudaAwareness:
    """Return the weakest of the answers of all ranks. **Collective**."""
    from mpi4py import MPI

    number = np.array([own.answer * comm.size + comm.rank], np.int64)
    lowest = np.empty_like(number)
    request = comm.Iallreduce(number, lowest, MPI.MIN)
    while not request.Test():
        time.sleep(_POLL_S)
    answer, rank = divmod(int(lowest[0]), comm.size)
    return CudaAwareness(Answer(answer), tuple(comm.bcast(own.reasons, rank)), rank)
