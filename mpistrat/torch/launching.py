"""Launching: torch uses the ranks of MPI's launcher, and the rendezvous runs over MPI."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlparse

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d as c10d
from torch.distributed import distributed_c10d

from mpistrat.errors import LaunchError
from mpistrat.mpi.world import World, communicator, open_world
from mpistrat.options import CommunicationOptions
from mpistrat.settings import environment, export_defaults, settings
from mpistrat.strategies.mpi import MPIStrategy

if TYPE_CHECKING:
    from mpi4py import MPI

_NO_LIMIT = timedelta(days=10_000)
"""Torch has no timeout that never ends."""
_LONGEST_STORE = timedelta(days=20)
"""Torch's store counts milliseconds in 32 bits."""


class Options:
    """Options of a group, for ``pg_options=`` of ``init_process_group`` and ``new_group``.

    Parameters
    ----------
    communication_options : CommunicationOptions, optional
        Options of the group's reductions, such as ``CommunicationOptions(deterministic=True)``.
        Default: those of `CommunicationOptions`.

    Examples
    --------
    >>> options = mst.Options(ms.CommunicationOptions(deterministic=True))
    >>> group = torch.distributed.new_group(pg_options=options)
    """

    def __init__(self, communication_options: CommunicationOptions | None = None) -> None:
        self.communication_options = communication_options

    def __repr__(self) -> str:
        return f"Options({self.communication_options!r})"


@dataclass
class _Job:
    """The ranks of the torch job."""

    comm: MPI.Intracomm
    world: World
    store: Any = None
    """Torch's store, which rank 0 serves, once it exists."""
    num_groups: int = 0
    """How many world groups have used the store."""

    @property
    def strategy(self) -> MPIStrategy:
        """Strategy of the ranks before torch has a group; after a failure, a new one."""
        return MPIStrategy(self.comm, "cpu")


_jobs: list[_Job] = []
"""The last one is the current one."""


def job_communicator() -> MPI.Intracomm:
    """Return the communicator of torch's ranks. **Collective** at its first call."""
    return _open_job(None).comm


def _open_job(comm: MPI.Intracomm | None) -> _Job:
    """Return the job of `comm`, by default the current one, or the world. **Collective**."""
    if _jobs and (comm is None or comm == _jobs[-1].comm):
        return _jobs[-1]
    known = communicator(comm)
    _check_environment(known)
    job = _Job(known, open_world(known))
    _jobs.append(job)
    return job


def _check_environment(comm: MPI.Intracomm) -> None:
    """Raise for ranks that a different launcher has set, before any rank waits for them."""
    variables = environment()
    for name, own in (("WORLD_SIZE", comm.size), ("RANK", comm.rank)):
        given = variables.get(name, "")
        if given.isdigit() and int(given) != own:
            raise LaunchError(
                f"{name} is {given} in the environment, but {own} in MPI. This process was started "
                "by torchrun, or variables of another job were inherited. Start it by mpistrat run "
                "-n N program.py, mpiexec or srun, without torchrun, and do not set RANK and "
                "WORLD_SIZE."
            )


def set_environment(comm: MPI.Intracomm | None = None) -> None:
    """Set the variables by which PyTorch's libraries recognize a distributed job.

    **Collective** over `comm`. Sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``, ``LOCAL_WORLD_SIZE``,
    ``MASTER_ADDR`` and ``MASTER_PORT``, unless they are set. Call it before Lightning Fabric,
    Accelerate or torchmetrics read them; `init` does it too.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        The ranks of the job. Default: COMM_WORLD.

    Raises
    ------
    LaunchError
        If ``RANK`` or ``WORLD_SIZE`` is set and disagrees with MPI, as under torchrun.

    Examples
    --------
    >>> mst.set_environment()
    >>> os.environ["WORLD_SIZE"] == str(ms.MPIStrategy().size)
    True
    """
    job = _open_job(comm)
    host, port = job.strategy.broadcast_object(
        _free_address(job.world) if job.comm.rank == 0 else None
    )
    export_defaults(
        {
            "RANK": str(job.comm.rank),
            "WORLD_SIZE": str(job.comm.size),
            "LOCAL_RANK": str(job.world.local_rank),
            "LOCAL_WORLD_SIZE": str(len(job.world.ranks_of_node)),
            "MASTER_ADDR": host,
            "MASTER_PORT": str(port),
        }
    )


