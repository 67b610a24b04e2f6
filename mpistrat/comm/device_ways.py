"""In which ways the arrays of device memory can be reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mpistrat.arrays import Array, Device, is_on_host
from mpistrat.comm.device_copier import DeviceCopier
from mpistrat.comm.nccl import Link
from mpistrat.comm.staged import Copier

__all__ = ["DeviceWays", "solo_ways"]


@dataclass(frozen=True)
class DeviceWays:
    """What a strategy may do with device memory. The same on all ranks, the objects aside."""

    device: Device
    """Where the replica of this rank computes."""
    copier: Copier | None = None
    """For copies to the host and back; ``None`` where not every rank computes on a device. Device
    arrays are then host arrays, copied whole."""
    why_not_mpi: str = ""
    """Why MPI may not be given the arrays themselves; empty where it may."""
    why_not_nccl: str = "the replica computes on the host"
    """Why NCCL cannot be used; empty where it can."""
    link: Link | None = None
    """What NCCL is reached by, where it can be used."""

    @property
    def some_have_devices(self) -> bool:
        """Whether any rank computes on a device, the same on all ranks."""
        return self.copier is not None or bool(self.why_not_mpi)

    def places(self, arrays: Sequence[Array]) -> tuple[bool, ...]:
        """Return which of `arrays` are in device memory, and travel as such; ``()``: none. Local.

        That is agreed over ranks: the ways between devices are others than between hosts.
        """
        if self.copier is None:
            return ()
        places = tuple([self.is_on_device(array) for array in arrays])
        return places if any(places) else ()

    def is_on_device(self, array: Array) -> bool:
        """Return whether `array` lies in the memory of this rank's device. Local."""
        return not is_on_host(array) and bool(array.device.id == self.device.index)


def solo_ways(device: Device) -> DeviceWays:
    """Return the ways of a world of one rank without MPI, in which nothing moves. Local."""
    if device.kind != "gpu":
        return DeviceWays(device)
    return DeviceWays(device, DeviceCopier(device), why_not_nccl="there is one rank without MPI")
