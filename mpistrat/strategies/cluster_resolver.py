"""Where a rank stands in its cluster, and printing on one rank of it."""

from __future__ import annotations

import builtins
from dataclasses import dataclass
from typing import Any

from mpistrat import context
from mpistrat.mpi.world import world_rank


@dataclass(frozen=True)
class ClusterResolver:
    """Facts about the job and this rank's place in it."""

    task_id: int
    """The rank; of a parameter-server job the number among those of its `task_type`."""
    num_workers: int
    """The number of ranks; of a parameter-server job that of its workers."""
    local_rank: int
    """Number of this rank among those of its node."""
    hosts: tuple[str, ...]
    """One name per node."""
    launcher: str
    """``"slurm"``, ``"openmpi"``, ``"mpich"``, ``"intel"``, ``"flux"``, ``"pals"``, ``"lsf"`` (for
    jsrun), or ``"none"``."""
    task_type: str = "worker"
    """``"worker"``: every rank computes. `ParameterServerStrategy` has a ``"chief"`` and servers,
    ``"ps"``, too."""


def print_on_chief(
    *values: object,
    sep: str | None = " ",
    end: str | None = "\n",
    file: Any = None,
    flush: bool = True,
) -> None:
    """Print on rank 0 alone, as the builtin ``print`` does. Local.

    Rank 0 is that of the strategy in scope, and outside every scope that of the job. The other
    ranks do nothing. `flush` is true by default, because launchers read through pipes.

    Examples
    --------
    >>> ms.print("epoch", 1)
    epoch 1
    """
    frame = context.current()
    collectives = None if frame is None else frame.collectives
    # A strategy of one rank exists on each rank of the job.
    is_alone = collectives is None or collectives.size == 1
    if (world_rank() if is_alone or collectives is None else collectives.rank) == 0:
        builtins.print(*values, sep=sep, end=end, file=file, flush=flush)
