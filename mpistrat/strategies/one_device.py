"""One replica on one device, without MPI."""

from __future__ import annotations

import platform

from mpistrat.arrays import resolve_device
from mpistrat.collectives import Collectives
from mpistrat.launcher import find_launcher
from mpistrat.strategies.base import Strategy
from mpistrat.strategies.cluster_resolver import ClusterResolver
from mpistrat.strategies.device_strings import parse_place
from mpistrat.strategies.extended import StrategyExtended

__all__ = ["OneDeviceStrategy"]


class OneDeviceStrategy(Strategy):
    """One replica in this process. Otherwise like `MPIStrategy` on one rank.

    Parameters
    ----------
    device : str
        ``"cpu:0"``, ``"gpu:K"``, or a longer form such as ``"/device:CPU:0"``.

    Raises
    ------
    TypeError, ValueError
        For an unknown device.
    LaunchError
        If the GPU asked for is not there.
    """

    def __init__(self, device: str = "cpu:0") -> None:
        if not isinstance(device, str):
            raise TypeError(f'device must be a string such as "cpu:0", not {device!r}.')
        place = parse_place(device, num_tasks=1)
        own_device = resolve_device(f"{place.kind}:{place.index}", local_rank=0)
        super().__init__(StrategyExtended(Collectives.solo(own_device)))

    @property
    def cluster_resolver(self) -> ClusterResolver:
        """The facts about a world of one. Local."""
        launcher = find_launcher()
        host = launcher.node_name or platform.node()
        return ClusterResolver(0, 1, 0, (host,), launcher.name)

    def __repr__(self) -> str:
        return f"<OneDeviceStrategy on {self.extended.device}>"
