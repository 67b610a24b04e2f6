"""Groups of ranks: the replicas, and the ranks of one replica, each with its collectives."""

from __future__ import annotations

import dataclasses

from mpistrat.agreement.channel import Channel
from mpistrat.agreement.group_channel import GroupChannel
from mpistrat.arrays import Device
from mpistrat.collectives.collectives import Collectives
from mpistrat.comm.device_reducers import DeviceCapabilities
from mpistrat.comm.transport import SoloTransport
from mpistrat.failures import flight_dumps
from mpistrat.failures.connect import open_group
from mpistrat.mpi.world import library_version, open_world, world_ranks
from mpistrat.options import CommunicationImplementation, CommunicationOptions
from mpistrat.settings import settings
from mpistrat.strategies.devices import open_device_capabilities


@dataclasses.dataclass(frozen=True)
class RankGroups:
    """The groups that a rank belongs to, besides the group of all ranks."""

    replicas: Collectives
    """Collectives of the ranks with this rank's shard, one in each replica."""
    shards: Collectives
    """Collectives of the ranks of this rank's replica."""

    @classmethod
    def of_one_rank(cls, ranks: Collectives) -> RankGroups:
        """Return the groups for a strategy in which each rank is a replica."""
        channel = GroupChannel(SoloTransport(), None, ranks.channel, [ranks.rank])
        return cls(ranks, _alone(channel, ranks.device, ranks.options))

    def copied(self, ranks: Collectives) -> RankGroups:
        """Return collectives for another strategy of the same `ranks`."""
        if ranks.layout.ranks_per_replica == 1:
            return RankGroups.of_one_rank(ranks)
        return RankGroups(_again(self.replicas), _again(self.shards))

    def close(self, error: RuntimeError) -> None:
        """Free what no other strategy uses. **Collective**, before all ranks close."""
        self.shards.close(error)
        self.replicas.close(error)


def open_groups(ranks: Collectives) -> RankGroups:
    """Return the groups that the layout of all `ranks` says. **Collective**."""
    layout = ranks.layout
    if layout.ranks_per_replica == 1:
        return RankGroups.of_one_rank(ranks)
    key = layout.ranks_per_replica
    # All ranks open their group of replicas first. If the orders differed, two ranks could each
    # wait in a group that the other has yet to open.
    replicas = open_group(ranks.channel, ("replicas", key), layout.ranks_of_shard(layout.shard))
    shards = open_group(ranks.channel, ("shards", key), layout.ranks_of_replica)
    return RankGroups(_collectives(replicas, ranks), _collectives(shards, ranks))


def _collectives(channel: Channel, ranks: Collectives) -> Collectives:
    """Return the collectives of a group of `ranks`. **Collective** over the group."""
    if channel.size == 1:
        return _alone(channel, ranks.device, ranks.options)
    chosen, transport = settings(), channel.transport
    comm = transport.comm  # type: ignore[attr-defined]
    flight_dumps.install(
        channel, world_ranks(comm), library_version(), chosen.flight_dir, chosen.flight_length
    )
    capabilities = DeviceCapabilities(ranks.device)
    if ranks.capabilities.some_have_devices:
        capabilities = open_device_capabilities(open_world(comm), ranks.device, chosen.cuda_aware)
    return Collectives(channel, capabilities, ranks.options, is_part=True)


def _alone(channel: Channel, device: Device, options: CommunicationOptions) -> Collectives:
    """Return the collectives of a group of one rank."""
    # There is no other rank that NCCL or MPI could reach.
    options = dataclasses.replace(options, implementation=CommunicationImplementation.AUTO)
    return Collectives(channel, DeviceCapabilities.solo(device), options, is_part=True)


def _again(group: Collectives) -> Collectives:
    return Collectives(group.channel, group.capabilities, group.options, is_part=True)
