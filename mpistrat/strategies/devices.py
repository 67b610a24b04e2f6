"""Selection of devices, and of the ways to communicate from device memory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpistrat.arrays import Device
from mpistrat.comm.device_reducers import DeviceCapabilities, DeviceCopier, NcclLink
from mpistrat.cuda_api import count_gpus, nccl_library
from mpistrat.errors import LaunchError
from mpistrat.mpi.launcher import find_launcher
from mpistrat.mpi.world import World, attached, is_started
from mpistrat.system.cpu import cores_near_pci, own_cores
from mpistrat.system.text import counted, rank_list, ranks_by_value

if TYPE_CHECKING:
    from mpistrat.cuda_awareness import CudaAwareness


@dataclass(frozen=True)
class Offer:
    """The GPUs that a rank could take."""

    gpus: tuple[str, ...]
    """Identity of each GPU that the rank sees, in the order of their numbers."""
    is_near: tuple[bool, ...]
    """Whether each is nearest to the cores of this rank; true for all if that is unknown."""
    preferred: int
    """Number of the GPU that the rank would choose without regard to the others."""
    is_fixed: bool = False
    """Whether the rank must get that GPU, because the user has named it."""


def prepare_device(device: str) -> None:
    """Select the GPU that this rank will probably get, before MPI starts."""
    # MPI libraries that accept device memory may bind to the GPU that is current in MPI_Init. This
    # does nothing if the launcher does not say which task of the node this is, or if MPI already
    # runs. A bad argument is reported later, when the ranks can agree on it.
    local_task = find_launcher().local_task
    if is_started() or local_task is None:
        return
    with contextlib.suppress(Exception):  # cupy has its own exceptions
        offer = make_offer(device, local_task)
        if offer is not None:
            Device("gpu", offer.preferred).namespace()


def make_offer(device: str, local_rank: int) -> Offer | None:
    """Return the GPUs that this rank could take, ``None`` if it computes on the host."""
    found = Device.resolve(device, local_rank)
    if found.kind != "gpu":
        return None
    devices = [Device("gpu", index) for index in range(count_gpus())]
    own = own_cores()
    near = [cores_near_pci(each.pci_address()) for each in devices]
    is_near = [bool(cores) and own <= cores for cores in near]
    # A rank that is not bound may run on cores of all sockets, so no GPU is near all of them.
    if not any(is_near):
        is_near = [True] * len(devices)
    is_fixed = Device.parse(device)[1] is not None
    nearest = [index for index, yes in enumerate(is_near) if yes]
    return Offer(
        gpus=tuple(each.gpu_identity() for each in devices),
        is_near=tuple(is_near),
        preferred=found.index if is_fixed else nearest[local_rank % len(nearest)],
        is_fixed=is_fixed,
    )


def choose_gpus(offers: Sequence[Offer | None]) -> list[int | None]:
    """Return for each rank of one node the number of its GPU, ``None`` for the host."""
    # No two ranks get the same GPU if that is possible, and as many as possible get a near one.
    ranks = [rank for rank, offer in enumerate(offers) if offer is not None]
    chosen: dict[int, str] = {}
    owners: dict[str, int] = {}
    for rank in ranks:
        offer = offers[rank]
        if offer is not None and offer.is_fixed:
            chosen[rank] = offer.gpus[offer.preferred]
    named = set(chosen.values())
    # The second pass adds ranks that found no near GPU. It may move other ranks to a different GPU,
    # but no rank that has a GPU loses it.
    for only_near in (True, False):
        wishes = {
            rank: [gpu for gpu in _wishes(offer, only_near) if gpu not in named]
            for rank, offer in enumerate(offers)
            if offer is not None and not offer.is_fixed
        }
        for rank in wishes:
            if rank not in owners.values():
                _find_gpu(rank, wishes, owners, set())
    chosen |= {rank: gpu for gpu, rank in owners.items()}
    return [
        None if offer is None else _index(offer, chosen.get(rank))
        for rank, offer in enumerate(offers)
    ]


def _index(offer: Offer, gpu: str | None) -> int:
    return offer.preferred if gpu is None else offer.gpus.index(gpu)


def _wishes(offer: Offer, only_near: bool) -> list[str]:
    """Return the GPUs that a rank would accept, the best first."""
    count = len(offer.gpus)
    order = [(offer.preferred + step) % count for step in range(count)]
    order.sort(key=lambda index: not offer.is_near[index])
    return [offer.gpus[index] for index in order if offer.is_near[index] or not only_near]


def _find_gpu(
    rank: int, wishes: Mapping[int, Sequence[str]], owners: dict[str, int], seen: set[str]
) -> bool:
    """Assign a GPU to `rank`, moving its owner to a different one if needed; return success."""
    # This is an augmenting path of a matching in a bipartite graph.
    for gpu in wishes[rank]:
        if gpu not in owners:
            owners[gpu] = rank
            return True
    for gpu in wishes[rank]:
        if gpu not in seen:
            seen.add(gpu)
            if _find_gpu(owners[gpu], wishes, owners, seen):
                owners[gpu] = rank
                return True
    return False


def choose_devices(
    offers: Sequence[Offer | None], node_of_rank: Sequence[int], may_share: bool
) -> list[Device]:
    """Return the device of each rank of a world."""
    devices = [Device("cpu")] * len(offers)
    for node in dict.fromkeys(node_of_rank):
        mates = [rank for rank, each in enumerate(node_of_rank) if each == node]
        chosen = choose_gpus([offers[rank] for rank in mates])
        for rank, index in zip(mates, chosen, strict=True):
            if index is not None:
                devices[rank] = Device("gpu", index)
        shared = ranks_on_one_gpu(offers, devices, mates)
        if shared and not may_share:
            raise LaunchError(_format_sharing(shared, [offers[rank] for rank in mates]))
    return devices


def ranks_on_one_gpu(
    offers: Sequence[Offer | None], devices: Sequence[Device], ranks: Iterable[int] | None = None
) -> list[int]:
    """Return the first ranks, of all or of `ranks`, that share a GPU."""
    gpus = []
    for rank in range(len(offers)) if ranks is None else ranks:
        offer, device = offers[rank], devices[rank]
        if offer is not None and device.kind == "gpu":
            gpus.append((rank, offer.gpus[device.index]))
    return _ranks_on_one_gpu(gpus)


def _ranks_on_one_gpu(gpus: Iterable[tuple[int, str]]) -> list[int]:
    """Return the first ranks that share a GPU, from pairs of rank and GPU."""
    owners = ranks_by_value(gpus).values()
    return next((ranks for ranks in owners if len(ranks) > 1), [])


def _format_sharing(ranks: Sequence[int], of_node: Sequence[Offer | None]) -> str:
    visible = {gpu for offer in of_node if offer is not None for gpu in offer.gpus}
    num_ranks = sum(offer is not None for offer in of_node)
    who = f"{rank_list(ranks)} would compute on one GPU"
    share = "MPISTRAT_SHARE_GPUS=on lets ranks share GPUs."
    if len(visible) >= num_ranks:
        return (
            f"{who}, but their node shows {len(visible)} GPUs to its {num_ranks} ranks. Show each "
            f'rank a different one, or use device="auto", which chooses a free one. {share}'
        )
    return (
        f"{who}: their node has {num_ranks} ranks, which see {counted(len(visible), 'GPU')}. Start "
        f"as many ranks on a node as it has GPUs (srun --ntasks-per-node={len(visible)}), ask for "
        f'more GPUs (srun --gpus-per-node={num_ranks}), or use device="cpu". {share}'
    )


_logger = logging.getLogger("mpistrat")


@dataclass(frozen=True)
class Gpu:
    """Description of a rank's GPU for the other ranks."""

    identity: str
    """The same on all ranks that compute on it, and on no others."""
    nccl_version: int = 0
    why_not_nccl: str = ""
    """Why the rank itself cannot use NCCL."""


