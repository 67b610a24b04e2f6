"""Cluster resolver: this rank's place in the job."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ClusterResolver"]


@dataclass(frozen=True)
class ClusterResolver:
    """Facts about the job and this rank's place in it."""

    task_id: int
    """The rank."""
    num_workers: int
    """The number of ranks."""
    local_rank: int
    """Number of this rank among those of its node."""
    hosts: tuple[str, ...]
    """One name per node."""
    launcher: str
    """``"slurm"``, ``"openmpi"``, ``"mpich"``, ``"intel"``, ``"flux"``, ``"pals"``, ``"lsf"`` (for
    jsrun), or ``"none"``."""
    task_type: str = "worker"
    """Always ``"worker"``: every rank computes."""
