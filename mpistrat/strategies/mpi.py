"""MPIStrategy: replicas on MPI ranks, each on one or on several."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mpistrat import context
from mpistrat.agreement.call import AllOrNone
from mpistrat.arguments import as_bool, as_integer
from mpistrat.arrays import Device
from mpistrat.collectives.collectives import Collectives, check_can_order
from mpistrat.comm.device_reducers import DeviceCapabilities
from mpistrat.comm.selection import check_options
from mpistrat.failures import flight_dumps
from mpistrat.failures.connect import open_channel
from mpistrat.failures.losses import explained_losses
from mpistrat.failures.watchdog import watch_device
from mpistrat.layout import Layout
from mpistrat.mpi.world import (
    World,
    communicator,
    library_version,
    open_world,
    world_ranks,
    world_size,
)
from mpistrat.native import HOW_TO_COMPILE, missing_libraries
from mpistrat.options import CommunicationOptions
from mpistrat.partitioners import RanksPartitioner
from mpistrat.settings import Settings, settings
from mpistrat.strategies.cluster_resolver import ClusterResolver
from mpistrat.strategies.devices import (
    Offer,
    choose_devices,
    make_offer,
    open_device_capabilities,
    prepare_device,
)
from mpistrat.strategies.extended import StrategyExtended
from mpistrat.strategies.rank_groups import open_groups
from mpistrat.strategies.strategy import Strategy
from mpistrat.system.text import counted

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpistrat.agreement.channel import Channel

_logger = logging.getLogger("mpistrat")


class MPIStrategy(Strategy):
    """Synchronous data parallelism over MPI: each rank owns one replica, or a shard of one.

    **Collective** over `comm`. Starts MPI if the program has not.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm, optional
        Communicator of the ranks that take part. Default: COMM_WORLD. mpistrat uses a private
        duplicate.
    device : str
        Device of this rank's replica: ``"auto"``, ``"cpu"``, ``"gpu"`` or ``"gpu:K"``. With
        ``"auto"`` the rank gets its own GPU, the nearest free one that CuPy sees, or else the host.
        ``"cuda"`` means ``"gpu"``.
    communication_options : CommunicationOptions, optional
        Options of every collective that gets none of its own.
    variable_partitioner : callable or "ranks", optional
        Called with shape and dtype of each mirrored variable that has axes, like the functions of
        `mpistrat.partitioners`. If it wants several parts, an `ms.ShardedVariable` is created.
        ``"ranks"`` cuts the first axis into one part per rank.
    ranks_per_replica : int
        Number of consecutive ranks that compute one replica together (model parallelism). It must
        divide the number of ranks: rank = replica x `ranks_per_replica` + shard. See
        `ReplicaContext.shards`, and the argument `split_axis` of `Variable`.
    num_replicas : int, optional
        Number of replicas, at least the number of ranks. Each rank runs its share, one replica
        after the other, and results have the same bits on any number of ranks. By default each rank
        has one replica.
    elastic : bool
        Whether the job continues when the process of a rank dies. The other ranks then repeat the
        interrupted call, and compute the replicas of the lost rank. Needs `num_replicas`, and for
        several ranks Open MPI's ``mpiexec --with-ft ulfm``.

    Raises
    ------
    LaunchError
        If the launcher started more tasks than MPI sees, a GPU is missing, two ranks would use the
        same GPU, or ranks run different versions of the package.
    TypeError, ValueError
        For a bad argument or setting, on every rank.
    NotImplementedError
        For two of `variable_partitioner`, `ranks_per_replica` and `num_replicas`, or
        `num_replicas` with `wire_dtype`.

    Examples
    --------
    >>> strategy = ms.MPIStrategy()
    >>> with strategy.scope():
    ...     weight = ms.Variable(np.zeros(2))
    >>> def step():
    ...     replica = ms.get_replica_context()
    ...     return weight.value() + replica.all_reduce("mean", np.ones(2))
    >>> mean = strategy.run(step)
    >>> strategy.local_results(mean)
    (array([1., 1.]),)
    >>> float(strategy.reduce("sum", 1.0)) == strategy.size
    True

    Each rank gets its part of each batch:

    >>> batches = strategy.distribute_dataset(ms.data.Dataset.range(8).batch(4))
    >>> [int(strategy.reduce("sum", batch, axis=0)) for batch in batches]
    [6, 22]

    Outside `run`, collectives are called with this rank's value:

    >>> strategy.gather(np.array([strategy.rank]), axis=0).tolist() == [*range(strategy.size)]
    True

    Python objects are sent as pickle:

    >>> strategy.broadcast_object({"seed": 7})
    {'seed': 7}
    """

    _cluster_resolver: ClusterResolver
    _extended_class: type[StrategyExtended] = StrategyExtended

    def __init__(
        self,
        comm: MPI.Intracomm | None = None,
        device: str = "auto",
        communication_options: CommunicationOptions | None = None,
        variable_partitioner: Callable[..., Sequence[int]] | str | None = None,
        ranks_per_replica: int = 1,
        num_replicas: int | None = None,
        elastic: bool = False,
    ) -> None:
        prepare_device(device)
        self._arguments = (
            device,
            communication_options,
            variable_partitioner,
            ranks_per_replica,
            num_replicas,
            as_bool("elastic", elastic),
        )
        if elastic:
            from mpistrat.elastic.job import job  # most programs do not need it

            job.open(self, comm, num_replicas, self._connect)
        else:
            self._connect(communicator(comm))
        context.note_open(self)

    def _connect(self, comm: MPI.Intracomm) -> None:
        """Connect this rank to the others of `comm`. **Collective**."""
        with explained_losses(comm, type(self).__name__):
            self._open(comm, *self._arguments)

    def _reopen(self, comm: MPI.Intracomm) -> None:
        """Continue with the ranks of `comm`, which are the survivors. **Collective**."""
        fresh: MPIStrategy = object.__new__(type(self))
        # Chosen by its new rank on the node, it would get a different GPU, without its variables.
        own, device = self.extended.device, self._arguments[0]
        device = f"gpu:{own.index}" if own.kind == "gpu" else device
        fresh._arguments = (device, *self._arguments[1:])
        fresh._connect(comm)
        self._extended._take_over(fresh._extended)
        self._cluster_resolver = fresh._cluster_resolver

    def _open(
        self,
        comm: MPI.Intracomm,
        device: str,
        communication_options: CommunicationOptions | None,
        variable_partitioner: Callable[..., Sequence[int]] | str | None,
        ranks_per_replica: int,
        num_replicas: int | None,
        elastic: bool,
    ) -> None:
        kind = type(self).__name__
        channel = open_channel(comm, _opening_limit_s(communication_options), elastic)
        options = CommunicationOptions()
        if communication_options is not None:
            options = communication_options
        # From here on an error on one rank is raised on all. Otherwise the others would wait for it
        # in the next collective of the setup.
        with AllOrNone(channel, kind):
            if not isinstance(options, CommunicationOptions):
                raise TypeError(
                    f"communication_options must be CommunicationOptions, not {options!r}."
                )
            variable_partitioner = _as_partitioner(variable_partitioner, comm.size)
            layout = Layout.divided(
                comm.size, comm.rank, as_integer("ranks_per_replica", ranks_per_replica)
            )
            num_shards = layout.ranks_per_replica
            if num_shards > 1 and variable_partitioner is not None:
                raise NotImplementedError(
                    f"variable_partitioner cuts variables over all ranks, which ranks_per_replica="
                    f"{num_shards} divides into replicas. Leave one of them out, or cut variables "
                    "over the ranks of a replica: ms.Variable(..., split_axis=0)."
                )
            if num_replicas is not None:
                _check_is_alone(layout, variable_partitioner)
                total = as_integer("num_replicas", num_replicas)
                layout = Layout.shared(total, comm.size, comm.rank)
                check_can_order(options)
            chosen = settings()
            channel.timeout_s = chosen.timeout_s
            flight_dumps.install(
                channel,
                world_ranks(comm),
                library_version(),
                chosen.flight_dir,
                chosen.flight_length,
            )
            if chosen.timeline is not None:
                from mpistrat.tracing import trace  # most jobs do not need it

                trace.start(chosen.timeline, world_ranks(comm)[comm.rank], world_size())
            if chosen.fault:
                from mpistrat.faults import inject_from_environment

                inject_from_environment(channel)
        world = open_world(comm)
        with AllOrNone(channel, kind, layout.difference):
            self._check_world(world)
            offer = make_offer(device, world.local_rank)
            if offer is None:
                # Ranks with a GPU check their options later, when they know what all ranks can do
                # together.
                check_options(options, DeviceCapabilities(Device("cpu")))
        capabilities = _open_devices(channel, world, offer, chosen)
        if capabilities.link is not None:
            watch_device(channel, capabilities.link)
        if capabilities.some_have_devices:
            with AllOrNone(channel, kind):
                check_options(options, capabilities)
        num_mates = len(world.ranks_of_node)
        if num_mates > world.num_cores and world.local_rank == 0 and not chosen.oversubscribe:
            _warn_of_shared_cores(num_mates, world.num_cores)
        if comm.size > 1:
            _warn_of_missing_kernels()
        kind_of_ranks = Collectives
        if elastic:  # most programs do not need it
            from mpistrat.elastic.job import ElasticCollectives

            kind_of_ranks = ElasticCollectives
        ranks = kind_of_ranks(
            channel, capabilities, options, layout, is_deterministic=num_replicas is not None
        )
        super().__init__(self._extended_class(ranks, open_groups(ranks)))
        self.extended._variable_partitioner = variable_partitioner
        self._cluster_resolver = ClusterResolver(
            task_id=world.rank,
            num_workers=world.size,
            local_rank=world.local_rank,
            hosts=world.hosts,
            launcher=world.launcher.name,
        )
        self._library = library_version()
        _logger.info(
            "%s: size %d, nodes %d, launcher %s, device %s, %s",
            kind,
            world.size,
            len(world.hosts),
            world.launcher.name,
            self.extended.device,
            self._library,
        )

    def _check_world(self, world: World) -> None:
        """Raise an error if the strategy cannot run on these ranks."""

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """Position of this rank in the cluster. Local."""
        return self._cluster_resolver

    def __repr__(self) -> str:
        num_nodes = len(self._cluster_resolver.hosts)
        nodes = "1 node" if num_nodes == 1 else f"{num_nodes} nodes"
        layout = context.layout_of(self)
        part = f", {layout.part}," if layout.part else ""
        return (
            f"<{type(self).__name__} rank {self.rank} of {self.size}{part} on "
            f"{self.extended.device}, {nodes}, "
            f"{self._library.partition(',')[0].replace(' Version:', '')}>"
        )


def _as_partitioner(
    given: Callable[..., Sequence[int]] | str | None, num_ranks: int
) -> Callable[..., Sequence[int]] | None:
    """Return the function that an argument ``variable_partitioner`` means, or raise."""
    if given == "ranks":
        return RanksPartitioner(num_ranks)
    if isinstance(given, str):
        raise ValueError(f'variable_partitioner is {given!r}, but the only name is "ranks".')
    if given is not None and not callable(given):
        raise TypeError(
            'variable_partitioner must be "ranks" or a callable, such as a partitioner of '
            f"mpistrat.partitioners, not {given!r}."
        )
    return given


def _check_is_alone(layout: Layout, variable_partitioner: object) -> None:
    """Raise an error for arguments besides ``num_replicas=`` that divide anything over ranks."""
    if layout.ranks_per_replica > 1 or variable_partitioner is not None:
        raise NotImplementedError(
            "num_replicas cannot be combined with ranks_per_replica or a variable_partitioner, "
            "because these divide values by the number of ranks. Leave one of them out."
        )


def _open_devices(
    channel: Channel, world: World, offer: Offer | None, chosen: Settings
) -> DeviceCapabilities:
    """Choose a device for each rank, and return their capabilities. **Collective**."""
    offers: list[Offer | None] = world.comm.allgather(offer)
    # Every rank has all offers, so all decide the same: a rank without a GPU must take part in the
    # collectives below if any rank has a GPU.
    if not any(offers):
        return DeviceCapabilities(Device("cpu"))
    with AllOrNone(channel, "MPIStrategy"):
        devices = choose_devices(offers, world.node_of_rank, chosen.share_gpus)
    found = open_device_capabilities(world, devices[world.rank], chosen.cuda_aware)
    return replace(found, of_ranks=devices)


@functools.cache
def _warn_of_missing_kernels() -> None:
    missing = missing_libraries()
    if missing:
        warnings.warn(
            f"mpistrat was installed without its compiled kernels: {' and '.join(missing)} are "
            f"slower. {HOW_TO_COMPILE}",
            RuntimeWarning,
            stacklevel=3,
        )


@functools.cache
def _warn_of_shared_cores(num_ranks: int, num_cores: int) -> None:
    _logger.warning(
        "%d ranks on a node share %s, so each waits while another one runs. Start fewer ranks, or "
        "ask for more cores: srun --cpus-per-task=1, mpiexec --bind-to none (Open MPI) or "
        "-bind-to none (MPICH). MPISTRAT_OVERSUBSCRIBE=on switches this warning off.",
        num_ranks,
        counted(num_cores, "core"),
    )


def _opening_limit_s(options: object) -> float | None:
    """Return how long to wait for the other ranks, before options and settings are checked."""
    limit_s = getattr(options, "timeout_seconds", None)
    if isinstance(limit_s, int | float):
        return limit_s
    try:
        return settings().timeout_s
    except ValueError:
        return Settings().timeout_s


context.register_world(lambda: MPIStrategy(device="cpu"))
