"""A short look at how fast the ranks reach each other."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import numpy as np

from mpistrat.doctor.findings import Finding, ok, warning
from mpistrat.world import World

__all__ = ["Speed", "check_bandwidth", "measure_speed"]

_LARGE_BYTES = 8 * 2**20
_SLOWEST = 1e8
"""Bytes per second: a link of 1 Gbit/s has a little more."""


@dataclass(frozen=True)
class Speed:
    """Medians of a few MPI_Allreduce."""

    size: int
    large_s: float
    small_s: float
    copy_s: float
    """A copy of the large message in memory."""


def measure_speed(world: World) -> Speed:
    """Return how long reductions take, in well under a second. **Collective**."""
    from mpi4py import MPI

    def timed(num_bytes: int, samples: int) -> float:
        source = np.ones(num_bytes // 4, np.float32)
        target = np.empty_like(source)
        times = []
        for _ in range(samples):
            world.comm.Barrier()
            began = time.perf_counter()
            world.comm.Allreduce(source, target, MPI.SUM)
            times.append(time.perf_counter() - began)
        return statistics.median(times[1:])

    source = np.ones(_LARGE_BYTES // 4, np.float32)
    target = np.empty_like(source)
    copies = []
    for _ in range(4):
        began = time.perf_counter()
        np.copyto(target, source)
        copies.append(time.perf_counter() - began)
    return Speed(world.size, timed(_LARGE_BYTES, 6), timed(8, 30), statistics.median(copies[1:]))


def check_bandwidth(speed: Speed, num_nodes: int, is_crowded: bool) -> Finding:
    """Return whether the ranks are as far apart as over a slow network. Local.

    Parameters
    ----------
    speed : Speed
    num_nodes : int
    is_crowded : bool
        Whether ranks share cores, which says more of the time than the network does.
    """
    copy = f"memory copies {_LARGE_BYTES / speed.copy_s / 1e9:.1f} GB/s"
    if speed.size == 1:
        return ok("bandwidth", f"one rank: {copy}")
    rate = _LARGE_BYTES / speed.large_s
    seen = (
        f"Allreduce of 8 MiB in {speed.large_s * 1e3:.1f} ms ({rate / 1e9:.2f} GB/s), of 8 B in "
        f"{speed.small_s * 1e6:.0f} us; {copy}"
    )
    if rate < _SLOWEST and not is_crowded:
        between = "nodes" if num_nodes > 1 else "ranks of one node"
        return warning(
            "bandwidth",
            seen,
            f"This is the speed of slow Ethernet between {between}.",
            "UCX_LOG_LEVEL=info (UCX) or FI_LOG_LEVEL=info (libfabric) shows which network is "
            "used; the module of the site's own MPI knows the fast one",
        )
    return ok("bandwidth", seen)