def _free_address(world: World) -> tuple[str, int]:
    """Return a name of this node that the other ranks reach, and a free port."""
    # With port 0 the system chooses one. The port is free again for the library that serves
    # MASTER_PORT.
    with socket.create_server(("", 0)) as server:
        return _reachable_name(world), int(server.getsockname()[1])


def _reachable_name(world: World) -> str:
    return "127.0.0.1" if len(world.hosts) == 1 else socket.gethostname()


def init(
    *,
    backend: str = "mpistrat",
    timeout: float | timedelta | None = None,
    comm: MPI.Intracomm | None = None,
    pg_options: Any = None,
) -> dist.ProcessGroup:
    """Start torch.distributed over MPI, and return the world group.

    **Collective** over `comm`. It does the same as `set_environment` followed by
    ``torch.distributed.init_process_group("mpistrat", init_method="mpi://")``.

    Parameters
    ----------
    backend : str
        ``"mpistrat"``, or one backend per device. With ``"cpu:mpistrat,cuda:nccl"`` NCCL handles
        CUDA tensors. With ``"cpu:mpistrat,cuda:mpistrat"`` it does too, but the ranks agree on each
        operation first. Both need PyTorch 2.14 and a GPU.
    timeout : float or timedelta, optional
        How long an operation waits for the other ranks; a number is in seconds. Default:
        ``MPISTRAT_TIMEOUT_S``.
    comm : mpi4py.MPI.Intracomm, optional
        The ranks of the job. Default: COMM_WORLD.
    pg_options : Options, optional
        Options of the world group.

    Returns
    -------
    torch.distributed.ProcessGroup
        The world group.

    Raises
    ------
    LaunchError
        If the ranks were not started by MPI's launcher, or if `backend` names CUDA and there is no
        GPU.
    NotImplementedError
        If `backend` names several devices, and PyTorch is older than 2.14.
    ValueError
        If the process has a world group already, or `timeout` is not above 0.

    Examples
    --------
    >>> group = mst.init()
    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
    """
    limit = _as_timedelta(timeout)
    backends = distributed_c10d.BackendConfig(dist.Backend(backend)).get_device_backend_map()
    if "mpistrat" in backends.values():
        check_devices(backends)
    set_environment(comm)
    dist.init_process_group(backend, init_method="mpi://", timeout=limit, pg_options=pg_options)
    world: Any = dist.group.WORLD
    return world


def strategy(group: dist.ProcessGroup | None = None) -> MPIStrategy:
    """Return the strategy that runs the collectives of a group. Local.

    It has the rank, the hosts, the options and the timeline of the group. Do not call a collective
    of the strategy while an asynchronous operation of the group is pending.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup, optional
        A group of the backend mpistrat. Default: the world group.

    Returns
    -------
    MPIStrategy
        The strategy of the group.

    Raises
    ------
    TypeError
        If the group has a different backend.

    Examples
    --------
    >>> mst.strategy().size == torch.distributed.get_world_size()
    True
    """
    found: Any = dist.group.WORLD if group is None else group
    carrier = getattr(backend_of(found), "_strategy", None)
    if not isinstance(carrier, MPIStrategy):
        raise TypeError(
            f"Expected a process group of the backend mpistrat, not {found!r}. Call "
            "mpistrat.torch.init() first."
        )
    return carrier


def backend_of(group: Any) -> Any:
    """Return the object that runs CPU operations: the group itself, or one of its backends."""
    cpu = torch.device("cpu")
    is_of_several = type(group) is dist.ProcessGroup and cpu in group._device_types
    return group._get_backend(cpu) if is_of_several else group


