"""What the ranks of a strategy find out together about their devices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from mpistrat.arrays import Device, gpu_identity, nccl_library
from mpistrat.comm.device_copier import DeviceCopier
from mpistrat.comm.device_ways import DeviceWays
from mpistrat.comm.nccl import NcclLink, connect_nccl
from mpistrat.cuda_awareness import Answer, CudaAwareness, cuda_awareness
from mpistrat.epochs.report import rank_list
from mpistrat.strategies.device_choice import ranks_on_one_gpu
from mpistrat.world import World, attached

__all__ = ["Gpu", "open_device_ways", "why_not_mpi", "why_not_nccl"]

_logger = logging.getLogger("mpistrat")


@dataclass(frozen=True)
class Gpu:
    """What a rank says of its GPU."""

    identity: str
    """The same on all ranks that compute on it, and on no others."""
    nccl_version: int = 0
    why_not_nccl: str = ""
    """Why the rank itself cannot use NCCL."""


def open_device_ways(world: World, device: Device, override: bool | None) -> DeviceWays:
    """Return what can be done with the device memory of the ranks of `world`.

    **Collective** over its communicator. Where all ranks have GPUs, the first call takes some
    seconds: CUDA-awareness is tried, and NCCL is started.

    Parameters
    ----------
    world : World
    device : Device
        Where the replica of this rank computes.
    override : bool or None
        The setting ``MPISTRAT_CUDA_AWARE``.
    """
    gpus: list[Gpu | None] = world.comm.allgather(_describe(device))
    hosts = [rank for rank, gpu in enumerate(gpus) if gpu is None]
    if len(hosts) == world.size:
        return DeviceWays(device)
    if hosts:
        why_not = f"there is no GPU on {rank_list(hosts)}"
        return DeviceWays(device, why_not_mpi=why_not, why_not_nccl=why_not)
    awareness = cuda_awareness(world, device, override)
    link, no_nccl = _open_nccl(world, device, [gpu for gpu in gpus if gpu is not None])
    _logger.debug("%s\nNCCL: %s", awareness, no_nccl or "connected")
    return DeviceWays(device, DeviceCopier(device), why_not_mpi(awareness), no_nccl, link)


def why_not_mpi(awareness: CudaAwareness) -> str:
    """Return why MPI may not be given device memory, empty where it may. Local."""
    if awareness.answer is Answer.PROVED:
        return ""
    answer = awareness.answer.name.lower()
    first = f"MPI is not proved CUDA-aware ({answer}, as rank {awareness.rank} has found):"
    return "\n  ".join([first, *awareness.reasons])


def why_not_nccl(gpus: Sequence[Gpu]) -> str:
    """Return why ranks with these GPUs cannot use NCCL together, empty where they can. Local."""
    for rank, gpu in enumerate(gpus):
        if gpu.why_not_nccl:
            return f"rank {rank} has no NCCL: {gpu.why_not_nccl}"
    versions = [gpu.nccl_version for gpu in gpus]
    for rank, version in enumerate(versions):
        if version != versions[0]:
            return f"rank 0 has NCCL {versions[0]} and rank {rank} has {version}"
    shared = ranks_on_one_gpu((rank, gpu.identity) for rank, gpu in enumerate(gpus))
    return f"{rank_list(shared)} share one GPU" if shared else ""


def _open_nccl(world: World, device: Device, gpus: list[Gpu]) -> tuple[NcclLink | None, str]:
    """Return NCCL's link between all ranks, or why there is none. **Collective**."""
    why_not = why_not_nccl(gpus)
    if why_not:
        return None, why_not
    key = f"NCCL between {gpus}"
    link: NcclLink | str = attached(world.comm, key, lambda: connect_nccl(world.comm, device))
    return (None, link) if isinstance(link, str) else (link, "")


def _describe(device: Device) -> Gpu | None:
    """Return what this rank says of its GPU, ``None`` without one. Raises nothing. Local."""
    if device.kind != "gpu":
        return None
    try:
        identity = gpu_identity(device)
    except Exception as error:  # the others wait for an answer, whatever happens here
        return Gpu("unknown", 0, f"its GPU cannot be identified: {error!r}")
    try:
        return Gpu(identity, int(nccl_library().get_version()))
    except Exception as error:
        return Gpu(identity, 0, str(error))