def open_device_capabilities(
    world: World, device: Device, override: bool | None
) -> DeviceCapabilities:
    """Return the capabilities of MPI and NCCL for device memory in `world`. **Collective**."""
    # If all ranks have GPUs, the first call takes some seconds: it tests for CUDA-awareness and
    # starts NCCL.
    gpus: list[Gpu | None] = world.comm.allgather(_describe(device))
    hosts = [rank for rank, gpu in enumerate(gpus) if gpu is None]
    if len(hosts) == world.size:
        return DeviceCapabilities(device)
    if hosts:
        why_not = f"there is no GPU on {rank_list(hosts)}"
        return DeviceCapabilities(device, why_not_mpi=why_not, why_not_nccl=why_not)
    from mpistrat.cuda_awareness.trial import cuda_awareness  # it starts programs

    awareness = cuda_awareness(world, device, override)
    link, no_nccl = _open_nccl(world, device, [gpu for gpu in gpus if gpu is not None])
    _logger.debug("%s\nNCCL: %s", awareness, no_nccl or "connected")
    return DeviceCapabilities(device, DeviceCopier(device), why_not_mpi(awareness), no_nccl, link)


def why_not_mpi(awareness: CudaAwareness) -> str:
    """Return why device memory may not be passed to MPI; empty if it may."""
    from mpistrat.cuda_awareness import Answer  # most jobs have no GPU

    if awareness.answer is Answer.PROVED:
        return ""
    answer = awareness.answer.name.lower()
    first = f"MPI is not proved CUDA-aware ({answer}, as rank {awareness.rank} has found):"
    return "\n  ".join([first, *awareness.reasons])


def why_not_nccl(gpus: Sequence[Gpu]) -> str:
    """Return why ranks with these GPUs cannot use NCCL together; empty if they can."""
    for rank, gpu in enumerate(gpus):
        if gpu.why_not_nccl:
            return f"rank {rank} has no NCCL: {gpu.why_not_nccl}"
    versions = [gpu.nccl_version for gpu in gpus]
    for rank, version in enumerate(versions):
        if version != versions[0]:
            return f"rank 0 has NCCL {versions[0]} and rank {rank} has {version}"
    shared = _ranks_on_one_gpu((rank, gpu.identity) for rank, gpu in enumerate(gpus))
    return f"{rank_list(shared)} share one GPU" if shared else ""


def _open_nccl(world: World, device: Device, gpus: list[Gpu]) -> tuple[NcclLink | None, str]:
    """Return the NCCL link between all ranks, or why there is none. **Collective**."""
    why_not = why_not_nccl(gpus)
    if why_not:
        return None, why_not
    # All ranks have decided from the same list, because NCCL would wait forever for a rank that
    # does not connect.
    key = f"NCCL between {gpus}"
    link: NcclLink | str = attached(world.comm, key, lambda: NcclLink.connect(world.comm, device))
    return (None, link) if isinstance(link, str) else (link, "")


def _describe(device: Device) -> Gpu | None:
    """Return the description of this rank's GPU, ``None`` without one. Raises nothing."""
    if device.kind != "gpu":
        return None
    try:
        identity = device.gpu_identity()
    except Exception as error:  # the others wait for an answer, whatever happens here
        return Gpu("unknown", 0, f"its GPU cannot be identified: {error!r}")
    try:
        return Gpu(identity, int(nccl_library().get_version()))
    except Exception as error:
        return Gpu(identity, 0, str(error))