def _as_timedelta(timeout: float | timedelta | None) -> timedelta:
    if timeout is None:
        limit_s = settings().timeout_s
        return _NO_LIMIT if limit_s is None else timedelta(seconds=limit_s)
    limit = timeout if isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    if limit <= timedelta(0):
        raise ValueError(f"timeout must be above 0 s, not {limit.total_seconds():g} s.")
    return limit


def rendezvous(url: str, **kwargs: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield store, rank and size for ``init_method="mpi://"``. **Collective**."""
    job = _open_job(None)
    given = dict(parse_qsl(urlparse(url).query))
    for name, own in (("world_size", job.comm.size), ("rank", job.comm.rank)):
        if name in given and int(given[name]) not in (own, -1):
            raise LaunchError(
                f"init_process_group was given {name}={given[name]}, but it is {own} in MPI. "
                "Leave it out: mpi:// takes it from the launcher."
            )
    limit = min(kwargs.get("timeout") or _as_timedelta(None), _LONGEST_STORE)
    yield _open_store(job, limit), job.comm.rank, job.comm.size
    raise RuntimeError("A group over mpi:// cannot make its rendezvous again.")


def _open_store(job: _Job, limit: timedelta) -> Any:
    """Return a store for a new world group. **Collective**."""
    # One server for all groups: torch's needs five seconds to start, in one of fifteen cases.
    if job.store is None:
        job.store = _served_store(job, limit)
    job.num_groups += 1
    store = dist.PrefixStore(f"world {job.num_groups}", job.store)
    store.set_timeout(limit)
    return store


def _served_store(job: _Job, limit: timedelta) -> Any:
    """Return a store that rank 0 serves. **Collective**."""
    store = address = None
    if job.comm.rank == 0:
        host = _reachable_name(job.world)
        # Port 0: the store keeps the port that it gets, so no other process can take it in between.
        store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=limit)
        address = host, store.port
    host, port = job.strategy.broadcast_object(address)
    if store is None:
        store = dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=limit)
    return store


def check_place(ranks: Sequence[int], rank: int, size: int) -> None:
    """Raise for a group whose ranks differ from MPI's ranks."""
    comm = job_communicator()
    own = ranks[rank] if 0 <= rank < len(ranks) else -1
    if own == comm.rank and max(ranks) < comm.size and size == len(ranks):
        return
    raise LaunchError(
        f"Torch takes this process for rank {own}, in a job of at least {max(ranks) + 1} rank(s), "
        f"but it is rank {comm.rank} of {comm.size} in MPI. Start it by mpiexec or srun, without "
        'torchrun, and call mpistrat.torch.init(), or init_process_group("mpistrat", '
        'init_method="mpi://").'
    )


def check_devices(backends: Mapping[str, str]) -> None:
    """Raise if this process cannot create a group with these backends by device."""
    asked = ",".join(f"{device}:{backend}" for device, backend in backends.items())
    own = {device for device, backend in backends.items() if backend == "mpistrat"}
    if "cpu" not in own or own not in ({"cpu"}, {*backends}) or len(own) > 2:
        raise ValueError(
            f'The backend "{asked}" is not possible: mpistrat is for CPU tensors, and checks those '
            'of one other device. Use "mpistrat", "cpu:mpistrat,cuda:nccl" or '
            '"cpu:mpistrat,cuda:mpistrat".'
        )
    # Before PyTorch 2.14, Python code cannot create a backend.
    if len(backends) > 1 and "rank" not in (c10d.Backend.__init__.__doc__ or ""):
        raise NotImplementedError(
            f'The backend "{asked}" needs PyTorch 2.14 or newer, and this is {torch.__version__}. '
            'Use "mpistrat", and for CUDA tensors a group of their own: '
            'torch.distributed.new_group(backend="nccl").'
        )
    if backends.get("cuda") in ("mpistrat", "nccl") and not torch.cuda.is_available():
        raise LaunchError(
            f'The backend "{asked}" needs a GPU, and torch.cuda.is_available() is False in this '
            'process. Use "mpistrat" on machines without GPUs; on others look at '
            "CUDA_VISIBLE_DEVICES, and whether PyTorch was built for CUDA."
        )
